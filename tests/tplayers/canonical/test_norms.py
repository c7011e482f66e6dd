"""Norms whose parameters' gradients are sums over blocks of rows: torch's values, and the bits of a rank alone."""

import pytest
import torch
import torch.nn.functional as F

from tplayers.canonical.norms import layer_norm, rms_norm

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.every_size]

S, H = 16, 40


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def normed(name, shards, split, dtype, rows=S):
    """Output, and the gradients of x, weight and bias."""
    x, gradient = drawn(rows, 1, H).to(dtype), drawn(rows, 1, H, seed=1).to(dtype)
    if split:
        x, gradient = (one.chunk(shards.comm.size)[shards.comm.rank].clone() for one in (x, gradient))
    weight, bias = ((drawn(H, seed=seed) + 1).to(dtype).requires_grad_() for seed in (2, 3))
    x.requires_grad_()
    if name == "layer":
        y, parameters = layer_norm(x, weight, bias, 1e-5, shards, split=split), [weight, bias]
    else:
        y, parameters = rms_norm(x, weight, 1e-5, shards, split=split), [weight]
    return y.detach(), *torch.autograd.grad(y, [x, *parameters], gradient)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["layer", "rms"])
def test_bits(shards, alone, name, dtype, split):
    right, found = normed(name, alone, False, dtype), normed(name, shards, split, dtype)
    for number, (one, other) in enumerate(zip(right, found, strict=True)):
        whole = not split or number > 1
        assert torch.equal(other, one if whole else one.chunk(shards.comm.size)[shards.comm.rank]), number


@pytest.mark.sizes(2)
@pytest.mark.parametrize("rows", [S, 33, 1])
@pytest.mark.parametrize("name", ["layer", "rms"])
def test_values(alone, name, rows):
    x, weight, bias = drawn(rows, 1, H).requires_grad_(), drawn(H, seed=2) + 1, drawn(H, seed=3) + 1
    parameters = [weight.requires_grad_(), bias.requires_grad_()][: 2 if name == "layer" else 1]
    y = F.layer_norm(x, (H,), weight, bias) if name == "layer" else F.rms_norm(x, (H,), weight, 1e-5)
    expected = y.detach(), *torch.autograd.grad(y, [x, *parameters], drawn(rows, 1, H, seed=1))
    for one, other in zip(normed(name, alone, False, torch.float64, rows), expected, strict=True):
        torch.testing.assert_close(one, other)
