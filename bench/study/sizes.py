"""The collectives of a study: a few sizes first, then those between them, and in the end what did not converge."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.collective_study.measuring import measure_call, place_of
from bench.collective_study.memory import largest_size as largest_buffer
from bench.collective_study.results import FORMAT, measurements
from bench.command.files import replace_json
from bench.timing.sampling import FEWEST
from bench.transports.operations import DTYPES, CollectiveCall
from commengine import Communicator
from commengine.files.reading import fault_in
from commengine.rank_zero import on_rank_zero

from . import kept
from .folder import read_file

#: the operations of training steps. The time of a sendrecv is that of a message between stages, too.
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "sendrecv")
#: the ways to run one: the engine on private tensors and on tensors in windows, and plain MPI
TRANSPORTS = ("engine", "mpi4py", "shared")
LEAST = 4  # bytes
#: factors between the sizes of each level; the first level is measured whatever the time
FACTORS = (64, 4, 2)
#: the seconds for one transport at one size, at least and at most
CELL_SECONDS = (0.02, 0.5)
#: the share of the study's time that goes to collectives, and how much of a limit its calls really take
SHARE, REAL = 0.6, 1.5
#: the share that is left at the end, to fit what was measured again
LAST_SHARE = 0.02

#: what is measured without a stop: an operation at a size in bytes
Unit = tuple[str, int]


def units(largest: int) -> Iterator[tuple[Unit, int]]:
    """Yield all units up to ``largest`` bytes with their levels, the coarsest level first."""
    seen: set[int] = set()
    for level, factor in enumerate(FACTORS):
        size = LEAST
        while size <= largest:
            if size not in seen:
                yield from (((operation, size), level) for operation in OPERATIONS)
            seen.add(size)
            size *= factor


def cell_seconds(left: float, cells: int) -> float:
    """The time limit of one transport at one size, if ``cells`` of them share ``left`` seconds."""
    low, high = CELL_SECONDS
    return min(max(left / (REAL * max(cells, 1)), low), high)


def largest_size(given: str | None, memory: dict[str, int]) -> int:
    """The largest size in bytes that --max-bytes asks for, or that fits. Raises ValueError that names the option."""
    largest = largest_buffer(given, TRANSPORTS, memory)
    if largest < LEAST:
        raise ValueError(f"--max-bytes {given}: must be at least {LEAST}")
    return min(largest, 64 << 20) if given is None else largest


@dataclass(frozen=True)
class Budget:
    """The seconds of a study over all its calls. before: of the calls before this one. whole: of the study."""

    before: float
    whole: float
    began: float = field(default_factory=time.monotonic)

    @property
    def spent(self) -> float:
        """The seconds of the study so far, on this rank's clock."""
        return self.before + time.monotonic() - self.began

    @property
    def left(self) -> float:
        """The seconds of the study that are left; below 0 if it is over time."""
        return self.whole - self.spent


@dataclass(frozen=True)
class Sweep:
    """The collectives of a study on the ranks of ``world``. Its methods are collective.

    path: the file. surroundings: of this call, for the file. dtype: of the tensors. largest: bytes. save: called on
    rank 0 after each unit, when the file is written. bar: of progress, which has a unit for each of `units`.
    """

    world: Communicator
    path: Path
    surroundings: dict[str, Any]
    dtype: str
    largest: int
    budget: Budget
    save: Callable[[], None]
    bar: Any

    def measure(self) -> None:
        """Measure what the file lacks, within the time. Raises UsageError if no transport works here."""
        plan, whole = [*units(self.largest)], SHARE * self.budget.whole

        def following(done: dict[str, Any]) -> tuple[Unit, float] | None:
            todo = [(unit, level) for unit, level in plan if [*unit] not in done["units"]]
            self.bar.update(len(plan) - len(todo) - self.bar.n)
            left = whole - self.budget.spent
            if not todo or (todo[0][1] and left < 0):
                return None
            last = max(todo[0][1], 1)  # the first two levels share their time
            return todo[0][0], cell_seconds(left, len(TRANSPORTS) * sum(level <= last for _, level in todo))

        self._run(following)
        self.bar.update(len(plan) - self.bar.n)  # for the others there was no time

    def measure_again(self) -> None:
        """Measure again what did not converge, until all has, or the time is up.

        Each time a unit is measured again it has twice as long.
        """
        reserve = LAST_SHARE * self.budget.whole

        def following(done: dict[str, Any]) -> tuple[Unit, float] | None:
            left, tries = self.budget.left - reserve, tries_of(done)
            unit = kept.worst(done["rows"], tries) if left > CELL_SECONDS[1] else None
            if unit is None:
                return None
            seconds = min(CELL_SECONDS[1] * 2 ** min(tries.get(unit, 0), 10), left / (REAL * len(TRANSPORTS)))
            return unit, max(seconds, CELL_SECONDS[0])

        self._run(following)

    def _run(self, following: Callable[[dict[str, Any]], tuple[Unit, float] | None]) -> None:
        """Measure units, and write the file after each.

        following: called on rank 0 with the file's contents, whose rows are Measurements. It names the next unit, and
        the seconds of a transport.
        """
        world = self.world
        done = on_rank_zero(world, lambda: older(self.path))
        done |= {name: measurements(done[name]) for name in ROWS}
        if (unit := on_rank_zero(world, lambda: following(done))) is None:
            return
        place = place_of(world, world, "world", least=FEWEST)
        if place.states is not None:
            place.states.restore(done["states_seen"])
        with place.opened(TRANSPORTS, self.largest + 64 * world.size) as (transports, unopened):
            start = "clock" if place.by_clock else "barrier"
            done = {"format": FORMAT, **self.surroundings, "ranks": world.size, "start": start} | done
            while unit is not None:
                (operation, size), seconds = unit
                self.bar.set_description(f"{operation} {size} B")
                call = CollectiveCall.of(operation, DTYPES[self.dtype], "sum", 0, world.size, size)
                now = replace(place, stopping=replace(place.stopping, seconds=seconds))
                rows, skipped = measure_call(now, call, transports, [True], seed=size)
                new = [row.but(state_seen=row.state, asked_bytes=size) for row in rows]
                done["rows"], done["other_rows"] = kept.split([*done["rows"], *done["other_rows"], *new], place.states)
                if [operation, size] in done["units"]:
                    tries = tries_of(done)
                    tries[operation, size] = tries.get((operation, size), 0) + 1
                    done["again"] = [[*key, count] for key, count in tries.items()]
                else:
                    done["units"].append([operation, size])
                found = [*done["skipped"], *unopened, *skipped]
                done["skipped"] = list({tuple(sorted(one.items(), key=str)): one for one in found}.values())
                done["states"] = place.states.lines() if place.states else []
                done["states_seen"] = [] if place.states is None else place.states.to_json()

                def write() -> None:
                    replace_json(self.path, done | {name: [row.to_json() for row in done[name]] for name in ROWS})
                    self.save()

                on_rank_zero(world, write)
                unit = on_rank_zero(world, lambda: following(done))


def tries_of(done: dict[str, Any]) -> dict[Unit, int]:
    """How often each unit was measured again."""
    return {(operation, size): count for operation, size, count in done["again"]}


#: the measurements of a file: those that count, and the others
ROWS = ("rows", "other_rows")
#: what a file has of earlier calls
KEPT = (*ROWS, "units", "again", "skipped", "states_seen")


def older(path: Path) -> dict[str, Any]:
    """The study so far. Raises UsageError for a file that is damaged."""
    found = read_file(path) if path.exists() else {"rows": [], "units": [], "skipped": []}
    with fault_in(f"DIR: {path}: damaged; give --overwrite to begin anew"):
        done = {name: found[name] if name in ("rows", "units", "skipped") else found.get(name, []) for name in KEPT}
        kept.worst(kept.split(measurements([*done["rows"], *done["other_rows"]]), None)[0], tries_of(done))
        [(float(one["seconds_8_bytes"]), int(one["probes"]), one["part_of"]) for one in done["states_seen"]]
    return done
