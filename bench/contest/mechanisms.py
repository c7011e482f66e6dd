"""The gain of three mechanisms in a training step between the ranks of this job.

    mpiexec -n 2 python -m bench.contest mechanisms
    mpiexec -n 2 python -m bench.contest mechanisms --mechanisms bucket_overlap --rate 0.5e9
    srun -N 2 --ntasks-per-node=2 python -m bench.contest mechanisms --mechanisms two_levels

Each mechanism is a pair of steps that differ in it alone: halo_overlap (halos of convolutions on a split field travel
during the convolution), bucket_overlap (gradients are reduced during the backward), two_levels (gradients are reduced
inside each node first). The two must report equal losses. A time is that of the slowest rank. With --rate,
bucket_overlap also runs over a transport that is slowed down to so many bytes per second (bench/timing/slow_link.py).
"Hidden" is the share of the reductions' time during which the first rank did not wait for them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from bench.contest.parts.base import Case, Contest
from bench.contest.parts.pairs import PAIRS, StepPair, bucket_overlap, refused
from bench.timing.starting import neighbours
from bench.timing.turns import slowest, take_turns
from commengine import Communicator
from commengine.mpi import load_mpi, reduced
from commengine.options.ranges import ABOVE_ZERO

#: the losses of two steps that sum in different orders may differ by this share
SAME_LOSS = 1e-3
WARMUP = 2


class MechanismsContest(Contest):
    """Steps with and without a mechanism."""

    title = "Mechanisms"
    on_ranks = True
    rounds = 11
    remarks: Sequence[str] = ()

    def add_options(self, add: Callable[..., Any]) -> None:
        """The mechanisms."""
        add("--mechanisms", nargs="+", choices=list(PAIRS), default=list(PAIRS),
            help="(default: all that have something to do here)")  # fmt: skip
        add("--rate", type=float, valid=ABOVE_ZERO,
            help="bytes per second of a slow link, on which bucket_overlap is measured, too")  # fmt: skip

    def measure(self, given: Any, world: Communicator) -> Sequence[Case]:
        """A case for each mechanism that has something to do. Collective over ``world``."""
        nodes = neighbours(world.mpi)
        reasons = {name: refused(name, nodes) for name in given.mechanisms}
        without = [f"- not measured: {name}: {reason}" for name, reason in reasons.items() if reason]
        self.remarks = [f"- nodes: {len({node[0] for node in nodes})}", *without]
        cases = []
        for name in (name for name, reason in reasons.items() if reason is None):
            pairs = {"own": PAIRS[name]}
            if given.rate is not None and name == "bucket_overlap":
                pairs[f"{given.rate / 1e9:g} GB/s"] = partial(bucket_overlap, rate=given.rate)
            for place, opened in pairs.items():
                with opened(world) as pair:
                    case = compared(world, pair, given.rounds)
                case.labels = {"mechanism": name, "link": place}
                cases.append(case)
        return cases

    def notes(self, given: Any, cases: Sequence[Case]) -> list[str]:
        """The network, and the mechanisms that have nothing to do."""
        return [*self.remarks]


def compared(world: Communicator, pair: StepPair, rounds: int) -> Case:
    """The case of two steps, which take turns. Collective over ``world``."""
    losses: dict[str, list[float]] = {"with": [], "without": []}

    def turn(name: str, step: Callable[[], float]) -> float:
        return slowest(world, lambda: losses[name].append(step()))

    turns = {"with": partial(turn, "with", pair.own), "without": partial(turn, "without", pair.without)}
    case = Case({}, take_turns(turns, rounds, warmup=WARMUP), numbers={"losses": losses})
    finite = all(math.isfinite(loss) for both in losses.values() for loss in both)
    same = finite and all(math.isclose(*both, rel_tol=SAME_LOSS) for both in zip(*losses.values(), strict=True))
    if not reduced(world.mpi, same, load_mpi().MIN):
        case.errors.append("the losses with and without a mechanism differ")
    if pair.hidden:
        shares = pair.hidden[WARMUP:]
        case.facts["with"] = {"hidden": f"{statistics.median(shares):.0%}"}
        case.numbers["hidden"] = shares
    return case


CONTEST = MechanismsContest()
