"""The reductions that a device may round in any order: tests to be imported where a fixture ``run`` runs an operation.

NCCL rounds halves at each addition, and an average is a sum of values that were multiplied by a rounded 1/n. The inputs
are such that every order and every rounding gives the exact sum, product, minimum and maximum. An average is exact if n
is a power of two; otherwise it has n + 1 roundings, and so a bound.
"""

import pytest
import torch

from commengine.dtypes import FLOATING_TYPES
from tests.commengine.test_communicator_collectives import ALL_DTYPES, SHAPES, given, reduced, reductions

by_dtype = pytest.mark.parametrize("dtype", ALL_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def exact_input(dtype, shape, rank, op):
    """The input of ``rank``. Integers wrap around, in every order alike."""
    if dtype not in FLOATING_TYPES:
        return given(dtype, shape, rank, op)
    generator = torch.Generator().manual_seed(7919 * rank + len(shape) + sum(shape))
    if op == "prod":  # up to 14 ranks do not leave float16
        return torch.tensor([-2, -1, -0.5, 0.5, 1, 2], dtype=dtype)[torch.randint(0, 6, shape, generator=generator)]
    return torch.randint(-16, 17, shape, generator=generator).to(dtype)  # 16 ranks' sum has the 8 bits of a bfloat16


def on_nccl(dtype):
    """The reductions of ``dtype`` that NCCL has: complex numbers are added as twice as many real ones."""
    return [op for op in reductions(dtype) if op != "prod" or not dtype.is_complex]


def same(result, parts, op):
    """Whether ``result`` is the reduction of ``parts``."""
    expected, size = reduced(parts, op), len(parts)
    if op != "avg" or size & (size - 1) == 0:
        return torch.equal(result, expected)
    stack = torch.stack(parts)
    if stack.is_complex():
        return all(same(part(result), [part(x) for x in parts], op) for part in (torch.real, torch.imag))
    stack = stack.double()
    bound = (size + 1) * torch.finfo(result.dtype).eps * stack.abs().mean(0)
    return bool(((result.double() - stack.mean(0)).abs() <= bound).all())


@by_dtype
def test_all_reduce(run, mpi_world, dtype):
    for op in on_nccl(dtype):
        for shape in SHAPES:
            parts = [exact_input(dtype, shape, rank, op) for rank in range(mpi_world.size)]
            tensor = parts[mpi_world.rank].clone()
            run("all_reduce", tensor, op)
            assert same(tensor, parts, op), (op, shape)


@by_dtype
def test_reduce(run, mpi_world, dtype):
    for op in on_nccl(dtype):
        for root in range(mpi_world.size):
            for shape in [(), (0,), (7,), (5, 3)]:
                parts = [exact_input(dtype, shape, rank, op) for rank in range(mpi_world.size)]
                tensor = parts[mpi_world.rank].clone()
                run("reduce", tensor, root, op)
                if mpi_world.rank == root:
                    assert same(tensor, parts, op), (op, root, shape)
                else:
                    assert torch.equal(tensor, parts[mpi_world.rank]), (op, root, shape)


@by_dtype
def test_reduce_scatter(run, mpi_world, dtype):
    rank, size = mpi_world.rank, mpi_world.size
    for op in on_nccl(dtype):
        for shape in [(), (0,), (1,), (3, 5), (2, 0), (33,)]:
            rows, *rest = shape or (1,)
            parts = [exact_input(dtype, (rows * size, *rest), peer, op) for peer in range(size)]
            kept, output = parts[rank].clone(), torch.empty(shape, dtype=dtype)
            run("reduce_scatter", output, parts[rank], op)
            mine = [part[rows * rank : rows * (rank + 1)].view(shape) for part in parts]
            assert same(output, mine, op), (op, shape)
            assert torch.equal(parts[rank], kept), "the input was changed"
