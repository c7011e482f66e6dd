"""Every operation x dtype x reduction against torch on the inputs of all ranks, which each rank can compute itself.

The values are such that every sum and product is exact in float32: so the result is what the exact value is when
rounded once, and all comparisons are for equality.
"""

import time

import numpy as np
import pytest
import torch

from commengine import CollectiveError, Communicator
from commengine.dtypes import COMPLEX_TYPES, DTYPES, FLOATING_TYPES, HALF_TYPES
from commengine.host.wire import LONG_BYTES, PIECE_BYTES, SMALL_BYTES

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.every_size]

OPS = ("sum", "prod", "min", "max", "avg")
ALL_DTYPES = sorted(DTYPES, key=str)
by_dtype = pytest.mark.parametrize("dtype", ALL_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
by_half = pytest.mark.parametrize("dtype", sorted(HALF_TYPES, key=str), ids=lambda dtype: str(dtype)[6:])
SHAPES = [(), (0,), (1,), (3,), (7,), (5, 3), (2, 0, 3), (129,)]


def given(dtype, shape, rank, op="sum"):
    """The input of ``rank``, known to all."""
    generator = torch.Generator().manual_seed(7919 * rank + len(shape) + sum(shape))
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype in COMPLEX_TYPES:  # small Gaussian integers: sums and products are exact
        parts = torch.randint(-3, 4, (2, *shape), generator=generator).to(COMPLEX_TYPES[dtype])
        return torch.complex(*parts)
    if dtype not in FLOATING_TYPES:
        low = 0 if dtype == torch.uint8 else -100
        return torch.randint(low, 101, shape, generator=generator).to(dtype)
    if op == "prod":
        factors = torch.tensor([-2, -1.5, -1, -0.5, 0.5, 1, 1.5, 2], dtype=dtype)
        return factors[torch.randint(0, 8, shape, generator=generator)]
    return (torch.randint(-512, 513, shape, generator=generator) / 64).to(dtype)


def reduced(parts, op):
    """What the reduction of ``parts`` is: computed in float64 or int64 and converted once."""
    dtype, stack = parts[0].dtype, torch.stack(parts)
    if dtype == torch.bool:
        return stack.any(0) if op in ("sum", "max") else stack.all(0)
    wide = stack.cdouble() if dtype in COMPLEX_TYPES else stack.double() if dtype in FLOATING_TYPES else stack.long()
    if op in ("min", "max"):
        return getattr(wide, f"a{op}")(0).to(dtype)
    if op == "avg":
        return wide.mean(0).to(dtype)
    return getattr(wide, op)(0).to(dtype)


def reductions(dtype):
    if dtype in COMPLEX_TYPES:
        return ("sum", "prod", "avg")
    return OPS if dtype in FLOATING_TYPES else OPS[:-1]


def bits(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@by_dtype
def test_all_reduce(run, world, dtype):
    for op in reductions(dtype):
        for shape in SHAPES:
            parts = [given(dtype, shape, rank, op) for rank in range(world.size)]
            tensor = parts[world.rank].clone()
            run("all_reduce", tensor, op)
            assert torch.equal(tensor, reduced(parts, op)), (op, shape)


@by_dtype
def test_reduce(run, world, dtype):
    for op in reductions(dtype):
        for root in range(world.size):
            for shape in [(), (0,), (7,), (5, 3)]:
                parts = [given(dtype, shape, rank, op) for rank in range(world.size)]
                tensor = parts[world.rank].clone()
                run("reduce", tensor, root, op)
                expected = reduced(parts, op) if world.rank == root else parts[world.rank]
                assert torch.equal(tensor, expected), (op, root, shape)


@pytest.mark.some(24)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("op", ["sum", "avg", "max"])
@pytest.mark.parametrize("extra", [-1, 0, 1, PIECE_BYTES + 3])
def test_reductions_in_pieces(run, world, dtype, op, extra):
    """About the length from which reductions go in pieces: every element is reduced once, none left out."""
    if op == "avg" and not dtype.is_floating_point:
        pytest.skip("integers have no average")
    numel = LONG_BYTES // dtype.itemsize + (extra if abs(extra) == 1 else extra // dtype.itemsize)
    steps = torch.arange(7)  # the elements repeat these values

    def repeated(pattern):
        return pattern.to(dtype).repeat(-(-numel // 7))[:numel]

    given_here = repeated(steps + world.rank)
    expected = repeated(
        {
            "sum": steps * world.size + sum(range(world.size)),
            "avg": steps + (world.size - 1) / 2,
            "max": steps + world.size - 1,
        }[op]
    )
    mine = given_here.clone()
    run("all_reduce", mine, op)
    assert torch.equal(mine, expected)
    mine = given_here.clone()
    run("reduce", mine, world.size - 1, op)
    assert torch.equal(mine, expected if world.rank == world.size - 1 else given_here)


@by_dtype
def test_reduce_scatter(run, world, dtype):
    for op in reductions(dtype):
        for shape in [(), (0,), (1,), (3, 5), (2, 0), (33,)]:
            rows, *rest = shape or (1,)
            parts = [given(dtype, (rows * world.size, *rest), rank, op) for rank in range(world.size)]
            kept = parts[world.rank].clone()
            output = torch.empty(shape, dtype=dtype)
            run("reduce_scatter", output, parts[world.rank], op)
            mine = reduced(parts, op)[rows * world.rank : rows * (world.rank + 1)].view(shape)
            assert torch.equal(output, mine), (op, shape)
            assert torch.equal(parts[world.rank], kept), "the input was changed"
            parts[world.rank] = kept
            own = kept[rows * world.rank : rows * (world.rank + 1)]
            run("reduce_scatter", own.view(shape), kept, op)
            assert torch.equal(own.view(shape), mine), (op, shape, "in place")


@by_dtype
def test_all_gather(run, world, dtype):
    for shape in [(), (0,), (1,), (7,), (3, 5), (2, 0)]:
        parts = [given(dtype, shape, rank) for rank in range(world.size)]
        expected = torch.cat(parts) if shape else torch.stack(parts)
        output = torch.empty_like(expected)
        run("all_gather", output, parts[world.rank])
        assert torch.equal(output, expected), shape


@by_dtype
def test_all_gather_in_place(run, world, dtype):
    for rows in (0, 1, 5):
        parts = [given(dtype, (rows, 3), rank) for rank in range(world.size)]
        output = torch.zeros((rows * world.size, 3), dtype=dtype)
        mine = output[rows * world.rank : rows * (world.rank + 1)]
        mine.copy_(parts[world.rank])
        run("all_gather", output, mine)
        assert torch.equal(output, torch.cat(parts)), rows


@by_dtype
def test_broadcast(run, world, dtype):
    for root in range(world.size):
        for shape in SHAPES:
            tensor = given(dtype, shape, world.rank)
            run("broadcast", tensor, root)
            assert torch.equal(tensor, given(dtype, shape, root)), (root, shape)


@by_dtype
def test_gather(run, world, dtype):
    for root in range(world.size):
        for shape in [(0,), (1,), (7,), (3, 5)]:
            parts = [given(dtype, shape, rank) for rank in range(world.size)]
            expected = torch.cat(parts)
            output = torch.empty_like(expected) if world.rank == root else None
            run("gather", output, parts[world.rank], root)
            assert output is None or torch.equal(output, expected), (root, shape)


@by_dtype
def test_scatter(run, world, dtype):
    for root in range(world.size):
        for shape in [(0,), (1,), (7,), (3, 5)]:
            rows = shape[0]
            whole = given(dtype, (rows * world.size, *shape[1:]), root)
            output = torch.empty(shape, dtype=dtype)
            run("scatter", output, whole if world.rank == root else None, root)
            assert torch.equal(output, whole[rows * world.rank : rows * (world.rank + 1)]), (root, shape)


@by_dtype
def test_all_to_all(run, world, dtype):
    for rows, rest in [(0, ()), (1, ()), (3, (5,)), (2, (0,))]:
        inputs = [given(dtype, (rows * world.size, *rest), rank) for rank in range(world.size)]
        output = torch.empty_like(inputs[0])
        run("all_to_all", output, inputs[world.rank])
        mine = slice(rows * world.rank, rows * (world.rank + 1))
        assert torch.equal(output, torch.cat([part[mine] for part in inputs])), (rows, rest)


#: shapes of a row
ROWS = [(), (3,), (2, 0)]


@by_dtype
def test_all_to_all_v(run, world, dtype):
    """Rank r sends (r + 2 j) % 4 rows to rank j: some ranks send nothing to some."""
    n, me = world.size, world.rank
    counts = [[(rank + 2 * to) % 4 for to in range(n)] for rank in range(n)]
    for row in ROWS:
        inputs = [given(dtype, (sum(mine), *row), rank) for rank, mine in enumerate(counts)]
        parts = [torch.split(one, mine) for one, mine in zip(inputs, counts, strict=True)]
        received = [mine[me] for mine in counts]
        output = torch.empty((sum(received), *row), dtype=dtype)
        kept = inputs[me].clone()
        run("all_to_all_v", output, kept, received, counts[me])
        assert torch.equal(output, torch.cat([of[me] for of in parts])), row
        assert torch.equal(kept, inputs[me]), "the input was changed"


def test_exchange_counts(world):
    for step in (0, 1, -5, 2**40):
        counts = [100 * world.rank + step * to for to in range(world.size)]
        expected = tuple(100 * rank + step * world.rank for rank in range(world.size))
        assert world.exchange_counts(counts) == expected


@by_dtype
def test_all_gather_v(run, world, dtype):
    for row in ROWS:
        counts = [3 * rank % 4 for rank in range(world.size)]  # rank 0 gives nothing
        parts = [given(dtype, (count, *row), rank) for rank, count in enumerate(counts)]
        output = torch.empty((sum(counts), *row), dtype=dtype)
        run("all_gather_v", output, parts[world.rank], counts)
        assert torch.equal(output, torch.cat(parts)), row


def test_barrier_ends_after_the_last_rank_came(run, world):
    if world.rank == world.size - 1:
        time.sleep(0.1)
    came = time.monotonic()  # one clock for all processes of a machine
    run("barrier")
    went = time.monotonic()
    assert went >= max(world.mpi.allgather(came))


@by_dtype
def test_groups_of_one_rank(world, dtype):
    with world.split(world.rank) as alone:
        assert (alone.rank, alone.size) == (0, 1)
        for lane in (None, alone.new_stream()):
            for shape in [(), (0,), (5, 2)]:
                before = given(dtype, shape, world.rank, "prod")
                tensor = before.clone()
                for op in reductions(dtype):
                    alone.all_reduce(tensor, op, stream=lane).wait()
                    alone.reduce(tensor, 0, op, stream=lane).wait()
                alone.broadcast(tensor, stream=lane).wait()
                assert torch.equal(tensor, before)
            for operation in ("all_gather", "gather", "scatter", "all_to_all", "reduce_scatter"):
                before, output = given(dtype, (5, 2), world.rank), torch.empty((5, 2), dtype=dtype)
                getattr(alone, operation)(output, before, stream=lane).wait()
                assert torch.equal(output, before), operation
            for operation, rows in (("all_to_all_v", [[5], [5]]), ("all_gather_v", [[5]])):
                before, output = given(dtype, (5, 2), world.rank), torch.empty((5, 2), dtype=dtype)
                getattr(alone, operation)(output, before, *rows, stream=lane).wait()
                assert torch.equal(output, before), operation
            alone.barrier(stream=lane).wait()


def test_halves_are_rounded_once(world):
    """Four ranks: a sum that rounds at each step, in any order, loses what one rounding at the end keeps."""
    for dtype, digits in ((torch.bfloat16, 7), (torch.float16, 10)):
        ulp = 2.0**-digits  # of 1.0
        small = ulp / 4
        exact = 1 + (world.size - 1) * small
        expected = torch.tensor(exact, dtype=torch.float64).to(dtype)
        if world.size == 4:
            stepwise = torch.tensor(1.0, dtype=dtype)
            for _ in range(3):
                stepwise = stepwise + torch.tensor(small, dtype=dtype)
            assert expected == 1 + ulp and stepwise == 1  # the example tells the two apart
        for count in (1, SMALL_BYTES):  # both algorithms
            tensor = torch.full((count,), 1.0 if world.rank == 0 else small, dtype=dtype)
            world.all_reduce(tensor)
            assert (tensor == expected).all(), dtype
            output = torch.empty(count, dtype=dtype)
            value = 1.0 if world.rank == 0 else small
            world.reduce_scatter(output, torch.full((count * world.size,), value, dtype=dtype))
            assert (output == expected).all(), dtype


@pytest.mark.mpi(min_size=2)
def test_half_sums_round_ties_to_even(world):
    """MPICH's MPIX_BFLOAT16 rounds them away from zero."""
    for dtype, ulp in ((torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10)):
        first = torch.tensor([1, 1 + ulp, -1, -1 - ulp] * 100, dtype=dtype)
        tie = torch.tensor([ulp / 2, ulp / 2, -ulp / 2, -ulp / 2] * 100, dtype=dtype)
        tensor = {0: first, 1: tie}.get(world.rank, torch.zeros_like(first)).clone()
        world.all_reduce(tensor)
        assert torch.equal(tensor, torch.tensor([1, 1 + 2 * ulp, -1, -1 - 2 * ulp] * 100, dtype=dtype))


def test_half_sums_do_not_overflow_on_the_way(world):
    for count in (3, SMALL_BYTES):
        tensor = torch.full((count,), 60000.0, dtype=torch.float16)
        world.all_reduce(tensor, "avg")
        assert (tensor == 60000).all()
        tensor = torch.full((count,), 60000.0 if world.rank < world.size / 2 else -60000.0, dtype=torch.float16)
        world.all_reduce(tensor)
        assert (tensor == (60000 if world.size == 1 else 0)).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int32, torch.bool], ids=str)
@pytest.mark.parametrize("numel", [5, 70_001])
def test_deterministic_sums_are_in_rank_order(mpi_world, dtype, numel):
    """Bit for bit, small and large, of numbers whose sum depends on the order."""
    parts = [torch.randn(numel, dtype=torch.float64, generator=torch.Generator().manual_seed(r)) * 10**r
             for r in range(mpi_world.size)]  # fmt: skip
    parts = [(part > 0) if dtype == torch.bool else part.to(dtype) for part in parts]
    total = parts[0].clone()
    for part in parts[1:]:
        total = total | part if dtype == torch.bool else total + part
    with Communicator(mpi_world, order="rank") as comm, comm.split(0) as part:
        for group in (comm, part):
            mine = parts[comm.rank].clone()
            group.all_reduce(mine)
            assert torch.equal(mine, total)
        rows = torch.cat([parts[comm.rank]] * comm.size)
        own = torch.empty(numel, dtype=dtype)
        comm.reduce_scatter(own, rows)
        assert torch.equal(own, total)
        mine = parts[comm.rank].clone()
        comm.reduce(mine, 0)
        assert torch.equal(mine, total if comm.rank == 0 else parts[comm.rank])


@by_half
def test_large_and_small_halves_agree_bit_for_bit(world, dtype):
    count = 3 * SMALL_BYTES // 2 + 5  # three pieces that are small, one that is not
    whole = torch.randn(count, generator=torch.Generator().manual_seed(world.rank)).to(dtype)
    assert whole.nbytes > SMALL_BYTES
    for op in OPS:
        large, small, rooted = whole.clone(), whole.clone(), whole.clone()
        world.all_reduce(large, op)
        for piece in small.split(SMALL_BYTES // 2):
            assert piece.nbytes <= SMALL_BYTES
            world.all_reduce(piece, op)
        world.reduce(rooted, world.size - 1, op)
        assert bits(large) == bits(small), op
        if world.rank == world.size - 1:
            assert bits(large) == bits(rooted), op


@by_half
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_halves_about_the_threshold(world, dtype, extra):
    count = SMALL_BYTES // 2 + extra
    parts = [given(dtype, (count,), rank) for rank in range(world.size)]
    tensor = parts[world.rank].clone()
    world.all_reduce(tensor)
    assert torch.equal(tensor, reduced(parts, "sum"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_rank_gets_the_same_bits(world, dtype):
    for count in (1, 1001, 50_001):
        parts = [torch.randn(count, generator=torch.Generator().manual_seed(rank)) for rank in range(world.size)]
        for op in OPS:
            tensor = parts[world.rank].to(dtype, copy=True)
            world.all_reduce(tensor, op)
            assert len(set(world.mpi.allgather(bits(tensor)))) == 1, (count, op)
            if dtype in (torch.float32, torch.float64):
                exact = reduced([part.to(dtype).double() for part in parts], op)
                torch.testing.assert_close(tensor.double(), exact, rtol=3e-7, atol=1e-6)


@by_half
def test_nan_wins_in_halves(world, dtype):
    for op in OPS:
        tensor = torch.tensor([float("nan") if world.rank == world.size - 1 else 1.0, 1.0], dtype=dtype)
        world.all_reduce(tensor, op)
        assert tensor.isnan().tolist() == [True, False], op


# NumPy arrays: their memory is used, not copied.

NUMPY_DTYPES = ["float64", "float32", "float16", "int8", "int16", "int32", "int64", "uint8", "bool"]
NUMPY_DTYPES += ["complex64", "complex128"]


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_numpy_arrays_are_used_in_place(run, world, dtype):
    array = np.ones((3, 2), dtype)
    run("all_reduce", array)
    assert array.dtype == dtype and (array == np.asarray(world.size).astype(dtype)).all()

    gathered, mine = np.zeros(2 * world.size, dtype), np.full(2, world.rank % 2, dtype)
    run("all_gather", gathered, mine)
    assert (gathered == np.repeat(np.arange(world.size) % 2, 2).astype(dtype)).all()

    scattered = np.zeros(2, dtype)
    run("scatter", scattered, gathered if world.rank == 0 else None, 0)
    assert (scattered == mine).all()

    scalar = np.array(world.rank == 0, dtype)
    run("broadcast", scalar, 0)
    assert scalar == np.array(1, dtype)

    empty = np.zeros(0, dtype)
    run("all_reduce", empty)


def test_read_only_numpy_array_is_refused(world):
    array = np.ones(3)
    array.flags.writeable = False
    for call in (lambda: world.all_reduce(array), lambda: world.broadcast(array)):
        with pytest.raises(CollectiveError, match="tensor is a read-only array"):
            call()
    assert (array == 1).all()


def test_numpy_array_of_negative_strides_is_refused(world):
    with pytest.raises(CollectiveError, match="not contiguous"):  # torch.from_dlpack ends the process
        world.all_reduce(np.ones(4)[::-1])


# A collective is behind autograd's back, alike for every dtype and op, on this thread and on a worker.


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autograd_sees_nothing(run, world, dtype, op):
    leaf = torch.full((4,), 2.0, dtype=dtype, requires_grad=True)
    factor = world.size if op == "sum" else 1
    run("all_reduce", leaf, op)
    assert leaf.is_leaf and (leaf == 2 * factor).all()

    product = leaf * 3
    history = product.grad_fn
    run("all_reduce", product, op)
    run("reduce", product, 0, op)
    assert product.grad_fn is history
    product.sum().backward()
    assert (leaf.grad == 3).all()

    output = torch.zeros(2, dtype=dtype, requires_grad=True)
    run("reduce_scatter", output, torch.ones(2 * world.size, dtype=dtype, requires_grad=True), op)
    assert (output == factor).all() and output.is_leaf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tensors_of_inference_mode(run, world, dtype):
    with torch.inference_mode():
        tensor = torch.ones(5, dtype=dtype)
        run("all_reduce", tensor, "avg")
        run("all_reduce", tensor)
    assert (tensor == world.size).all()
    run("all_reduce", tensor, "avg")
    assert (tensor == world.size).all()


@pytest.mark.mpi(min_size=2)
def test_roots_may_be_numpy_integers(run, world):
    tensor = torch.tensor([world.rank])
    run("broadcast", tensor, np.int64(1))
    assert tensor.item() == 1


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_numbers_have_no_order(world, dtype):
    for op, call in (("min", world.all_reduce), ("max", world.reduce)):
        with pytest.raises(CollectiveError, match=f"op='{op}' needs an order, which {dtype} has not"):
            call(torch.ones(2, dtype=dtype), op=op)
    with pytest.raises(CollectiveError, match=r"lazily conjugated .* call .resolve_conj\(\)"):
        world.all_reduce(torch.ones(2, dtype=dtype).conj())
    world.barrier()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_large_complex_sums(run, world, dtype):
    """Above the sizes from which reductions go in pieces, or through memory."""
    numel = LONG_BYTES // dtype.itemsize + 5
    base, ranks = (torch.arange(numel) % 11).double(), sum(range(world.size))
    tensor = torch.complex(base + world.rank, base - 2 * world.rank).to(dtype)
    run("all_reduce", tensor)
    expected = torch.complex(world.size * base + ranks, world.size * base - 2 * ranks)
    assert torch.equal(tensor, expected.to(dtype))
