"""Random collectives on every route at once, against results written down; and calls that differ between the ranks."""

import contextlib
import gc
import random
import time

import pytest
import torch

from commengine import CollectiveError, CollectiveMismatch, Communicator
from commengine.dtypes import DTYPES, HALF_TYPES
from commengine.host.switch_points import Point, SwitchPoints
from commengine.shared_memory.slots import SLOT_BYTES
from tests.support.exact import ALWAYS, expected, ops_of, values

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.every_size]

MOST_BYTES = 4 << 20
DTYPE_LIST = sorted(DTYPES, key=str)
WIDE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

#: sizes at which a route begins, or a slot or a kept buffer ends; for rows of 2 and 3 ranks too
BORDERS = sorted(
    {int(value) for point in SwitchPoints.load().rows.values() for value in point if value < MOST_BYTES}
    | {count * SLOT_BYTES // parts for count in (1, 2, 3, 4) for parts in (1, 2, 3)}
    | {16 << 10, 256 << 10, 3 << 20}
)

#: one table in which all tensors go through memory, the measured one, and one whose private tensors go by MPI
TABLES = {"always": ALWAYS, "measured": None, "windows": SwitchPoints({key: Point(window=1) for key in ALWAYS.rows})}


class Truth:
    """Inputs of all ranks, and the results of their reductions, for up to MOST_BYTES of a dtype; made when needed.

    exact: small whole numbers; otherwise normal numbers, which are reduced in rank order, halves in float32.
    """

    def __init__(self, size):
        self.size, self._inputs, self._reduced = size, {}, {}

    def input(self, dtype, rank, exact):
        key = dtype, rank, exact
        if key not in self._inputs:
            numel = MOST_BYTES // dtype.itemsize
            drawn = torch.Generator().manual_seed(rank + 17)
            self._inputs[key] = values(dtype, numel, rank) if exact else torch.randn(numel, generator=drawn).to(dtype)
        return self._inputs[key]

    def reduced(self, dtype, op, exact):
        key = dtype, op, exact
        if key not in self._reduced:
            numel = MOST_BYTES // dtype.itemsize
            if exact:
                self._reduced[key] = expected(dtype, numel, self.size, op)
            else:
                wide = torch.float32 if dtype in HALF_TYPES else dtype
                total, *others = (self.input(dtype, rank, exact).to(wide) for rank in range(self.size))
                for other in others:
                    total = total + other if op == "sum" else getattr(torch, f"{op}imum")(total, other)
                self._reduced[key] = total.to(dtype)
        return self._reduced[key]


class Lane:
    """One sequence of collectives: a group's own (``stream`` is None), or that of a stream."""

    def __init__(self, group, stream):
        self.group, self.stream, self.pending = group, stream, []
        self.windows = [group.empty((MOST_BYTES + 4096,), torch.uint8) for _ in range(2)]

    def finish(self):
        while self.pending:
            work, tensor, result, about = self.pending.pop(0)
            work.wait()
            if tensor is not None:
                assert same(tensor, result, about), (self.group, *about)


def same(tensor, result, about):
    """Whether two tensors have the same bits; MPI may add more than two numbers in any order."""
    _, dtype, op, exact, size = about[:5]
    if exact or op != "sum" or size == 2 or dtype in HALF_TYPES:
        return torch.equal(tensor, result)
    return torch.allclose(tensor, result, rtol=1e-5, atol=1e-5)


class Stress:
    """Rounds of collectives that all ranks draw alike.

    jitter: the most seconds that a rank sleeps before some of its calls.
    """

    def __init__(self, groups, seed, jitter):
        self.jitter, self.draw = jitter, random.Random(seed)  # the same on all ranks
        self.own = random.Random(1000 * seed + groups[0].rank + 1)  # this rank's
        self.truths = {group.size: Truth(group.size) for group in groups}
        self.lanes = [Lane(group, stream) for group in groups for stream in (None, group.new_stream())]

    def tensor(self, lane, numel, dtype, number=0):
        """A tensor of the kind that all ranks draw: private, or a part of a window."""
        kind = self.draw.choice(["private", "window"])
        start, nbytes = 16 * self.draw.randrange(0, 256), numel * dtype.itemsize
        if kind == "window" and not lane.pending:
            return lane.windows[number][start : start + nbytes].view(dtype)
        return torch.empty(numel, dtype=dtype)

    def dawdle(self, lane):
        if self.jitter and self.own.random() < 0.3:
            nap = self.own.random() * self.jitter
            if lane.stream is None:
                time.sleep(nap)
            else:
                lane.stream.enqueue(lambda: time.sleep(nap))

    def numel(self, dtype):
        nbytes = int(2 ** self.draw.uniform(0, 21.9))
        if self.draw.random() < 0.4:
            nbytes = self.draw.choice(BORDERS) + self.draw.choice((-32, -16, -8, -4, 0, 4, 8, 16, 32))
        return max(1, min(nbytes, MOST_BYTES) // dtype.itemsize)

    def round(self):
        draw, lane = self.draw, self.draw.choice(self.lanes)
        group, stream = lane.group, lane.stream
        size, rank, truth = group.size, group.rank, self.truths[group.size]
        operation = draw.choice(
            ["all_reduce"] * 4 + ["reduce_scatter"] * 3 + ["all_gather"] * 3
            + ["broadcast"] * 2 + ["reduce", "gather", "scatter", "all_to_all"]
        )  # fmt: skip
        exact = draw.random() < 0.6
        dtype = draw.choice(DTYPE_LIST if exact else WIDE)
        op = draw.choice(ops_of(dtype) if exact else ("sum", "sum", "min", "max"))
        numel, root = self.numel(dtype), draw.randrange(size)
        rows = max(1, numel // size)
        own = slice(rank * rows, (rank + 1) * rows)
        whole = rows * size
        inputs = [truth.input(dtype, other, exact) for other in range(size)]
        mine = inputs[rank]
        self.dawdle(lane)
        with torch.inference_mode() if draw.random() < 0.2 else contextlib.nullcontext():
            if operation == "all_reduce":
                tensor = self.tensor(lane, numel, dtype).copy_(mine[:numel])
                work, result = group.all_reduce(tensor, op, stream=stream), truth.reduced(dtype, op, exact)[:numel]
            elif operation == "reduce":
                tensor = mine[:numel].clone()
                work = group.reduce(tensor, root, op, stream=stream)
                result = truth.reduced(dtype, op, exact)[:numel] if rank == root else mine[:numel]
            elif operation == "broadcast":
                tensor = self.tensor(lane, numel, dtype).copy_(mine[:numel])
                work, result = group.broadcast(tensor, root, stream=stream), inputs[root][:numel]
            elif operation == "reduce_scatter":
                input = self.tensor(lane, whole, dtype).copy_(mine[:whole])
                tensor = input[own] if draw.random() < 0.3 else torch.empty(rows, dtype=dtype)
                work = group.reduce_scatter(tensor, input, op, stream=stream)
                result = truth.reduced(dtype, op, exact)[own]
            elif operation == "all_gather":
                tensor = self.tensor(lane, whole, dtype)
                if draw.random() < 0.3:
                    input = tensor[own].copy_(mine[:rows])
                else:
                    input = self.tensor(lane, rows, dtype, 1).copy_(mine[:rows])
                work = group.all_gather(tensor, input, stream=stream)
                result = torch.cat([one[:rows] for one in inputs])
            elif operation == "all_to_all":
                tensor = torch.empty(whole, dtype=dtype)
                work = group.all_to_all(tensor, mine[:whole], stream=stream)
                result = torch.cat([one[own] for one in inputs])
            elif operation == "gather":
                tensor = torch.empty(whole, dtype=dtype) if rank == root else None
                work = group.gather(tensor, mine[:rows], root, stream=stream)
                result = torch.cat([one[:rows] for one in inputs])
            else:
                tensor = torch.empty(rows, dtype=dtype)
                work = group.scatter(tensor, inputs[root][:whole], root, stream=stream)
                result = inputs[root][own]
        lane.pending.append((work, tensor, result, (operation, dtype, op, exact, size, numel, root, stream is None)))
        del tensor
        if stream is None or draw.random() < 0.4 or len(lane.pending) > 5:
            lane.finish()

    def mismatch(self):
        """Ranks that call something else in turn: an error on all, nothing written, and the next round is as always."""
        group = self.draw.choice(self.lanes).group
        numel, dtype = (1 << 20) // 4, torch.float32
        odd = group.rank == self.draw.randrange(group.size)
        given, part = torch.ones(numel), torch.zeros(numel // group.size)
        window = next(lane.windows[0] for lane in self.lanes if lane.group is group)
        calls = {
            "op": lambda: group.all_reduce(given, "max" if odd else "sum"),
            "size": lambda: group.all_reduce(given[: numel - odd]),
            "dtype": lambda: group.all_reduce(given.view(torch.int32) if odd else given),
            "operation": lambda: group.reduce_scatter(part, given) if odd else group.all_reduce(given),
            "root": lambda: group.broadcast(given, group.size - 1 if odd else 0),
            "place": lambda: group.all_reduce(window[4096 * odd :][: given.nbytes].view(dtype)),
        }
        kind = self.draw.choice(sorted(calls))
        with pytest.raises(CollectiveMismatch):
            calls[kind]()
        assert part.eq(0).all() and given.eq(1).all(), kind
        with pytest.raises(CollectiveError, match="not contiguous"):
            group.all_reduce(given.view(2, -1).t())


LONG = [pytest.param(table, *more, marks=pytest.mark.long) for table in TABLES for more in ((1500, 0.0), (800, 2e-3))]


@pytest.mark.slow
@pytest.mark.parametrize(("table", "rounds", "jitter"), [("measured", 20, 0.0), *LONG])
def test_random_collectives(mpi_world, table, rounds, jitter):
    """Two groups, each with a stream; private tensors and parts of windows; all sizes."""
    seed = 1 + sorted(TABLES).index(table)
    with Communicator(mpi_world, switch_points=TABLES[table], timeout=60, name="stressed") as world:
        other = world.split(world.rank % 2 if world.size == 4 else 0, -world.rank, name="reversed")
        groups = [world, other] if other.size > 1 else [world]
        stress = Stress(groups, seed, jitter)
        for number in range(rounds if mpi_world.size < 4 else rounds // 2):
            stress.round()
            if number % 40 == 17:
                stress.mismatch()
        for lane in stress.lanes:
            lane.finish()
        del stress, lane
        gc.collect()
        other.close()


def test_the_first_window_is_made_while_streams_are_busy(mpi_world):
    """Ranks whose streams lag differ in when they see the window; private tensors of this size go by MPI."""
    points = SwitchPoints({key: Point(window=1) for key in ALWAYS.rows})
    for slow in range(2):
        with Communicator(mpi_world, switch_points=points, timeout=20) as comm:
            lane = comm.new_stream()
            if comm.rank == slow:
                lane.enqueue(lambda: time.sleep(0.05))
            tensor = torch.ones(1000)
            work = comm.all_reduce(tensor, stream=lane)
            shared = comm.empty((1000,)).fill_(1.0)
            work.wait()
            comm.all_reduce(shared)
            assert tensor.eq(comm.size).all() and shared.eq(comm.size).all()
            del shared


def test_ranks_sleep_until_all_are_there(mpi_world):
    with Communicator(mpi_world) as comm:
        for late in range(comm.size):
            began = time.monotonic()
            if comm.rank == late:
                time.sleep(0.02)
            comm.compare("here")
            assert time.monotonic() - began > 0.015 or comm.rank != late
    with pytest.raises(CollectiveError, match="closed"):
        comm.compare("here")
