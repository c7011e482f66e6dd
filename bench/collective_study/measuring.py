"""Measure one call of bench.collectives by every transport, in place and out of place: alternating, checked, timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from bench.collective_study.measurement import Measurement
from bench.timing.clocks import Offset, synchronise
from bench.timing.sampling import Sampler, Stopping, Timed, Times, sample
from bench.timing.starting import MOST_SKEW, ROUND_SECONDS, AgreedStart, Clock, MpiExchange, spans_nodes
from bench.timing.states import States
from bench.transports.in_process import Bound, LocalCall, Streamed, Transport, timed
from bench.transports.names import SAME
from bench.transports.operations import IN_PLACE, CollectiveCall
from bench.transports.peer_process import PEERS, PeerTransport
from bench.transports.variants import TRANSPORTS, share_memory
from commengine import CollectiveError, Communicator, UsageError
from commengine.mpi import load_mpi, reduced

PRODUCT = 32  # rows and columns of the matrices of --overlap's compute; a product takes one or two microseconds


@dataclass(frozen=True)
class GroupSetup:
    """The groups that are measured, all at the same time, and how.

    name: the row's "group": world, tensor or data. group: this rank's group. by_clock: the ranks of a group begin at
    agreed times instead of at MPI's barrier (bench/timing/starting.py). states: of the machine, told apart if given.
    overlap: also measure the `overlap` of calls on a stream.
    """

    world: Communicator
    group: Communicator
    name: str
    stopping: Stopping
    by_clock: bool = False
    states: States | None = None
    overlap: bool = False

    def meeting(self, offsets: Sequence[Offset]) -> Callable[[], object]:
        """The function that the ranks of a group call before each measured call."""
        if not self.by_clock:
            return self.group.mpi.Barrier
        delay = max(one.uncertainty for one in offsets)  # half a round trip to the first rank
        clock = Clock.of(offsets[self.world.rank].seconds, delay, self.group.size)
        return AgreedStart(clock, MpiExchange(self.group.mpi))

    def sample(self, calls: Sequence[Timed], seed: int, offset: float = 0.0) -> list[Sampler]:
        """See `bench.timing.sampling.sample`."""
        self.world.mpi.Barrier()
        stopping = (
            replace(self.stopping, skew=MOST_SKEW, round_seconds=ROUND_SECONDS) if self.by_clock else self.stopping
        )
        return sample(
            calls, stopping, in_group=partial(_largest, self.group), in_world=partial(_largest, self.world), seed=seed,
            offset=offset, states=self.states,
        )  # fmt: skip

    def agreed(self, work: Callable[[], Any]) -> Any:
        """The result of ``work()``, which every rank runs. A CollectiveError in one group is raised on every rank."""
        problem, result = "", None
        try:
            result = work()
        except CollectiveError as error:
            problem = str(error) or repr(error)
        if problems := [text for text in self.world.mpi.allgather(problem) if text]:
            if isinstance(result, Transport):
                result.close()
            raise CollectiveError(problems[0])
        return result

    @contextmanager
    def opened(self, names: Sequence[str], capacity: int) -> Iterator[tuple[list[Transport], list[dict[str, str]]]]:
        """The transports that work on every rank here, and for each other one the reason why it does not. Collective.

        After a failure they stay open, because the other ranks may not take part in closing them. capacity: bytes of
        the largest call. Raises UsageError if no transport works.
        """
        opened: list[Transport] = []
        skipped = []
        for name in names:
            make = partial(PeerTransport, name) if name in PEERS else TRANSPORTS[name]
            try:
                opened.append(self.agreed(partial(make, self.group, capacity)))
            except CollectiveError as error:
                skipped.append({"transport": name, "reason": str(error)})
        if not opened:
            reasons = "; ".join(f"{one['transport']} {one['reason']}" for one in skipped)
            raise UsageError(f"--transports: none of them works here: {reasons}")
        share_memory(opened, capacity)
        yield opened, skipped
        self.world.mpi.Barrier()  # nobody closes a window that another rank still reads
        for transport in reversed(opened):
            transport.close()


def place_of(
    world: Communicator, group: Communicator, name: str, *, overlap: bool = False, **stopping: Any
) -> GroupSetup:
    """The setup for the ranks of ``world``: by agreed times between nodes, and otherwise with states. Collective.

    stopping: the fields of `bench.timing.sampling.Stopping`.
    """
    by_clock = spans_nodes(world.mpi)
    states = None if by_clock else States(world.mpi)
    return GroupSetup(world, group, name, Stopping(**stopping), by_clock, states, overlap)


def _largest(comm: Communicator, mine: Times) -> Times:
    result = np.empty_like(mine)
    comm.mpi.Allreduce(mine, result, load_mpi().MAX)
    return result


def measure_call(
    place: GroupSetup, call: CollectiveCall, transports: Sequence[Transport], variants: Sequence[bool], seed: int,
    buffers: Sequence[str] = (SAME,),
) -> tuple[list[Measurement], list[dict[str, Any]]]:  # fmt: skip
    """Measure ``call``. Returns its measurements (on rank 0; empty elsewhere), and what was skipped and why.

    A measurement is that of the slowest group, but its wrong elements are those of all groups.
    variants: False out of place, True in place. seed: of the order within a round. buffers: the kinds of them.
    Collective over the world.
    """
    bounds: list[tuple[dict[str, Any], Bound]] = []
    skipped = []
    offsets = synchronise(place.world.mpi)
    own, meet = offsets[place.world.rank], place.meeting(offsets)
    for transport in transports:
        transport.meet = meet
        places = [one for one in variants if not one or call.operation in IN_PLACE] or [False]
        for transport.buffers, in_place in product(buffers, places):
            about = _about(call, transport.name, place.name, in_place)
            about |= {} if transport.buffers == SAME else {"buffers": transport.buffers}
            try:
                if (reason := transport.refuses(call, in_place)) is not None:
                    raise CollectiveError(reason)
                bounds.append((about, place.agreed(partial(transport.bind, call, in_place))))
            except CollectiveError as error:
                skipped.append(about | {"reason": str(error)})
    samplers = place.sample([bound for _, bound in bounds], seed, own.seconds)
    rows = []
    for (about, bound), sampler in zip(bounds, samplers, strict=True):
        also: dict[str, Any] = {"wrong": _wrong(place, bound)}
        if place.overlap and isinstance(bound, LocalCall) and about["transport"] == Streamed.name:
            also["overlap"] = overlap(place, bound, float(np.median(sampler.seconds)), seed, own.seconds)
        for state in sampler.states:
            mine = sampler.of(state)
            skew = {"p50": float(np.median(mine.skews)), "max": float(mine.skews.max()), "uncertainty": own.uncertainty}
            known = None if place.states is None else state
            rows.append(
                Measurement(**about, **_times(call, mine), **also, late=mine.late, start_skew=skew, state=known)
            )
    ranks = place.world.mpi.gather(rows) or []
    return [max(same, key=lambda row: row.p50) for same in zip(*ranks, strict=True)], skipped


def _about(call: CollectiveCall, transport: str, group: str, in_place: bool) -> dict[str, Any]:
    return {
        "operation": call.operation, "transport": transport, "group": group, "ranks": call.ranks,
        "dtype": "none" if call.operation == "barrier" else str(call.dtype).removeprefix("torch."),
        "redop": call.redop, "root": call.root, "in_place": in_place, "bytes": call.nbytes,
        "count": call.largest if call.operation == "all_to_all_v" else call.count,
        **({"skew": call.skew} if call.skew else {}),
    }  # fmt: skip


def _times(call: CollectiveCall, sampler: Sampler) -> dict[str, Any]:
    seconds = sampler.statistics()
    bandwidth = call.nbytes / seconds["p50"]
    return {
        "iterations": sampler.count, "converged": sampler.converged, "seconds": seconds, "ci": sampler.interval(),
        "algbw": bandwidth, "busbw": bandwidth * call.bus_factor,
    }  # fmt: skip


def _wrong(place: GroupSetup, bound: Bound) -> int:
    """The wrong elements on all ranks after one call with poisoned buffers."""
    bound.reset()
    place.world.mpi.Barrier()
    bound.run(1)
    return int(reduced(place.world.mpi, bound.wrong(), load_mpi().SUM))


def overlap(place: GroupSetup, bound: LocalCall, alone: float, seed: int, offset: float) -> dict[str, float]:
    """The share of a collective on a stream that is hidden behind as much compute.

    It is defined as in the OSU micro-benchmarks (osu_iallreduce). Returns medians in seconds of three calls that
    alternate, and the percentage. The compute is matrix products, as many as take the collective's time on this rank.
    alone: that time, in seconds. offset: of this rank's clock. Collective over the world.
    """
    left, right, out = (torch.rand(PRODUCT, PRODUCT) for _ in range(3))

    def compute(products: int) -> None:
        for _ in range(products):
            torch.mm(left, right, out=out)

    of_50 = float(np.median(timed(partial(compute, 50), 5, bound.meet)[1]))
    computed = partial(compute, max(1, round(50 * alone / of_50)))

    def both() -> None:
        work = bound.start()
        computed()
        work.wait()

    calls = [bound, replace(bound, invoke=computed), replace(bound, invoke=both)]
    communication, computing, overall = (float(np.median(one.seconds)) for one in place.sample(calls, seed, offset))
    return {
        "communication": communication, "compute": computing, "overall": overall,
        "percent": overlap_percent(communication, computing, overall),
    }  # fmt: skip


def overlap_percent(communication: float, compute: float, overall: float) -> float:
    """100 (1 - (overall - compute) / communication), from 0 to 100."""
    return min(100.0, max(0.0, 100 * (1 - (overall - compute) / communication)))
