"""Functions of single elements: torch's values, and the same bits wherever an element lies."""

import pytest
import torch
import torch.nn.functional as F

from tplayers.canonical.pointwise import GRAIN, VECTOR, gated, gelu, pointwise, pointwise_, whole_vectors

FUNCTIONS = {
    "tanh": lambda x: gelu(x, "tanh"),
    "erf": lambda x: gelu(x, "none"),
    "rsqrt": lambda x: pointwise(torch.rsqrt, x.abs() + 0.1),
    "exp": lambda x: pointwise(torch.exp, x),
    "silu": lambda x: gated(torch.stack((x, torch.ones_like(x))))[0],
}
by_function = pytest.mark.parametrize("name", FUNCTIONS)
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@by_function
@by_dtype
def test_parts_have_the_bits_of_the_whole(name, dtype):
    """Forward and backward, for parts that end anywhere."""
    function = FUNCTIONS[name]
    x = torch.randn(1000, generator=torch.Generator().manual_seed(3)).to(dtype)
    whole = x.clone().requires_grad_()
    y = function(whole)
    y.backward(torch.full_like(y, 0.7))
    for length in (1, 7, 31, 33, 130, 999):
        part = x[1000 - length :].clone().requires_grad_()
        of_part = function(part)
        of_part.backward(torch.full_like(of_part, 0.7))
        assert torch.equal(of_part, y[1000 - length :]) and torch.equal(part.grad, whole.grad[1000 - length :])


def test_the_control():
    """Torch's own function has other bits in the tail of a tensor."""
    x = torch.randn(4096, generator=torch.Generator().manual_seed(3))
    whole = F.gelu(x, approximate="tanh")
    parts = (F.gelu(x[:length].clone(), approximate="tanh") for length in range(1, 200))
    assert any(not torch.equal(part, whole[: len(part)]) for part in parts)


@by_dtype
def test_values_are_torchs(dtype):
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    both = torch.randn(6, 5, 16, generator=torch.Generator().manual_seed(2)).to(dtype)
    for mine, theirs, argument in (
        (lambda x: gelu(x, "tanh"), lambda x: F.gelu(x, approximate="tanh"), x),
        (lambda x: gelu(x, "none"), F.gelu, x),
        (gated, lambda both: F.silu(both[:3]) * both[3:], both),
    ):
        one, other = argument.clone().requires_grad_(), argument.clone().requires_grad_()
        found, expected = mine(one), theirs(other)
        found.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("elements", [1, VECTOR, GRAIN - 1, GRAIN + 1, 3 * GRAIN + 5, 100 * GRAIN + 1])
def test_every_thread_has_whole_vectors(elements, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    filled = whole_vectors(elements)
    shares = min(threads, -(-filled // GRAIN))
    assert filled >= elements and filled % (shares * VECTOR) == 0
    assert filled < elements + 2 * VECTOR * threads


@pytest.mark.parametrize("elements", [VECTOR, 1000, GRAIN])
def test_in_place(elements):
    x = torch.randn(elements, generator=torch.Generator().manual_seed(3))
    expected, address = pointwise(torch.exp, x), x.data_ptr()
    assert pointwise_(torch.exp, x) is x and x.data_ptr() == address and torch.equal(x, expected)


def test_threads_change_no_bit():
    x = torch.randn(3 * GRAIN + 77, generator=torch.Generator().manual_seed(3))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(gelu(x, "tanh"))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
