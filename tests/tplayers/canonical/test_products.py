"""Products in canonical shards: their values against float64, and their bits on several ranks against those on one."""

import pytest
import torch

from tests.support.exact import in_pairs
from tplayers.canonical.products import ColumnWeight, columns, one_batch, replicated, rows

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.every_size]

S, IN, OUT = 8, 24, 40


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def mine(x, shards, dim=0):
    return x.chunk(shards.comm.size, dim=dim)[shards.comm.rank].clone()


def fan_out(shards, split, x, weight, bias, gradient):
    """Output shards and gradients of a column-parallel product of two blocks; all whole but for this rank's parts."""
    blocks = weight.view(2, OUT // 2, IN)
    part = mine(blocks, shards, 1).reshape(-1, IN).requires_grad_()
    of_bias = mine(bias.view(2, -1), shards, 1).reshape(-1).requires_grad_()
    here = (mine(x, shards) if split else x.clone()).requires_grad_()
    (y,) = columns(here, [ColumnWeight(part, of_bias, 2)], shards, split=split)
    y.backward(mine(gradient, shards, 1).reshape(y.shape))
    return y.detach(), here.grad, part.grad, of_bias.grad


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_columns(shards, alone, dtype, split):
    x, weight, bias = drawn(S, 1, IN, dtype=dtype), drawn(OUT, IN, seed=1, dtype=dtype), drawn(OUT, seed=2, dtype=dtype)
    gradient = drawn(2, 4, S, 1, OUT // 8, seed=3, dtype=dtype)
    y, of_x, of_weight, of_bias = fan_out(alone, False, x, weight, bias, gradient)
    found = fan_out(shards, split, x, weight, bias, gradient)
    assert torch.equal(found[0], mine(y.view(2, 4, S, 1, -1), shards, 1).reshape(found[0].shape))
    assert torch.equal(found[1], mine(of_x, shards) if split else of_x)
    assert torch.equal(found[2], mine(of_weight.view(2, -1, IN), shards, 1).reshape(-1, IN))
    assert torch.equal(found[3], mine(of_bias.view(2, -1), shards, 1).reshape(-1))
    if dtype == torch.float64:
        whole = y.view(2, 4, S, -1).permute(2, 0, 1, 3).reshape(S, OUT)
        torch.testing.assert_close(whole, x[:, 0] @ weight.t() + bias)
        flat = gradient.view(2, 4, S, -1).permute(2, 0, 1, 3).reshape(S, OUT)
        torch.testing.assert_close(of_x[:, 0], flat @ weight)
        torch.testing.assert_close(of_weight, flat.t() @ x[:, 0])
        torch.testing.assert_close(of_bias, flat.sum(0))


def tree(shards, split, parts, weight, bias, gradient):
    """Output and gradients of a row-parallel product. On several ranks the weight lies transposed."""
    here = torch.stack(parts[shards.first : shards.first + shards.own]).requires_grad_()
    part, of_bias = mine(weight, shards, 1).requires_grad_(), bias.clone().requires_grad_()
    if shards.comm.size > 1 or split:
        part.data = part.data.t().contiguous().t()
    y = rows(here, part, of_bias, shards, split=split)
    y.backward(mine(gradient, shards) if split else gradient)
    return y.detach(), here.grad, part.grad, of_bias.grad


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_rows(shards, alone, dtype, split):
    parts = [drawn(S, 1, IN // 4, seed=n, dtype=dtype) for n in range(4)]
    weight, bias, gradient = (drawn(*shape, seed=9, dtype=dtype) for shape in ((OUT, IN), (OUT,), (S, 1, OUT)))
    y, of_parts, of_weight, of_bias = tree(alone, False, parts, weight, bias, gradient)
    found = tree(shards, split, parts, weight, bias, gradient)
    assert torch.equal(found[0], mine(y, shards) if split else y)
    right = of_parts[shards.first : shards.first + shards.own]
    assert torch.equal(found[1], right)
    assert torch.equal(found[2], mine(of_weight, shards, 1)) and torch.equal(found[3], of_bias)
    assert of_weight.is_contiguous() and found[2].t().is_contiguous() == (shards.comm.size > 1 or split)
    products = [part[:, 0] @ piece.t() for part, piece in zip(parts, weight.chunk(4, dim=1), strict=True)]
    if dtype == torch.float64:
        torch.testing.assert_close(y[:, 0], torch.cat(parts, dim=-1)[:, 0] @ weight.t() + bias)
        torch.testing.assert_close(of_weight, gradient[:, 0].t() @ torch.cat(parts, dim=-1)[:, 0])
        torch.testing.assert_close(torch.cat(of_parts.unbind(), dim=-1)[:, 0], gradient[:, 0] @ weight)
        torch.testing.assert_close(of_bias, gradient.sum((0, 1)))
        torch.testing.assert_close(y[:, 0], in_pairs(products) + bias)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_replicated(shards, alone, dtype, split):
    x, weight, bias = drawn(S, 1, IN, dtype=dtype), drawn(OUT, IN, seed=1, dtype=dtype), drawn(OUT, seed=2, dtype=dtype)
    gradient, found = drawn(S, 1, OUT, seed=3, dtype=dtype), []
    for group, cut in ((alone, False), (shards, split)):
        here, w, b = (mine(x, group) if cut else x.clone()).requires_grad_(), weight.clone(), bias.clone()
        y = replicated(here, w.requires_grad_(), b.requires_grad_(), group, split=cut)
        y.backward(mine(gradient, group) if cut else gradient)
        found.append((y.detach(), here.grad, w.grad, b.grad))
    (y, of_x, *right), (part, of_part, *parameters) = found
    assert torch.equal(part, mine(y, shards) if split else y)
    assert torch.equal(of_part, mine(of_x, shards) if split else of_x)
    assert all(torch.equal(one, other) for one, other in zip(parameters, right, strict=True))
    if dtype == torch.float64:
        torch.testing.assert_close(y[:, 0], x[:, 0] @ weight.t() + bias)
        torch.testing.assert_close(right[0], gradient[:, 0].t() @ x[:, 0])
        torch.testing.assert_close(right[1], gradient.sum((0, 1)))


@pytest.mark.slow
@pytest.mark.sizes(2)
@pytest.mark.parametrize(
    "sides",
    [
        *((33, 33, 33), (40, 64, 40), (256, 96, 384), (64, 700, 130)),
        *(pytest.param(sides, marks=pytest.mark.long) for sides in ((128, 2100, 65), (100, 513, 256))),
    ],
    ids=str,
)
def test_products_in_one_batch_have_the_bits_that_they_have_in_its_parts(sides):
    m, k, n = sides
    left, right = drawn(16, m, k, seed=k, dtype=torch.bfloat16), drawn(16, k, n, seed=k, dtype=torch.bfloat16)
    alone = torch.cat([torch.bmm(*both) for both in zip(left.split(1), right.split(1), strict=True)])
    sizes = [size for size in (1, 2, 4, 8, 16) if one_batch(left, size, *sides)]
    if not sizes:
        pytest.skip("several threads")
    for size in sizes:
        parts = [torch.bmm(*both) for both in zip(left.split(size), right.split(size), strict=True)]
        assert torch.equal(torch.cat(parts), alone)
    torch.testing.assert_close(alone.float(), left.float() @ right.float(), rtol=0.01, atol=0.01 * k**0.5)


@pytest.mark.sizes(2)
def test_other_products_are_no_batch():
    x = drawn(4, 64, 64)
    assert not one_batch(x, 4, 64, 64, 64)
    half = x.bfloat16()
    assert not one_batch(half, 4, 64, 32, 64) and not one_batch(half.half(), 4, 64, 64, 64)


@pytest.mark.sizes(2)
@pytest.mark.mpi(max_size=1)
def test_a_machine_whose_products_depend_on_their_batch_has_no_batches(monkeypatch):
    bmm, sides = torch.bmm, (66, 70, 74)
    monkeypatch.setattr(torch, "bmm", lambda left, right: bmm(left, right) + (len(left) > 1))
    half = drawn(4, *sides[:2]).bfloat16()
    assert not one_batch(half, 4, *sides) and one_batch(half, 1, *sides) == (torch.get_num_threads() == 1)
