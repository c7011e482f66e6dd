"""The collectives of a study: a few sizes first, then those between them, and in the end what did not converge."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench import collectives
from bench.collective_study.measuring import GroupSetup
from bench.command.files import replace_json
from bench.timing.clocks import synchronise
from bench.timing.sampling import Stopping
from bench.timing.starting import spans_nodes
from bench.timing.states import States
from commengine import Communicator, UsageError
from commengine.mpi import load_mpi
from commengine.rank_zero import on_rank_zero

from . import kept
from .folder import read_file
from .halting import Halting

#: the operations of training steps
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
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


@dataclass(frozen=True)
class Unit:
    """What is measured without a stop: one operation at one size."""

    operation: str
    size: int
    level: int

    @property
    def key(self) -> list[Any]:
        """The unit in a file."""
        return [self.operation, self.size]


def units(largest: int) -> Iterator[Unit]:
    """Yield all units up to ``largest`` bytes, the coarsest level first."""
    seen: set[int] = set()
    for level, factor in enumerate(FACTORS):
        size, sizes = LEAST, []
        while size <= largest:
            sizes.append(size)
            size *= factor
        new = [one for one in sizes if one not in seen]
        seen.update(new)
        yield from (Unit(operation, one, level) for one in new for operation in OPERATIONS)


def cell_seconds(left: float, cells: int) -> float:
    """The time limit of one transport at one size, if ``cells`` of them share ``left`` seconds."""
    low, high = CELL_SECONDS
    return min(max(left / (REAL * max(cells, 1)), low), high)


def largest_size(given: str | None, dtype: str, world_size: int, memory: dict[str, int]) -> int:
    """The largest size in bytes that --max-bytes asks for, or that fits. Raises ValueError that names the option."""
    extra = [] if given is None else ["--max-bytes", given]
    sizes = _settings(extra, dtype, world_size, memory).sizes
    return min(sizes[-1], 64 << 20) if given is None else sizes[-1]


def _settings(extra: list[str], dtype: str, ranks: int, memory: dict[str, int]) -> collectives.Settings:
    argv = ["--operations", *OPERATIONS, "--transports", *TRANSPORTS, "--dtypes", dtype, "--no-out-of-place"]
    return collectives.settings([*argv, "--min-bytes", str(LEAST), *extra], ranks, memory)


class MeasuringSession:
    """What measures units and writes the file of a study. Its methods are collective.

    result: the file's contents; its rows are on rank 0 and, of earlier calls, on all ranks.
    """

    def __init__(
        self, world: Communicator, path: Path, place: GroupSetup, chosen: collectives.Settings,
        transports: list[Any], result: dict[str, Any], save: Callable[[], None],
    ) -> None:  # fmt: skip
        self._world, self._path, self._place, self._chosen, self._save = world, path, place, chosen, save
        self.transports, self.result = transports, result
        self._began, self._first = load_mpi().Wtime(), synchronise(world.mpi)

    def run(self, unit: Unit, seconds: float, bar: Any) -> None:
        """Measure a unit, with ``seconds`` for each transport, and write the file."""
        now = replace(self._place, stopping=replace(self._place.stopping, seconds=seconds))
        one = replace(self._chosen, operations=[unit.operation], sizes=[unit.size])
        rows, skipped = collectives.measure(now, one, self.transports, lambda _: None, bar)
        new = [row | {"state_seen": row["state"], "asked_bytes": unit.size} for row in rows]
        result, states = self.result, self._place.states
        result["rows"], result["other_rows"] = kept.split([*result["rows"], *result["other_rows"], *new], states)
        if unit.key in result["units"]:
            tries = self.tries()
            tries[unit.operation, unit.size] = tries.get((unit.operation, unit.size), 0) + 1
            result["again"] = [[*key, count] for key, count in tries.items()]
        else:
            result["units"] = [*result["units"], unit.key]
        result["skipped"] = _once([*result["skipped"], *skipped])
        result["states"] = [kept.described(states)]
        result["states_seen"] = [] if states is None else states.to_json()
        self.write()

    def tries(self) -> dict[tuple[str, int], int]:
        """How often each unit was measured again."""
        return {(operation, size): count for operation, size, count in self.result["again"]}

    def write(self) -> None:
        """Write the file and the study's record."""
        last = synchronise(self._world.mpi)
        elapsed = max(load_mpi().Wtime() - self._began, 1e-9)
        clock = collectives.clock_summary(self._first, last, elapsed)

        def on_disk() -> None:
            replace_json(self._path, self.result | {"clock": clock})
            self._save()

        on_rank_zero(self._world, on_disk)


@dataclass(frozen=True)
class Sweep:
    """The collectives of a study on the ranks of ``world``. Its methods are collective.

    path: the file. surroundings: of this call, for the file. dtype: of the tensors. largest: bytes. memory: free bytes
    of a rank. save: called on rank 0 after each unit, when the file is written. bar: of progress, which has a unit for
    each of `units`.
    """

    world: Communicator
    path: Path
    surroundings: dict[str, Any]
    dtype: str
    largest: int
    memory: dict[str, int]
    halting: Halting
    save: Callable[[], None]
    bar: Any

    def measure(self) -> signal.Signals | None:
        """Measure what the file lacks, within the time. Returns the signal that stopped it.

        Raises UsageError if no transport works here.
        """
        plan, halting = [*units(self.largest)], self.halting
        done = on_rank_zero(self.world, lambda: _older(self.path))
        todo = [unit for unit in plan if unit.key not in done["units"]]
        self.bar.update(len(plan) - len(todo))
        if not todo:
            return None
        budget = SHARE * (halting.spent + halting.left)
        stopped = None
        with self._session(done) as measuring:
            for number, unit in enumerate(todo):
                level = max(unit.level, 1)  # the first two levels share their time
                cells = len(measuring.transports) * sum(one.level <= level for one in todo[number:])
                spent = on_rank_zero(self.world, lambda: halting.spent)
                if stopped := halting.stopped():
                    break
                if unit.level and spent > budget:
                    break
                measuring.run(unit, cell_seconds(budget - spent, cells), self.bar)
        if not stopped:
            self.bar.update(len(plan) - self.bar.n)  # for the others there was no time
        return stopped

    def measure_again(self) -> signal.Signals | None:
        """Measure again what did not converge, until all has, or the time is up; as `measure`.

        Each time a unit is measured again it has twice as long.
        """
        done, halting = on_rank_zero(self.world, lambda: _older(self.path)), self.halting
        reserve = LAST_SHARE * (halting.spent + halting.left)

        def next_unit(
            result: dict[str, Any], tries: dict[tuple[str, int], int]
        ) -> tuple[tuple[str, int] | None, float]:
            left = halting.left - reserve
            return (kept.worst(result["rows"], tries) if left > CELL_SECONDS[1] else None), left

        if on_rank_zero(self.world, lambda: next_unit(done, {}))[0] is None:
            return None
        with self._session(done) as measuring, tqdm(disable=True) as quiet:
            while (stopped := halting.stopped()) is None:
                tries = measuring.tries()
                found, left = on_rank_zero(self.world, partial(next_unit, measuring.result, tries))
                if found is None:
                    break
                operation, size = found
                self.bar.set_description(f"again {operation} {size} B")
                seconds = CELL_SECONDS[1] * 2 ** min(tries.get((operation, size), 0), 10)
                most = left / (REAL * len(measuring.transports))
                measuring.run(Unit(operation, size, 0), max(min(seconds, most), CELL_SECONDS[0]), quiet)
        return stopped

    @contextmanager
    def _session(self, done: dict[str, Any]) -> Iterator[MeasuringSession]:
        """Open all that measures, and keep signals meanwhile. Raises UsageError if no transport works."""
        world = self.world
        chosen = collectives.Settings(
            **on_rank_zero(world, lambda: asdict(_settings([], self.dtype, world.size, self.memory)))
        )
        with ExitStack() as stack:
            by_clock = spans_nodes(world.mpi)
            states = None if by_clock else States(world.mpi)
            if states is not None:
                states.restore(done["states_seen"])
            place = GroupSetup(world, world, "world", Stopping(**chosen.stopping), by_clock=by_clock, states=states)
            transports, unopened = collectives.open_transports(place, chosen.transports, self.largest + 64 * world.size)
            for transport in transports:
                stack.push(partial(_close, transport))
            if not transports:
                raise UsageError("; ".join(f"{one['transport']}: {one['reason']}" for one in unopened))
            start = "clock" if by_clock else "barrier"
            result = {"format": 1, **self.surroundings, "ranks": world.size, "start": start} | done
            result["skipped"] = _once([*done["skipped"], *unopened])
            stack.enter_context(self.halting.between_measurements())
            yield MeasuringSession(world, self.path, place, chosen, transports, result, self.save)


def _once(skipped: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was not measured, each kind once."""
    return list({tuple(sorted(one.items(), key=str)): one for one in skipped}.values())


#: what a file has of earlier calls
KEPT = ("rows", "other_rows", "units", "again", "skipped", "states_seen")


def _older(path: Path) -> dict[str, Any]:
    """The study so far. Raises UsageError for a file that is damaged."""
    if not path.exists():
        return {name: [] for name in KEPT}
    found = read_file(path)
    needed = ("rows", "units", "skipped")
    if not isinstance(found, dict) or not all(isinstance(found.get(name), list) for name in needed):
        raise UsageError(f"DIR: {path}: not of a study; give --overwrite to begin anew")
    done = {name: found.get(name, []) for name in KEPT}
    try:
        kept.worst(kept.split([*done["rows"], *done["other_rows"]], None)[0], {})
        [(float(one["seconds_8_bytes"]), int(one["probes"]), one["part_of"]) for one in done["states_seen"]]
        [(str(operation), int(size), int(count)) for operation, size, count in done["again"]]
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UsageError(f"DIR: {path}: damaged ({error!r}); give --overwrite to begin anew") from error
    return done


def _close(transport: Any, failed: type[BaseException] | None, *_: object) -> None:
    """Close a transport unless the measurement failed: then the other ranks may not take part."""
    if failed is None:
        transport.close()
