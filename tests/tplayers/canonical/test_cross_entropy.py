"""The cross-entropy of canonical shards: torch's values in float64, and the bits of a rank alone."""

import pytest
import torch
import torch.nn.functional as F

from tplayers.canonical.cross_entropy import cross_entropy

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.every_size]

S, WIDTH = 9, 12


def losses(shards, dtype, vocab_size):
    """Losses and the gradient of this rank's logits, with one target that does not count."""
    logits = torch.randn(4, S, 1, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype) * 5
    target = torch.randint(vocab_size, (S, 1), generator=torch.Generator().manual_seed(1))
    target[3] = -100
    part = logits[shards.first : shards.first + shards.own].clone().requires_grad_()
    found = cross_entropy(part * 1.0, target, shards, vocab_size=vocab_size)
    found.backward(torch.linspace(0.5, 2, S, dtype=found.dtype).view(S, 1))
    return logits, target, found.detach(), part.grad


@pytest.mark.parametrize("vocab_size", [4 * WIDTH, 2 * WIDTH + 5, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_cross_entropy(shards, alone, dtype, vocab_size):
    logits, target, right, of_logits = losses(alone, dtype, vocab_size)
    _, _, found, mine = losses(shards, dtype, vocab_size)
    assert torch.equal(found, right) and found.dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert torch.equal(mine, of_logits[shards.first : shards.first + shards.own])
    if dtype == torch.float64:
        whole = logits.permute(1, 2, 0, 3).reshape(S, -1)[:, :vocab_size].requires_grad_()
        expected = F.cross_entropy(whole, target[:, 0], reduction="none")
        torch.testing.assert_close(right[:, 0], expected.detach())
        (gradient,) = torch.autograd.grad(expected, whole, torch.linspace(0.5, 2, S, dtype=torch.float64))
        flat = of_logits.permute(1, 2, 0, 3).reshape(S, -1)
        torch.testing.assert_close(flat[:, :vocab_size], gradient)
        assert not flat[:, vocab_size:].any()


def test_a_target_outside_the_vocabulary(shards):
    with pytest.raises(ValueError, match="a target lies outside 0 to 12 and is not ignore_index=-100"):
        cross_entropy(torch.zeros(shards.own, 1, 1, WIDTH), torch.tensor([[13]]), shards, vocab_size=13)
