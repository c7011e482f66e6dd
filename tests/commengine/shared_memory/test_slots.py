"""Reductions of private tensors through slots: the values, and the bits, of every other way."""

import os
import time
from itertools import cycle

import pytest
import torch

from commengine import CollectiveError, CollectiveMismatch, Communicator
from commengine.dtypes import DTYPES
from commengine.host.switch_points import Point, SwitchPoints
from commengine.shared_memory import slots as bounce
from commengine.shared_memory import windows
from commengine.shared_memory.files import WAYS
from commengine.shared_memory.slots import Slots
from tests.support.exact import ALWAYS, NEVER, expected, ops_of, values

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.every_size]

DTYPE_IDS = {"ids": lambda dtype: str(dtype).removeprefix("torch.")}
by_dtype = pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), **DTYPE_IDS)
by_wide_dtype = pytest.mark.parametrize(
    "dtype",
    [torch.float64, pytest.param(torch.float32, marks=pytest.mark.every_size), torch.float16, torch.bfloat16],
    **DTYPE_IDS,
)


@pytest.fixture(scope="module", autouse=True)
def small_slots():
    """So that a small tensor goes around them several times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounce, "SLOT_BYTES", 8192)
        patch.setattr(bounce, "SLOTS", 2)
        yield


@pytest.fixture(scope="module")
def world(small_slots, mpi_world):
    with Communicator(mpi_world, switch_points=ALWAYS) as world:
        yield world
        world.close()


@pytest.fixture(autouse=True)
def bounced(monkeypatch):
    """What went through slots."""
    seen = []
    run = Slots.run

    def noticed(self, operation, *args):
        seen.append(operation)
        run(self, operation, *args)

    monkeypatch.setattr(Slots, "run", noticed)
    return seen


def numel_of(dtype):
    """Enough for several rounds of the slots; a multiple of 4, whose parts end in the middle of a chunk."""
    return 20_004 // dtype.itemsize * 4


@by_dtype
def test_reductions(run, world, dtype, bounced):
    """Of several sizes, the rows of the odd ones uneven; the input of a reduce-scatter stays."""
    for numel, op in zip((numel_of(dtype), 20_001, 7, 1, 0), cycle(ops_of(dtype)), strict=False):
        tensor = values(dtype, numel, world.rank)
        run("all_reduce", tensor, op)
        assert torch.equal(tensor, expected(dtype, numel, world.size, op)), (numel, op)
    numel = numel_of(dtype)
    input, output = values(dtype, numel, world.rank), torch.empty(numel // world.size, dtype=dtype)
    op = ops_of(dtype)[2]
    run("reduce_scatter", output, input, op)
    assert torch.equal(output, expected(dtype, numel, world.size, op).view(world.size, -1)[world.rank])
    assert torch.equal(input, values(dtype, numel, world.rank))
    assert bounced == (["all_reduce"] * 4 + ["reduce_scatter"] if world.size > 1 else [])


@by_dtype
def test_movements(run, world, dtype, bounced):
    """All-gathers, in place and not, and broadcasts of private tensors, of one chunk and of several."""
    for rows in (numel_of(dtype) // 4 + 3, 5, 1):
        parts = [values(dtype, rows, rank) for rank in range(world.size)]
        whole = torch.zeros(rows * world.size, dtype=dtype)
        run("all_gather", whole, parts[world.rank].clone())
        assert torch.equal(whole, torch.cat(parts))
        whole = torch.zeros(rows * world.size, dtype=dtype)
        own = whole[world.rank * rows : (world.rank + 1) * rows]
        own.copy_(parts[world.rank])
        run("all_gather", whole, own)
        assert torch.equal(whole, torch.cat(parts))
        for root in {0, world.size - 1}:
            tensor = values(dtype, rows, world.rank).view(1, rows)
            run("broadcast", tensor, root)
            assert torch.equal(tensor.view(-1), parts[root])
    assert set(bounced) == ({"all_gather", "broadcast"} if world.size > 1 else set())


@pytest.mark.mpi(min_size=2)
def test_a_root_that_hurries_overwrites_nothing(world):
    """It takes nothing itself, and yet it may be at most one chunk ahead of a rank that dawdles."""
    for number in range(30):
        tensor = torch.full((5000,), float(number if world.rank == 0 else -1))
        if world.rank == world.size - 1:
            time.sleep(0.001)
        world.broadcast(tensor, 0)
        assert tensor.eq(number).all()


def test_a_tensor_of_inference_mode_is_reduced_outside_of_it(run, world):
    with torch.inference_mode():
        tensor, output = torch.ones(6000), torch.empty(6000)
    run("all_reduce", tensor, "sum")
    assert tensor.eq(world.size).all()
    run("reduce_scatter", output, torch.ones(6000 * world.size), "avg")
    assert output.eq(1).all()


@by_wide_dtype
def test_every_way_has_the_same_bits(world, mpi_world, dtype):
    """Slots, windows and, if deterministic, MPI: the sum in rank order, halves in float32 and rounded once."""
    numel = 40_013
    parts = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(world.size)]
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    with Communicator(mpi_world, order="rank", switch_points=NEVER) as by_mpi:
        for comm, tensor in ((world, torch.empty(numel, dtype=dtype)), (world, world.empty((numel,), dtype)),
                             (by_mpi, torch.empty(numel, dtype=dtype))):  # fmt: skip
            tensor.copy_(parts[world.rank])
            comm.all_reduce(tensor)
            assert torch.equal(tensor, total.to(dtype))


def test_autograd_sees_that_a_leaf_changed(world):
    leaf = torch.full((5000,), 2.0, requires_grad=True)
    saved = (leaf * leaf).sum()
    world.all_reduce(leaf, "max")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


def test_many_rounds_on_two_lanes(world):
    """The caller's and a stream's slots and flags, in flight at once; ranks that dawdle in turn."""
    stream = world.new_stream()
    one, other = torch.empty(10_000), torch.empty(10_000)
    for number in range(20):
        one.fill_(number)
        other.fill_(-number)
        work = world.all_reduce(one, stream=stream)
        if number % world.size == world.rank:
            os.sched_yield()
        world.all_reduce(other)
        world.reduce_scatter(torch.empty(300), torch.ones(300 * world.size))
        work.wait()
        assert one.eq(number * world.size).all() and other.eq(-number * world.size).all()


@pytest.mark.mpi(min_size=2)
def test_different_calls_are_an_error_on_all(world):
    """Before a byte is written; and the ranks are in step afterwards."""
    shared = world.empty((8000,)).fill_(1.0)
    tensor = torch.ones(8000)
    for call in (
        lambda: world.all_reduce(tensor[: 8000 - 4 * world.rank]),
        lambda: world.all_reduce(tensor, "max" if world.rank else "sum"),
        lambda: world.all_reduce(shared if world.rank == 1 else tensor),
        lambda: world.all_reduce(tensor) if world.rank else world.reduce_scatter(tensor[: 8000 // world.size], shared),
    ):
        with pytest.raises(CollectiveMismatch):
            call()
        assert tensor.eq(1).all() and shared.eq(1).all()
    world.all_reduce(tensor)
    assert tensor.eq(world.size).all()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("room", [0, 8192], ids=["for nothing", "for flags"])
def test_too_little_shared_memory_is_mpis(mpi_world, monkeypatch, bounced, room):
    """On all ranks, if one finds so; for streams too. Where there is nothing left, not even flags are shared."""
    if mpi_world.rank == 1:
        monkeypatch.setattr(windows, "WAYS", [way._replace(left=lambda: room) for way in WAYS])
    with Communicator(mpi_world, switch_points=ALWAYS) as comm:
        assert (comm.node_size is None) == (room == 0)
        for stream in (None, comm.new_stream()):
            tensor = torch.ones(8000)
            comm.all_reduce(tensor, stream=stream).wait()
            assert tensor.eq(comm.size).all()
    assert bounced == []


def test_empty_tensors_are_mpis(mpi_world, bounced):
    """Even of a switch point of 0: a pipeline without a chunk would not wait for the others before it is done."""
    with Communicator(mpi_world, switch_points=SwitchPoints(dict.fromkeys(ALWAYS.rows, Point(0, 0, 0)))) as comm:
        for _ in range(3):
            comm.all_reduce(torch.empty(0))
            comm.reduce_scatter(torch.empty(0), torch.empty(0))
        tensor = torch.ones(())
        comm.all_reduce(tensor)
        assert tensor == comm.size
    assert bounced == (["all_reduce"] if comm.size > 1 else [])


@pytest.mark.mpi(min_size=2)
def test_switch_points_differ(mpi_world):
    with pytest.raises(CollectiveError, match="switch_points"):
        Communicator(mpi_world, switch_points=ALWAYS if mpi_world.rank else None)
    with pytest.raises(CollectiveError, match=r"SwitchPoints\.load"):
        Communicator(mpi_world, switch_points="here.json")
