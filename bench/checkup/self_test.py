"""Run every transport of the engine on the ranks of each node and on all ranks: right results, time, bandwidth."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from bench.collective_study.measurement import Measurement
from bench.collective_study.measuring import GroupSetup, measure_call
from bench.collective_study.memory import free_memory
from bench.timing.sampling import Stopping
from bench.timing.starting import spans_nodes
from bench.transports.in_process import LOCAL
from bench.transports.operations import CollectiveCall
from commengine import Communicator
from commengine.mpi import load_mpi

#: what is run: operation, bytes
CALLS = (("all_reduce", 8), ("all_reduce", 8 << 20), ("sendrecv", 4 << 20))
LARGEST = max(nbytes for _, nbytes in CALLS)
#: at least so many times the largest buffer must be free
SPARE = 16
#: measuring a call takes about this many times its share of the time: calls that do not count, and the checks
OVERHEAD = 1.5


def self_test(world: Communicator, seconds: float) -> tuple[list[Measurement], list[dict[str, Any]]]:
    """Run all transports for about ``seconds`` in all. Collective over ``world``.

    The groups are "node", the ranks of each node, all nodes at the same time, and "world" if there are several nodes.
    A sendrecv is a ring: each rank sends to the next. Returns the measurements (on rank 0), and
    what was skipped: group, transport and reason.
    """
    names = list(LOCAL)
    rows: list[Measurement] = []
    skipped: list[dict[str, Any]] = []
    if free_memory(world)["shared"] < SPARE * LARGEST:
        names.remove("shared")
        skipped.append({"group": "node", "transport": "shared", "reason": "there is too little shared memory free"})
    several = spans_nodes(world.mpi)
    each = seconds / (2 if several else 1) / OVERHEAD / (len(names) * len(CALLS))
    with ExitStack() as stack:
        groups = {"node": world}
        if several:
            inside: Any = world.mpi.Split_type(load_mpi().COMM_TYPE_SHARED, world.rank)
            stack.callback(inside.Free)
            groups = {"node": stack.enter_context(Communicator(inside, device="cpu", name="node")), "world": world}
        for name, group in groups.items():
            if len(sizes := set(world.mpi.allgather(group.size))) > 1:
                reason = f"the nodes have different numbers of ranks: {', '.join(map(str, sorted(sizes)))}"
                skipped.append({"group": name, "transport": "all", "reason": reason})
                continue
            stopping = Stopping(seconds=each, warmup=2, fewest=8)
            place = GroupSetup(world, group, name, stopping, by_clock=several and name == "world")
            with place.opened(names, LARGEST) as (transports, refused):
                for operation, nbytes in CALLS:
                    call = CollectiveCall.of(operation, torch.float32, "sum", 0, group.size, nbytes)
                    found, other = measure_call(place, call, transports, [operation == "all_reduce"], seed=0)
                    rows += found
                    refused += other
            skipped += [{"group": name} | {key: one[key] for key in ("transport", "reason")} for one in refused]
    return rows, skipped
