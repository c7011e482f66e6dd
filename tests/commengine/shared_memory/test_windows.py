"""Collectives on tensors that the ranks share: the values of the same call on private tensors, and more."""

import gc
import itertools
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from commengine import CollectiveError, CollectiveMismatch, Communicator
from commengine.dtypes import DTYPES
from commengine.host.switch_points import Point, SwitchPoints
from commengine.shared_memory import windows as in_window
from commengine.shared_memory.files import NAMELESS, PREFIX
from tests.support.exact import ALWAYS, expected, ops_of, values

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.every_size]

SHARED_BYTES = BLOCK_BYTES = 32 * 1024

#: a file of a segment; a folder of the checkout may have the prefix, too
OURS = re.compile(rf"/(memfd:|dev/shm/){PREFIX}")

#: what is in no window goes by MPI
WINDOWS_ONLY = SwitchPoints({key: Point(window=1) for key in ALWAYS.rows})


@pytest.fixture(scope="module")
def world(mpi_world):
    with Communicator(mpi_world, switch_points=ALWAYS) as world:
        yield world
        world.close()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that a small tensor has several."""
    monkeypatch.setattr(in_window, "BLOCK_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(in_window, "CACHED_BYTES", 2 * BLOCK_BYTES)


DTYPE_IDS = {"ids": lambda dtype: str(dtype).removeprefix("torch.")}
by_dtype = pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), **DTYPE_IDS)


def numel_of(dtype, world):
    """Enough for several blocks in each rank's part, the last one not full; a multiple of the group's size."""
    return (BLOCK_BYTES // dtype.itemsize * 2 + 77) * world.size


@by_dtype
def test_all_reduce(run, world, dtype):
    numel = numel_of(dtype, world)
    tensor = world.empty((numel,), dtype)
    for op in ops_of(dtype):
        tensor.copy_(values(dtype, numel, world.rank))
        run("all_reduce", tensor, op)
        assert torch.equal(tensor, expected(dtype, numel, world.size, op)), op


@by_dtype
def test_reduce_scatter_of_a_part(run, world, dtype):
    """Of a part of the shared tensor, from its middle; what is around it, and the input, stay."""
    numel = numel_of(dtype, world)
    tensor = world.empty((numel + 160,), dtype)
    tensor.copy_(values(dtype, numel + 160, world.rank))
    kept = tensor.clone()
    output = torch.empty(numel // world.size, dtype=dtype)
    op = ops_of(dtype)[2]
    run("reduce_scatter", output, tensor[64 : 64 + numel], op)
    sums = expected(dtype, numel + 160, world.size, op)[64 : 64 + numel]
    assert torch.equal(output, sums.view(world.size, -1)[world.rank])
    assert torch.equal(tensor, kept)


@by_dtype
@pytest.mark.parametrize("shared", ["output", "input", "both", "in place"])
def test_all_gather(run, world, dtype, shared):
    rows = SHARED_BYTES // dtype.itemsize + 5
    whole, part = (rows * world.size,), (rows,)
    output = torch.empty(whole, dtype=dtype) if shared == "input" else world.empty(whole, dtype)
    input = torch.empty(part, dtype=dtype) if shared in ("output", "in place") else world.empty(part, dtype)
    if shared == "in place":
        input = output[world.rank * rows : (world.rank + 1) * rows]
    input.copy_(values(dtype, rows, world.rank))
    run("all_gather", output, input)
    assert torch.equal(output, torch.cat([values(dtype, rows, rank) for rank in range(world.size)]))


@by_dtype
def test_broadcast(run, world, dtype):
    root = world.size - 1
    tensor = world.empty((5, SHARED_BYTES), dtype)
    tensor.copy_(values(dtype, tensor.numel(), world.rank).view_as(tensor))
    run("broadcast", tensor, root)
    assert torch.equal(tensor.view(-1), values(dtype, tensor.numel(), root))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], **DTYPE_IDS)
def test_sums_are_in_rank_order_and_rounded_once(world, dtype):
    """Bit for bit the sum in rank order, of numbers whose sum depends on it; the same whatever the size of blocks."""
    numel = SHARED_BYTES * 3 + 13
    parts = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(world.size)]
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    tensor = world.empty((numel,), dtype)
    tensor.copy_(parts[world.rank])
    world.all_reduce(tensor)
    assert torch.equal(tensor, total.to(dtype))


def test_small_and_empty_ones_work_too(world):
    small = world.empty((3, 2))
    small.fill_(world.rank)
    world.all_reduce(small, "max")
    assert torch.equal(small, torch.full((3, 2), float(world.size - 1)))
    assert world.empty((0, 4)).shape == (0, 4)
    with pytest.raises(RuntimeError, match="negative dimension"):
        world.empty((2, -3))


def test_autograd_sees_that_a_leaf_changed(world):
    """As on private memory: no error for a leaf, and one in a graph that saved the old values."""
    leaf = world.empty((SHARED_BYTES,)).fill_(2.0).requires_grad_()
    saved = (leaf * leaf).sum()
    world.all_reduce(leaf, "max")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


def test_any_output_can_be_gathered_into(run, world):
    """A leaf, and a tensor of inference mode, whatever the mode of the thread that runs it."""
    rows = SHARED_BYTES
    input = world.empty((rows,)).fill_(world.rank)
    with torch.inference_mode():
        made_there = torch.empty(rows * world.size)
    for output in (torch.nn.Parameter(torch.empty(rows * world.size)), made_there):
        run("all_gather", output, input)
        assert torch.equal(output.detach()[::rows], torch.arange(world.size).float())


@pytest.mark.mpi(min_size=2)
def test_different_reductions_are_an_error_on_all(world):
    tensor = world.empty((SHARED_BYTES,)).fill_(1.0)
    with pytest.raises(CollectiveMismatch, match="reductions"):
        world.all_reduce(tensor, "max" if world.rank else "sum")
    with pytest.raises(CollectiveMismatch, match="dtypes"):
        world.all_reduce(tensor.view(torch.int32) if world.rank else tensor)


def test_many_rounds_on_two_lanes(world):
    """The caller's lane and a stream's, in flight at once: neither takes the other's flags for its own."""
    stream = world.new_stream()
    one, other = world.empty((SHARED_BYTES,)), world.empty((SHARED_BYTES,))
    for number in range(30):
        one.fill_(number)
        other.fill_(-number)
        work = world.all_reduce(one, stream=stream)
        world.all_reduce(other)
        work.wait()
        assert one.eq(number * world.size).all() and other.eq(-number * world.size).all()


@pytest.mark.mpi(min_size=2)
def test_different_tensors_on_different_ranks_are_an_error_on_all(mpi_world):
    with Communicator(mpi_world, name="confused", switch_points=ALWAYS) as comm:
        one, other = comm.empty((SHARED_BYTES,)), comm.empty((SHARED_BYTES,))
        said = (
            rf"^rank {comm.rank} of group 'confused' \(size {comm.size}\): .*"
            "rank 1 asked for all_reduce of 131072 bytes at byte 0 of shared tensor 1"
        )
        with pytest.raises(CollectiveMismatch, match=said):
            comm.all_reduce(other if comm.rank == 1 else one)
        one.fill_(1.0)
        comm.all_reduce(one)  # the communicator is in step
        assert one.eq(comm.size).all()
        del one, other


@pytest.mark.mpi(min_size=2)
def test_no_memory_at_all_is_an_error_on_every_rank(mpi_world):
    """Neither shared nor private. No descriptor is left."""
    with Communicator(mpi_world, name="poor") as comm:
        comm.empty((1,))
        files = len(list(Path("/proc/self/fd").iterdir()))
        with pytest.raises(CollectiveError, match=r"group 'poor': empty: .*allocate"):
            comm.empty((1 << 60,))
        assert len(list(Path("/proc/self/fd").iterdir())) == files
        comm.all_reduce(torch.ones(1))


@pytest.mark.mpi(min_size=2)
def test_no_memory_on_one_rank_is_an_error_on_every_rank(mpi_world, monkeypatch):
    """A limit of the process would not do: malloc may have kept as much from older tests."""
    with Communicator(mpi_world, name="poor") as comm:
        comm.empty((1,))
        if comm.rank == comm.size - 1:

            def refuse(*_, **__):
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

            monkeypatch.setattr(comm._shared._memory, "way", NAMELESS._replace(left=lambda: 0))
            monkeypatch.setattr(torch, "empty_like", refuse)
        with pytest.raises(CollectiveError, match=rf"rank {comm.size - 1}: group 'poor': empty: .*allocate"):
            comm.empty((1 << 20,))
        monkeypatch.undo()
        comm.all_reduce(torch.ones(1))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("points", [ALWAYS, WINDOWS_ONLY], ids=["through slots", "by MPI"])
def test_a_private_tensor_on_one_rank_is_an_error_on_all(mpi_world, points):
    """From the first collective on, whichever way the private one would go: nobody waits where the others are not."""
    with Communicator(mpi_world, switch_points=points) as comm:
        shared, private, part = comm.empty((SHARED_BYTES,)).fill_(1.0), torch.ones(SHARED_BYTES), torch.ones(8)
        tensor = private if comm.rank == 1 else shared
        whole = tensor[: 8 * comm.size]
        for call in (
            lambda: comm.all_reduce(tensor),
            lambda: comm.reduce_scatter(part, whole),
            lambda: comm.all_gather(whole, part),
            lambda: comm.broadcast(tensor, 1),
        ):
            with pytest.raises(CollectiveMismatch, match=r"rank 1 asked for .* of a private tensor"):
                call()
            assert tensor.eq(1).all()
        for alike in (private, shared):
            comm.all_reduce(alike)
            assert alike.eq(comm.size).all()


def test_memory_outlives_the_communicator_where_a_tensor_refers_to_it(mpi_world):
    with Communicator(mpi_world, switch_points=ALWAYS) as comm:
        kept = comm.empty((SHARED_BYTES,)).fill_(3.0)[5:]
        comm.empty((SHARED_BYTES,)).fill_(4.0)
    gc.collect()
    assert kept.sum() == 3.0 * (SHARED_BYTES - 5)
    with pytest.raises(CollectiveError, match="closed"):
        comm.empty((4,))


@pytest.mark.mpi(min_size=2)
def test_windows_that_nobody_uses_are_unmapped(mpi_world):
    def mapped():
        return int(Path("/proc/self/statm").read_text().split()[0]) * 4096

    sizes = []
    for _ in range(4):
        with Communicator(mpi_world, switch_points=ALWAYS) as comm:
            comm.all_reduce(comm.empty((4 << 20,)).fill_(1.0))
        sizes.append(mapped())
    assert sizes[-1] - sizes[0] < 16 << 20, "three windows of 16 MB a rank were left behind"


WIDE_TYPES = [d for d in sorted(DTYPES, key=str) if d.itemsize > 1 and d != torch.complex128]  # which is refused


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("points", [ALWAYS, WINDOWS_ONLY], ids=["through slots", "by MPI"])
def test_addresses_between_two_elements(mpi_world, points):
    """Drawn for every operation and dtype: right where no rank's address is a multiple, else an error on all ranks.

    In each case the bytes around the tensor stay.
    """
    draw = random.Random(11)
    with Communicator(mpi_world, switch_points=points, timeout=30) as comm:
        for dtype, operation, odd in itertools.product(
            WIDE_TYPES, ("all_reduce", "reduce_scatter", "all_gather", "broadcast"), (None, 0, comm.size - 1)
        ):
            rows = draw.randrange(100, 900)
            numel, item = rows * comm.size, dtype.itemsize
            starts = [item * draw.randrange(20) + draw.randrange(1, item) for _ in range(comm.size)]
            start = starts[comm.rank] if odd in (None, comm.rank) else starts[0] // item * item
            end = start + numel * item
            whole = comm.empty((numel * item + 400,), torch.uint8).fill_(7)
            tensor = torch.frombuffer(whole.numpy(), dtype=dtype, count=numel, offset=start)
            mine, part = values(dtype, numel, comm.rank), torch.zeros(rows, dtype=dtype)
            tensor.copy_(mine)
            call = {
                "all_reduce": lambda: comm.all_reduce(tensor),  # noqa: B023
                "reduce_scatter": lambda: comm.reduce_scatter(part, tensor),  # noqa: B023
                "all_gather": lambda: comm.all_gather(tensor, mine[:rows]),  # noqa: B023
                "broadcast": lambda: comm.broadcast(tensor, comm.size - 1),  # noqa: B023
            }[operation]
            about = dtype, operation, odd, start
            if odd is None:
                call()
                if operation == "reduce_scatter":
                    sums = expected(dtype, numel, comm.size, "sum").view(comm.size, -1)
                    assert torch.equal(part, sums[comm.rank]) and torch.equal(tensor, mine), about
                else:
                    right = {
                        "all_reduce": expected(dtype, numel, comm.size, "sum"),
                        "all_gather": torch.cat([values(dtype, numel, rank)[:rows] for rank in range(comm.size)]),
                        "broadcast": values(dtype, numel, comm.size - 1),
                    }[operation]
                    assert torch.equal(tensor, right), about
            else:
                with pytest.raises(CollectiveMismatch, match=r"of a private tensor"):
                    call()
                assert torch.equal(tensor, mine) and part.eq(0).all(), about
            assert whole[:start].eq(7).all() and whole[end:].eq(7).all(), about


class Watching(dict):
    """The windows of a communicator: while one is added, another thread looks for a tensor."""

    def __init__(self, shared, tensors):
        super().__init__(shared.segments)
        self.shared, self.tensors, self.found = shared, tensors, []

    def __setitem__(self, number, segment):  # while the place of the new one is noted
        self.found += [self.shared.find(tensor).number for tensor in self.tensors]
        super().__setitem__(number, segment)


@pytest.mark.mpi(min_size=2)
def test_a_window_is_found_while_another_one_is_added(mpi_world):
    """The worker of a stream looks for its tensors while the caller makes a window, which may lie before the others."""
    with Communicator(mpi_world, device="cpu") as comm:
        shared, tensors = comm._shared, [comm.empty((4096,)) for _ in range(3)]
        numbers = [shared.find(tensor).number for tensor in tensors]
        shared.segments = watching = Watching(shared, tensors)
        shared._found.clear()  # as for tensors that were not looked for before
        shared._add(SimpleNamespace(address=min(tensor.data_ptr() for tensor in tensors) - 8192, nbytes=4096))
        assert watching.found == numbers
        assert [shared.find(tensor).number for tensor in tensors] == numbers


def mapped():
    """The bytes of shared memory that this process maps."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = (line.split(" ", 1)[0].split("-") for line in lines if OURS.search(line))
    return sum(int(end, 16) - int(start, 16) for start, end in spans)


@pytest.mark.mpi(min_size=2)
def test_a_window_that_is_freed_is_given_back(mpi_world):
    with Communicator(mpi_world, device="cpu", switch_points=ALWAYS) as comm:
        kept = comm.empty((1000,))
        comm.all_reduce(kept.fill_(1))
        stream, before = comm.new_stream(), mapped()
        for turn in range(20):
            tensor = comm.empty((1 << 20,))
            work = comm.all_reduce(tensor.fill_(turn), stream=stream)
            comm.free(tensor[5:9])
            assert tensor[-1] == turn * comm.size  # the stream was waited for
            work.wait()
            comm.all_reduce(tensor)  # a private one now
            assert tensor[0] == turn * comm.size**2
            comm.all_reduce(kept)
            del tensor, work
        gc.collect()
        assert mapped() <= before and len(comm._shared.segments) == 1  # other tests' memory may go meanwhile
        assert kept[7] == float(comm.size) ** 21
        comm.free(torch.ones(3))
        comm.free(kept)
        comm.all_reduce(kept.fill_(2))
        assert kept[0] == 2 * comm.size and not comm._shared.segments
        one, other = comm.empty((8,)), comm.empty((8,))
        with pytest.raises(CollectiveMismatch, match=r"free\(window [01]\)"):
            comm.free(one if comm.rank else other)
        with pytest.raises(CollectiveError, match=r"free: .*not contiguous"):
            comm.free(one[::2] if comm.rank else one)
        comm.free(one), comm.free(other)
        for _ in range(3):
            comm.free(comm.empty((8,)))
        assert comm._shared.window_of(comm.empty((8,))) == 0  # a number of 15 bits is used again
