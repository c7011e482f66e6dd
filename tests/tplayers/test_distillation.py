"""The loss of distillation against torch's KLDivLoss on whole logits."""

import pytest
import torch
import torch.nn.functional as F

from tplayers import vocab_parallel_distillation_loss

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 4)]


def logits(seed, vocab, scale=3.0):
    return scale * torch.randn(5, 3, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 7.0])
@pytest.mark.parametrize("vocab", [16, 13, 3])
def test_loss_and_gradient_are_torchs(group, temperature, vocab):
    """The mean of a batch there is the sum over the rows, divided by their number. With 3 of 16 columns a rank has padding alone."""
    student, teacher = logits(1, 16).requires_grad_(), logits(2, 16)
    rows = [one[..., :vocab].reshape(-1, vocab) / temperature for one in (student, teacher)]
    truth = F.kl_div(F.log_softmax(rows[0], -1), F.softmax(rows[1], -1), reduction="batchmean") * temperature**2
    (expected,) = torch.autograd.grad(truth, student)
    mine = group.mine(student.detach()).requires_grad_()
    losses = vocab_parallel_distillation_loss(
        mine, group.mine(teacher), group.comm, temperature=temperature, vocab_size=vocab
    )
    assert losses.shape == (5, 3) and bool((losses >= -1e-12).all())
    torch.testing.assert_close(group.same(losses).mean(), truth.detach(), rtol=1e-10, atol=1e-12)
    losses.mean().backward()
    torch.testing.assert_close(group.joined(mine.grad), expected, rtol=1e-10, atol=1e-12)


def test_equal_models_and_large_logits(group):
    """The loss is 0, and its gradient, where both are equal; no power overflows."""
    one = logits(3, 16, scale=1e4).requires_grad_()
    mine = group.mine(one.detach()).requires_grad_()
    losses = vocab_parallel_distillation_loss(mine, mine, group.comm, temperature=2.0)
    assert not losses.any()
    losses.sum().backward()
    assert not mine.grad.any()
    other = vocab_parallel_distillation_loss(mine, group.mine(logits(4, 16, scale=1e4)), group.comm)
    assert bool(other.isfinite().all()) and bool((other > 100).any())


def test_half_precision_is_computed_in_float32(group):
    student, teacher = (group.mine(logits(seed, 16)) for seed in (1, 2))
    expected = vocab_parallel_distillation_loss(student.bfloat16().double(), teacher, group.comm, temperature=2.0)
    half = student.bfloat16().requires_grad_()
    found = vocab_parallel_distillation_loss(half, teacher, group.comm, temperature=2.0)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.detach().double(), expected, rtol=1e-4, atol=1e-4)
    found.sum().backward()
    assert half.grad.dtype == torch.bfloat16


def test_bad_input(group):
    x = torch.zeros(2, 4)
    for temperature in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="temperature="):
            vocab_parallel_distillation_loss(x, x, group.comm, temperature=temperature)
    with pytest.raises(ValueError, match="differ in shape"):
        vocab_parallel_distillation_loss(x, x[:1], group.comm)
    with pytest.raises(ValueError, match="is not within the"):
        vocab_parallel_distillation_loss(x, x, group.comm, vocab_size=4 * group.size + 1)
