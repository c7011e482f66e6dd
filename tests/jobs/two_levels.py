"""Compare reductions over several nodes with the exact result: ``two_levels.py RANKS_PER_NODE``, on every rank.

The nodes may be emulated. The tensors are private or shared by the ranks of a node.
"""

import itertools
import sys

import torch

from commengine import Communicator, launch
from commengine.dtypes import DTYPES
from commengine.operations import OPERATIONS
from commengine.shared_memory import slots as bounce
from tests.support.exact import ALWAYS, expected, in_pairs, ops_of, values


def check_values(world: Communicator, numel: int) -> None:
    """Every dtype and reduction, where the tensor may lie, on the caller's thread and on a stream."""
    stream = world.new_stream()
    for dtype, shared in itertools.product(sorted(DTYPES, key=str), (False, True)):
        tensor = world.empty((numel,), dtype) if shared else torch.empty(numel, dtype=dtype)
        output = torch.empty(numel // world.size, dtype=dtype)
        for op, lane in zip(ops_of(dtype), itertools.cycle((None, stream)), strict=False):
            right = expected(dtype, numel, world.size, op)
            tensor.copy_(values(dtype, numel, world.rank))
            world.reduce_scatter(output, tensor, op, stream=lane).wait()
            assert torch.equal(output, right.view(world.size, -1)[world.rank]), (dtype, shared, op)
            assert torch.equal(tensor, values(dtype, numel, world.rank)), (dtype, shared, op)
            world.all_reduce(tensor, op, stream=lane).wait()
            assert torch.equal(tensor, right), (dtype, shared, op)
            odd = values(dtype, numel - 3, world.rank)
            world.all_reduce(odd, op, stream=lane).wait()
            assert torch.equal(odd, expected(dtype, numel - 3, world.size, op)), (dtype, op)


def check_rows(world: Communicator) -> None:
    """Rows from each rank to each rank, from private tensors, from windows, and from both on one node."""
    n, me = world.size, world.rank
    stream = world.new_stream()
    for turn, where in enumerate(("private", "windows", "both", "windows", "both")):
        counts = [[(3 * rank + 5 * to + turn) % 7 * (to != turn % n) for to in range(n)] for rank in range(n)]
        inputs = [1000 * rank + torch.arange(2 * sum(counts[rank])).view(-1, 2) for rank in range(n)]
        mine = inputs[me].clone()
        window = world.empty((60, 2), torch.int64)
        if where == "windows" or (where == "both" and me % 3 == 1):
            mine = window[turn : turn + len(mine)].copy_(mine)
        received = [row[me] for row in counts]
        right = torch.cat([one.split(row)[me] for one, row in zip(inputs, counts, strict=True)])
        for lane in (None, stream):
            output = torch.zeros_like(right)
            world.all_to_all_v(output, mine, received, counts[me], stream=lane).wait()
            assert torch.equal(output, right), (where, lane)
        large = torch.full((len(right) + 2, 2), -1)
        assert world.exchange_rows(large, mine, counts[me]) == received
        assert torch.equal(large[: len(right)], right) and large[len(right) :].eq(-1).all()
        rows = counts[0]
        part, all_parts = window[: rows[me]].fill_(me), torch.empty((sum(rows), 2), dtype=torch.int64)
        world.all_gather_v(all_parts, part, rows)
        assert all_parts[:, 0].tolist() == [rank for rank, count in enumerate(rows) for _ in range(count)]


def check_rounding(world: Communicator, nodes: list[list[int]], numel: int) -> None:
    """Halves are summed over each node, then over the nodes, in float32, and rounded once."""
    for dtype in (torch.bfloat16, torch.float16):
        parts = [torch.randn(numel, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(world.size)]
        sums = [sum(parts[rank].float() for rank in ranks) for ranks in nodes]
        tensor = parts[world.rank].clone()
        world.all_reduce(tensor)
        assert torch.equal(tensor, sum(sums).to(dtype)), dtype
        with Communicator(world.mpi, order="rank", switch_points=ALWAYS) as in_order:
            tensor = parts[world.rank].clone()
            in_order.all_reduce(tensor)
        assert torch.equal(tensor, sum(part.float() for part in parts).to(dtype)), dtype


def check_tree(world: Communicator, numel: int) -> None:
    """In a tree two levels add up as one does."""
    for dtype in (torch.bfloat16, torch.float32):
        parts = [torch.randn(numel, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(world.size)]
        tensor = parts[world.rank].clone()
        world.all_reduce(tensor)
        right = in_pairs(parts)
        assert torch.equal(tensor, right), dtype
        rows, own = parts[world.rank][: 96 * world.size], torch.empty(96, dtype=dtype)
        world.reduce_scatter(own, rows.clone())
        assert torch.equal(own, right[: 96 * world.size].view(world.size, -1)[world.rank]), dtype


def main(launched: Communicator) -> None:
    per_node = int(sys.argv[1])
    bounce.SLOT_BYTES = 8192
    used: list[str] = []
    for name in ("all_reduce", "reduce_scatter"):
        row = OPERATIONS[name]
        row.in_two_levels = lambda *args, m=row.in_two_levels, n=name: (used.append(n), m(*args))
    with Communicator(launched.mpi, switch_points=ALWAYS) as world:
        numel = 2400 * world.size
        check_values(world, numel)
        output = torch.empty(numel)
        world.all_gather(output, torch.full((2400,), float(world.rank)))
        assert torch.equal(output[::2400], torch.arange(world.size).float())
        world.broadcast(output.fill_(world.rank), world.size - 1)
        assert output.eq(world.size - 1).all()
        node = world._shared.node
        if per_node:
            assert node is not None and node.size == per_node and world.size > per_node
            assert len(world._shared.segments) == len(DTYPES)
            assert set(used) == {"all_reduce", "reduce_scatter"}
            check_rounding(world, node.table, 10_001)
            check_rows(world)
            neighbours = [rank for ranks in node.table for rank in ranks] == list(range(world.size))
            used.clear()
            with Communicator(launched.mpi, switch_points=ALWAYS, order="tree") as tree:
                check_tree(tree, 10_001)
            assert set(used) == ({"all_reduce", "reduce_scatter"} if neighbours else set())
        else:
            neighbours = False
            assert node is None and not used and not world._shared.segments
            check_rows(world)
        if world.rank == 0:
            print("right" + (", neighbours on each node" if neighbours else ""), flush=True)


if __name__ == "__main__":
    launch.run(main)
