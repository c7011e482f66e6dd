"""Run every transport of the engine on the ranks of each node and on all ranks: right results, time, bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from bench.collective_study.measuring import GroupSetup, measure_call
from bench.collective_study.memory import free_memory
from bench.timing.sampling import Stopping
from bench.timing.starting import spans_nodes
from bench.transports.in_process import LOCAL, Transport
from bench.transports.operations import CollectiveCall
from commengine import CollectiveError, Communicator
from commengine.mpi import load_mpi

#: what is run: operation, bytes
CALLS = (("all_reduce", 8), ("all_reduce", 8 << 20), ("sendrecv", 4 << 20))
LARGEST = max(nbytes for _, nbytes in CALLS)
#: at least so many times the largest buffer must be free
SPARE = 16
#: measuring a call takes about this many times its share of the time: calls that do not count, and the checks
OVERHEAD = 1.5


@dataclass(frozen=True)
class Tested:
    """What came of the self-test, on rank 0. rows: as bench.collectives writes them. skipped: transport and reason."""

    rows: list[dict[str, Any]]
    skipped: list[dict[str, Any]]


def self_test(world: Communicator, seconds: float) -> Tested:
    """Run all transports for about ``seconds`` in all. Collective over ``world``.

    The groups are "node", the ranks of each node, all nodes at the same time, and "world" if there are several nodes.
    A sendrecv is a ring: each rank sends to the next.
    """
    memory = free_memory(world)
    names = [name for name in LOCAL if memory["shared"] >= SPARE * LARGEST or name != "shared"]
    rows: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    if "shared" not in names:
        skipped.append({"group": "node", "transport": "shared", "reason": "there is too little shared memory free"})
    several = spans_nodes(world.mpi)
    with ExitStack() as stack:
        node = world
        if several:
            inside: Any = world.mpi.Split_type(load_mpi().COMM_TYPE_SHARED, world.rank)
            stack.callback(inside.Free)
            node = stack.enter_context(Communicator(inside, device="cpu", name="node"))
        for name, group in (("node", node), *((("world", world),) if several else ())):
            place = GroupSetup(world, group, name, Stopping(), by_clock=several and name == "world")
            found = _test_group(place, names, seconds / (2 if several else 1))
            rows += found.rows
            skipped += found.skipped
    return Tested(rows, skipped)


def _test_group(place: GroupSetup, names: Sequence[str], seconds: float) -> Tested:
    """The transports ``names`` on one kind of group. Nodes must have equally many ranks, or theirs are not run."""
    mpi = load_mpi()
    sizes = place.world.mpi.allgather(place.group.size)
    if len(set(sizes)) > 1:
        reason = f"the nodes have different numbers of ranks: {', '.join(map(str, sorted(set(sizes))))}"
        return Tested([], [{"group": place.name, "transport": "all", "reason": reason}])
    opened: list[Transport] = []
    skipped: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        for name in names:

            def make(name: str = name) -> Transport:
                return LOCAL[name](place.group, LARGEST)

            try:
                opened.append(place.agreed(make))
                stack.callback(opened[-1].close)
            except CollectiveError as error:
                skipped.append({"group": place.name, "transport": name, "reason": str(error)})
        each = seconds / OVERHEAD / max(1, len(opened) * len(CALLS))
        timed = GroupSetup(
            place.world, place.group, place.name, Stopping(seconds=each, warmup=2, fewest=8), by_clock=place.by_clock
        )
        for operation, nbytes in CALLS:
            call = CollectiveCall.of(operation, torch.float32, "sum", 0, place.group.size, nbytes)
            came = measure_call(timed, call, opened, [operation == "all_reduce"], seed=0)
            rows += came.rows
            skipped += [{name: one[name] for name in ("group", "transport", "reason")} for one in came.skipped]
        place.world.mpi.allreduce(0, mpi.SUM)  # nobody closes a window that another rank still reads
    return Tested(rows, skipped)
