"""The collectives of a study: a few sizes first, then those between them while there is time."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench import collectives
from bench.collective_study.measuring import GroupSetup
from bench.command.files import replace_json
from bench.timing.clocks import synchronise
from bench.timing.sampling import Stopping
from bench.timing.starting import spans_nodes
from commengine import Communicator, UsageError
from commengine.mpi import load_mpi
from commengine.rank_zero import on_rank_zero
from trainers.files.reading import read_json

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


def measure(
    world: Communicator, path: Path, surroundings: dict[str, Any], dtype: str, largest: int, memory: dict[str, int],
    halting: Halting, save: Callable[[], None], bar: Any,
) -> signal.Signals | None:  # fmt: skip
    """Measure what ``path`` lacks, within the time. Returns the signal that stopped it. Collective over ``world``.

    save: called on rank 0 after each unit, when the file is written. bar: of progress, which has a unit for each of
    `units`. Raises UsageError if no transport works here.
    """
    plan = [*units(largest)]
    done = on_rank_zero(world, lambda: _older(path))
    todo = [unit for unit in plan if unit.key not in done["units"]]
    if not todo:
        bar.update(len(plan))
        return None
    chosen = collectives.Settings(**on_rank_zero(world, lambda: asdict(_settings([], dtype, world.size, memory))))
    budget = SHARE * (halting.spent + halting.left)
    stopped = None
    with ExitStack() as stack:
        by_clock = spans_nodes(world.mpi)
        place = GroupSetup(world, world, "world", Stopping(**chosen.stopping), by_clock=by_clock)
        transports, unopened = collectives.open_transports(place, chosen.transports, largest + 64 * world.size)
        for transport in transports:
            stack.push(partial(_close, transport))
        if not transports:
            raise UsageError("; ".join(f"{one['transport']}: {one['reason']}" for one in unopened))
        began, first = load_mpi().Wtime(), synchronise(world.mpi)
        bar.update(len(plan) - len(todo))
        result = {"format": 1, **surroundings, "ranks": world.size, "start": "clock" if by_clock else "barrier"} | done
        result["skipped"] = _once([*done["skipped"], *unopened])
        stack.enter_context(halting.between_measurements())
        for number, unit in enumerate(todo):
            level = max(unit.level, 1)  # the first two levels share their time
            cells = len(transports) * sum(one.level <= level for one in todo[number:])
            spent = on_rank_zero(world, lambda: halting.spent)
            if stopped := halting.stopped():
                break
            if unit.level and spent > budget:
                break
            now = replace(place, stopping=replace(place.stopping, seconds=cell_seconds(budget - spent, cells)))
            one = replace(chosen, operations=[unit.operation], sizes=[unit.size])
            rows, skipped = collectives.measure(now, one, transports, lambda _: None, bar)
            result["rows"], result["units"] = result["rows"] + rows, [*result["units"], unit.key]
            result["skipped"] = _once([*result["skipped"], *skipped])

            def write() -> None:
                elapsed = load_mpi().Wtime() - began
                replace_json(path, result | {"clock": collectives.clock_summary(first, first, max(elapsed, 1e-9))})
                save()

            on_rank_zero(world, write)
        last = synchronise(world.mpi)
        clock = collectives.clock_summary(first, last, max(load_mpi().Wtime() - began, 1e-9))
        on_rank_zero(world, lambda: replace_json(path, result | {"clock": clock}))
    if not stopped:
        bar.update(len(plan) - bar.n)  # for the others there was no time
    return stopped


def _once(skipped: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was not measured, each kind once."""
    return list({tuple(sorted(one.items(), key=str)): one for one in skipped}.values())


def _older(path: Path) -> dict[str, Any]:
    """The rows, units and skipped calls of the study so far."""
    if not path.exists():
        return {"rows": [], "units": [], "skipped": []}
    found = read_json(path)
    if not isinstance(found, dict) or not {"rows", "units", "skipped"} <= found.keys():
        raise UsageError(f"DIR: {path}: not of a study; give --overwrite to begin anew")
    return {name: found[name] for name in ("rows", "units", "skipped")}


def _close(transport: Any, failed: type[BaseException] | None, *_: object) -> None:
    """Close a transport unless the measurement failed: then the other ranks may not take part."""
    if failed is None:
        transport.close()
