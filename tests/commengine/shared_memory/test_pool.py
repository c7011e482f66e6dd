"""Blocks of a pool: their lives, their memory, and collectives of ranks whose blocks lie elsewhere, or have none."""

import copy
import gc
import itertools
import os
import random
import sys
import threading
from pathlib import Path

import pytest
import torch

from commengine import CollectiveError, CollectiveMismatch, Communicator
from commengine.host.switch_points import Point, SwitchPoints
from commengine.shared_memory import pool as pools
from commengine.shared_memory import windows
from commengine.shared_memory.files import NAMELESS, WAYS
from tests.support.exact import ALWAYS, expected, ops_of, values

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.every_size]

PAGE = pools.BLOCK_UNIT
NUMEL = 3 * PAGE // 4 + 5  # of fp32: a block of 4 pages, of which it fills 3 and a bit

#: what is in no window goes by MPI
WINDOWS_ONLY = SwitchPoints({key: Point(window=1) for key in ALWAYS.rows})
ways = pytest.mark.parametrize("points", [ALWAYS, WINDOWS_ONLY], ids=["slots", "mpi"])


@pytest.fixture
def comm(mpi_world):
    with Communicator(mpi_world, name="pooled", switch_points=ALWAYS) as comm:
        yield comm
        gc.collect()
        comm.close()


def held(comm):
    """The pool's blocks that some tensor refers to."""
    pool = comm._shared.pool
    probe = pool.take(1, torch.uint8)  # the pool learns of blocks that are free when the next one is asked for
    del probe
    return len(pool._in_use) - 1


def test_a_block_is_free_when_nothing_refers_to_it(comm):
    first = comm.operand("all_reduce", (NUMEL,))
    assert comm._shared.reaches(first)
    place = first.data_ptr()
    view = first.view(-1)[7:].detach()
    del first
    other = comm.operand("all_reduce", (NUMEL,))
    assert other.data_ptr() != place, "a view refers to the block"
    del view
    assert comm.operand("all_reduce", (NUMEL,)).data_ptr() == place
    leaf = torch.ones(NUMEL, requires_grad=True)
    kept = comm.operand("all_reduce", (NUMEL,)).fill_(3.0)
    product = leaf * kept  # autograd keeps the block
    del kept, other
    assert held(comm) == 1
    product.sum().backward()
    assert leaf.grad.eq(3).all()
    del product
    assert held(comm) == 0
    copied = copy.deepcopy(comm.operand("all_reduce", (NUMEL,)).fill_(1.0))
    assert not comm._shared.reaches(copied)


def test_a_block_in_flight_is_kept(comm):
    stream = comm.new_stream()
    works = []
    for number in range(20):
        block = comm.operand("all_reduce", (NUMEL,)).fill_(number)
        works.append((comm.all_reduce(block, stream=stream), block.view(-1)[-3:]))
        del block
    for number, (work, end) in enumerate(works):
        work.wait()
        assert end.eq(number * comm.size).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_collectives_of_ranks_with_other_histories(mpi_world, dtype):
    """The blocks lie at other places of each rank's part."""
    with Communicator(mpi_world, switch_points=ALWAYS) as comm:
        lane = comm.new_stream()
        before = [comm.operand("all_reduce", (PAGE * (number + 1),)) for number in range(comm.rank)]
        for stream in (None, lane):
            check_all(comm, dtype, stream)
        del before
        gc.collect()
        assert held(comm) == 0


def check_all(comm, dtype, stream=None, numel=NUMEL):
    """Every collective that has a way through windows, of operands, against the results written down."""
    rows = numel * comm.size
    for op in ops_of(dtype):
        tensor = comm.operand("all_reduce", (numel,), dtype).copy_(values(dtype, numel, comm.rank))
        comm.all_reduce(tensor, op, stream=stream).wait()
        assert torch.equal(tensor, expected(dtype, numel, comm.size, op)), op
    whole = comm.operand("reduce_scatter", (rows,), dtype).copy_(values(dtype, rows, comm.rank))
    part = torch.empty(numel, dtype=dtype)
    comm.reduce_scatter(part, whole, stream=stream).wait()
    assert torch.equal(part, expected(dtype, rows, comm.size, "sum").chunk(comm.size)[comm.rank])
    own = whole[numel * comm.rank : numel * (comm.rank + 1)]
    comm.reduce_scatter(own, whole, stream=stream).wait()  # in place
    assert torch.equal(own, part)
    gathered = comm.operand("all_gather", (rows,), dtype)
    own = values(dtype, numel, comm.rank)
    comm.all_gather(gathered, own, stream=stream).wait()
    assert torch.equal(gathered, torch.cat([values(dtype, numel, rank) for rank in range(comm.size)]))
    # The input of an all-gather may be a block, too, on some ranks only.
    given = own if comm.rank else comm.operand("all_gather", (numel,), dtype).copy_(own)
    comm.all_gather(torch.zeros(rows, dtype=dtype), given, stream=stream).wait()
    tensor = comm.operand("broadcast", (numel,), dtype).copy_(own)
    comm.broadcast(tensor, comm.size - 1, stream=stream).wait()
    assert torch.equal(tensor, values(dtype, numel, comm.size - 1))


@ways
def test_a_rank_whose_pool_is_full(mpi_world, points):
    """Its tensors are private; all ranks take the way of private tensors, on the caller's lane and on a stream's."""
    with Communicator(mpi_world, switch_points=points) as comm:
        lane = comm.new_stream()
        comm.operand("all_reduce", (NUMEL,))
        if comm.rank == comm.size - 1:
            comm._shared.pool.take = lambda numel, dtype: None
        for stream in (None, lane):
            for numel in (NUMEL, 300_000):  # one chunk of a slot, and several
                check_all(comm, torch.float32, stream, numel)
        with pytest.raises(CollectiveMismatch, match=r"rank 0 asked for .*block of the pool"):
            comm.all_reduce(comm.operand("all_reduce", (NUMEL,)).fill_(1), "max" if comm.rank else "sum")
        check_all(comm, torch.float32)


def test_memory_grows_to_the_most_in_use(comm):
    pool = None
    for _ in range(5):
        tensors = [comm.operand("all_reduce", (NUMEL,)) for _ in range(7)]
        pool = comm._shared.pool
        del tensors
    assert pool.touched == 7 * 4 * PAGE
    big = comm.operand("all_reduce", (4 * 7 * PAGE // 4 + 1,))  # one page more than all the gaps, which are one
    assert pool.touched == (4 * 7 + 1) * PAGE
    del big


@pytest.mark.parametrize("rounds", [300, pytest.param(20_000, marks=pytest.mark.long)])
def test_blocks_never_overlap(mpi_world, rounds):
    """Against a table of bytes, with sizes and lives drawn at random, in a pool that is often full."""
    limit = 40 * PAGE
    with Communicator(mpi_world, switch_points=ALWAYS, operand_bytes=limit) as comm:
        draw = random.Random(5 + comm.rank)
        comm.operand("all_reduce", (1,))
        pool, alive, refused = comm._shared.pool, [], 0
        for number in range(rounds):
            while alive and draw.random() < 0.5:
                alive.pop(draw.randrange(len(alive)))
            tensor = pool.take(draw.randrange(1, 9 * PAGE), torch.uint8)
            if tensor is None:
                refused += 1
                continue
            alive.append((tensor.fill_(number % 251), number % 251))
            spans = sorted((one.data_ptr(), one.data_ptr() + one.numel()) for one, _ in alive)
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
            assert all(one.eq(value).all() for one, value in alive)
            assert spans[0][0] >= pool.address and spans[-1][1] <= pool.address + limit
            assert sum(one.numel() for one, _ in alive) <= pool.touched <= limit
        assert refused, "the pool was never full"
        alive.clear()
        del tensor
        whole = pool.take(limit, torch.uint8)
        assert whole is not None, "the free blocks are not one gap again"
        del whole


def test_blocks_of_several_threads_never_overlap(comm):
    comm.operand("all_reduce", (1,))
    pool, wrong = comm._shared.pool, []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def take(number):
        draw, alive = random.Random(number), []
        for _ in range(300):
            alive.append(pool.take(draw.choice([1, PAGE, 2 * PAGE + 1, 5 * PAGE]), torch.uint8).fill_(number))
            if len(alive) > 5:
                wrong.extend([number] * int(alive.pop(draw.randrange(6)).ne(number).any()))

    try:
        threads = [threading.Thread(target=take, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == [] and held(comm) == 0


@ways
def test_a_window_is_gathered_into_blocks_and_private_tensors(mpi_world, points):
    """The ranks differ in whether the output is a block, and not in where the input lies."""
    with Communicator(mpi_world, switch_points=points) as comm:
        input = comm.empty((NUMEL,)).fill_(comm.rank)
        comm.operand("all_gather", (NUMEL,))
        if comm.rank == 1:
            comm._shared.pool.take = lambda numel, dtype: None
        output = comm.operand("all_gather", (comm.size * NUMEL,))
        assert comm._shared.reaches(output) == (comm.rank != 1)
        comm.all_gather(output, input)
        assert torch.equal(output, torch.arange(comm.size).repeat_interleave(NUMEL).float())
        del input, output


@pytest.mark.parametrize("limit", [0, None], ids=["switched off", "no room at first"])
def test_without_a_pool_tensors_are_private(mpi_world, monkeypatch, limit):
    if limit is None and mpi_world.rank == 1:  # one rank's node has none left
        monkeypatch.setattr(windows, "WAYS", [way._replace(left=lambda: 0) for way in WAYS])
    given = {} if limit is None else {"operand_bytes": limit}
    with Communicator(mpi_world, switch_points=ALWAYS, **given) as comm:
        check_all(comm, torch.float32)
        assert not comm._shared.reaches(comm.operand("all_reduce", (NUMEL,)))
        assert not comm.shares_operand("all_reduce", 1 << 40, torch.float32)


def test_no_room_later(mpi_world):
    """Nothing touches memory that the node has not; a rank that finds room again uses it."""
    with Communicator(mpi_world, switch_points=ALWAYS) as comm:
        check_all(comm, torch.float32)
        kept = comm.operand("all_reduce", (NUMEL,))
        pool = comm._shared.pool
        if comm.rank == 1:
            pool._way = NAMELESS._replace(left=lambda: PAGE)
        big = comm.operand("all_reduce", (1 << 20,))
        assert comm._shared.reaches(big) == (comm.rank != 1)
        check_all(comm, torch.float32, numel=1 << 18)
        pool._way = NAMELESS
        assert comm._shared.reaches(comm.operand("all_reduce", (1 << 20,)))
        del kept, big


def test_the_last_room_is_used(mpi_world, monkeypatch):
    """A pool takes memory ahead. Where there is no room for that, it takes what the block needs."""
    with Communicator(mpi_world, switch_points=ALWAYS) as comm:
        comm.operand("all_reduce", (NUMEL,))
        pool = comm._shared.pool
        most = pool._reserved + pools.RESERVE_BYTES // 2
        monkeypatch.setattr(pool, "_way", NAMELESS._replace(left=lambda: most - pool._reserved))
        kept = [comm.operand("all_reduce", (pools.RESERVE_BYTES // 16,)) for _ in range(7)]  # quarters, in bytes
        assert [comm._shared.reaches(one) for one in kept] == [True] * 6 + [False]
        del kept


def test_a_pool_that_nobody_uses_is_unmapped(mpi_world):
    def mapped():
        return int(Path("/proc/self/statm").read_text().split()[0]) * 4096

    sizes = []
    for _ in range(4):
        with Communicator(mpi_world, switch_points=ALWAYS) as comm:
            comm.all_reduce(comm.operand("all_reduce", (4 << 20,)).fill_(1.0))
        sizes.append(mapped())
    assert sizes[-1] - sizes[0] < 16 << 20, "pools were left behind"


def test_memory_outlives_the_communicator_where_a_tensor_refers_to_it(mpi_world):
    with Communicator(mpi_world, switch_points=ALWAYS) as comm:
        comm.operand("all_reduce", (NUMEL,)).fill_(4.0)
        kept = comm.operand("all_reduce", (NUMEL,)).fill_(3.0)[5:]
    gc.collect()
    assert kept.sum() == 3.0 * (NUMEL - 5)
    with pytest.raises(CollectiveError, match="closed"):
        comm.operand("all_reduce", (NUMEL,))


def test_where_a_rank_makes_no_pool_checked_says_so(mpi_world):
    with Communicator(mpi_world, switch_points=ALWAYS, checked=True) as comm:
        private = torch.ones(NUMEL)
        with pytest.raises(CollectiveMismatch, match="shares_operand"):
            comm.all_reduce(private) if comm.rank else comm.operand("all_reduce", (NUMEL,))
        check_all(comm, torch.float32)


def test_a_new_window_beside_a_pool(comm):
    """Windows of `empty` come before and after the pool, and are found."""
    one = comm.empty((NUMEL,)).fill_(1.0)
    two = comm.operand("all_reduce", (NUMEL,)).fill_(2.0)
    three = comm.empty((NUMEL,)).fill_(3.0)
    for number, tensor in enumerate((one, two, three), 1):
        comm.all_reduce(tensor)
        assert tensor.eq(number * comm.size).all()
    with pytest.raises(CollectiveMismatch, match="shared tensor"):
        comm.all_reduce(one if comm.rank else two)
    del one, two, three, tensor


def test_a_forked_child_takes_no_block_and_writes_no_flag(comm):
    """It sees its parent's pool: what is free there may be in use in the parent a moment later."""
    kept = [comm.operand("all_reduce", (NUMEL,)).fill_(number) for number in range(3)]
    comm.all_reduce(torch.ones(1 << 16))  # there are slots
    comm.all_reduce(kept[0])
    child = os.fork()
    if child == 0:
        kept.clear()
        wrong = 0
        taken = comm.operand("all_reduce", (NUMEL,)).fill_(-1.0)
        wrong |= comm._shared.reaches(taken)
        for tensor in (taken, torch.full((1 << 16,), -1.0), comm._shared.segments[0].tensor(NUMEL, torch.float32)):
            try:
                comm.all_reduce(tensor)
                wrong |= 2
            except CollectiveError as error:
                wrong |= 4 * ("forked child" not in str(error))
        os._exit(wrong)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [one.unique().tolist() for one in kept] == [[0.0], [1.0], [2.0]]
    comm.all_reduce(kept[1])  # the ranks are in step
    assert kept[1].eq(comm.size).all()
    kept.clear()
