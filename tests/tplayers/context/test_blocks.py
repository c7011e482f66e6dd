"""Blocks of attention: merged, they are attention to all keys; the kernel and torch's operators agree."""

import pytest
import torch

from tplayers.context.blocks import BlockMask, attend, attend_backward, merge


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_kernel_against_operators(dtype, causal, biased):
    """A mask that keeps everything takes the way of the operators."""
    if causal and biased:
        pytest.skip("a bias has the causal mask, too")
    q, k, v = (
        draw(2, 4, 5, 6, dtype=dtype),
        draw(2, 2, 5, 6, seed=1, dtype=dtype),
        draw(2, 2, 5, 6, seed=2, dtype=dtype),
    )
    bias = draw(2, 1, 1, 5, seed=3).to(dtype) if biased else None
    kept = torch.ones(2, 4, 5, 5, dtype=torch.bool)
    masks = [BlockMask(causal, bias), BlockMask(causal, bias, 0.0, kept)]
    forwards = [attend(q, k, v, mask) for mask in masks]
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    for one, other in zip(*forwards, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=bound, atol=bound)
    grad = draw(2, 4, 5, 6, seed=4, dtype=dtype)
    out, lse = forwards[0]
    backwards = [attend_backward(grad, q, k, v, out, lse, mask) for mask in masks]
    for one, other in zip(*backwards, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=2 * bound, atol=2 * bound)


@pytest.mark.parametrize("apart", [0.0, 50.0, 800.0, -800.0, 1e38, -1e38])
def test_merge_overflows_nowhere(apart):
    """Blocks of scores that lie far apart, in float32: exp(800) would be infinite."""
    out, lse = draw(1, 1, 3, 2), draw(1, 1, 3)
    more, more_lse = draw(1, 1, 3, 2, seed=1), draw(1, 1, 3, seed=1) + apart
    both = torch.stack((lse, more_lse))
    shares = (both - both.logsumexp(0)).exp()
    expected = shares[0, ..., None] * out + shares[1, ..., None] * more
    found, total = out.float(), lse.float()
    merge(found, total, more.float(), more_lse.float())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(total.double(), both.logsumexp(0), rtol=1e-5, atol=1e-5)


def test_a_block_of_padding_alone_adds_nothing():
    q, k, v = (draw(1, 2, 4, 4, seed=n, dtype=torch.float32) for n in range(3))
    hidden = torch.full((1, 1, 1, 4), torch.finfo(torch.float32).min / 2)
    out, lse = attend(q, k, v, BlockMask())
    kept = out.clone(), lse.clone()
    merge(out, lse, *attend(q, k, v, BlockMask(bias=hidden)))
    assert torch.equal(out, kept[0]) and torch.equal(lse, kept[1])
    for gradient in attend_backward(torch.ones_like(q), q, k, v, out, lse, BlockMask(bias=hidden))[:2]:
        assert (gradient == 0).all()
