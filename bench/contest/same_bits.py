"""Tiny deterministic runs at every layout: each must have the bits of the run on one rank.

    mpiexec -n 16 python -m bench.contest same_bits --keep grid.json --output grid.md
    mpiexec -n 4 python -m bench.contest same_bits --keep grid.json --models gpt --seconds 60

A run trains a GPT, a BERT or a Llama of one layer, with dropout and clipping. Its digests are those of the loss, the
gradient's norm and the weights of each step, and of every parameter, master and moment after the last one. The layouts
are all with 1, 2 and 4 tensor-parallel and 1, 2 and 4 data-parallel ranks. The options change from run to run; with
--runs 3 each size has them in every combination. Other runs stop in the middle of an epoch, and go on elsewhere.

The results are kept in the file of --keep after every run. A further call with the same file goes on with the runs that
it lacks and for which the job has ranks. So the grid can be done in pieces, and small layouts by small jobs. The status
is 1 if a run differs, or if ordinary runs do not differ; else 3 if runs are missing; else 0.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.command.files import replace_json
from bench.command.machine import environment
from bench.command.start import progress
from bench.contest.parts.base import Case, Contest
from bench.contest.parts.grid import ALONE, COLUMNS, RUNS, GridRun, cells, wrong
from bench.contest.parts.on_ranks import new_folder, on_some
from bench.contest.parts.tiny_run import DENSE, LLAMA, PRECISIONS, SETTINGS, Digests, run, unlike
from commengine import Communicator, UsageError
from commengine.files.reading import read_json
from commengine.options.ranges import COUNT, SECONDS, between
from commengine.rank_zero import on_rank_zero
from trainers.run.startup import fix_products

if TYPE_CHECKING:
    from mpi4py import MPI

#: names of digests that a row keeps, of those that differ
NAMED = 5
#: the exit status where runs are missing
UNFINISHED = 3


def measure(world: Communicator, given: Any, result: dict[str, Any]) -> None:
    """Run the cells that ``result`` lacks, and add their rows on rank 0. Collective over ``world``."""
    torch.set_num_threads(1)
    wanted = list(cells(given.models, given.precisions, given.runs))
    done = set(world.mpi.bcast([row["name"] for row in result["rows"]] if world.rank == 0 else None))
    missing = [cell for cell in wanted if cell.name not in done and cell.ranks <= world.size]
    missing.sort(key=lambda cell: (not cell.kind.endswith("alone"), -cell.ranks))  # smaller jobs can do the others
    began = time.monotonic()
    with progress(world, len(missing)) as bar:
        for cell in missing:
            late = given.seconds is not None and time.monotonic() - began > given.seconds
            if world.mpi.bcast(late):
                return
            start = time.perf_counter()
            with new_folder(world) as folder:
                work = partial(digests_of, cell=cell, steps=given.steps, folder=folder)
                found = on_some(world, cell.ranks, work)
            if world.rank == 0:
                result["rows"].append(_row(cell, found, result["rows"]) | {"seconds": time.perf_counter() - start})
                if given.keep is not None:
                    replace_json(Path(given.keep), result)
            bar.update()


def digests_of(mpi: MPI.Intracomm, cell: GridRun, steps: int, folder: Path) -> Digests:
    """Train the cell's run on the ranks of ``mpi``. Collective over ``mpi``, which has as many as it needs.

    folder: an empty one, for the checkpoints of a run that is resumed.
    """
    return run(
        mpi, cell.model, cell.layout, precision=cell.precision, steps=steps, deterministic=cell.deterministic,
        resumed=None if cell.first is None else (cell.first, max(steps // 2, 1), folder),
    )  # fmt: skip


def _row(cell: GridRun, found: Digests, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A row of the result: how many digests differ from those of the run on one rank, and the first names of them."""
    row: dict[str, Any] = {
        "name": cell.name, "kind": cell.kind, "model": cell.model, "precision": cell.precision, "column": cell.column,
        "digests": len(found), "skipped": sum(step[2] for step in found["steps"]), "differ": 0, "different": [],
        "digest": hashlib.blake2b(json.dumps(found, sort_keys=True).encode(), digest_size=8).hexdigest(),
    }  # fmt: skip
    alone = "alone" if cell.deterministic else "control alone"
    if cell.kind == alone:
        return row | {"every": found}
    (right,) = (one["every"] for one in rows if one["name"] == GridRun(alone, cell.model, cell.precision, ALONE).name)
    differing = unlike(right, found)
    return row | {"differ": len(differing), "different": differing[:NAMED]}


def _told(rows: Sequence[dict[str, Any]]) -> str:
    """One field of the table: runs alike of all runs; of the controls, runs that differ."""
    if not rows:
        return ""
    if rows[0]["kind"] == "control":
        return f"{sum(bool(row['differ']) for row in rows)} of {len(rows)} differ"
    return f"{sum(not row['differ'] for row in rows)} of {len(rows)}"


def begun(given: Any) -> dict[str, Any]:
    """The settings and the rows so far: those in the file of ``--keep``, or an empty one.

    Raises UsageError if the file has another grid, or one of another machine or other versions.
    """
    surroundings = environment("bench.contest same_bits")
    settings = {
        "steps": given.steps, "model": [SETTINGS, LLAMA], "MKL_CBWR": os.environ.get("MKL_CBWR"),
        "hardware": surroundings["hardware"], "versions": surroundings["versions"],
    }  # fmt: skip
    settings = json.loads(json.dumps(settings))
    result: dict[str, Any] = {"settings": settings, "rows": []}
    if given.keep is None or not Path(given.keep).exists() or Path(given.keep).stat().st_size == 0:
        return result
    older = read_json(Path(given.keep))
    if not isinstance(older, dict) or not older.keys() >= result.keys():
        raise UsageError(f"--keep {given.keep}: is no file of this contest; name another file")
    if changed := [name for name in settings if older["settings"].get(name) != settings[name]]:
        raise UsageError(f"--keep {given.keep}: has runs with other settings ({', '.join(changed)}); name another file")
    return result | {"rows": older["rows"]}


class SameBitsContest(Contest):
    """The same bits at every layout."""

    title = "The same bits at every layout"
    rounds = 0
    on_ranks = True

    def add_options(self, add: Callable[..., Any]) -> None:
        """The part of the grid that is wanted."""
        add("--models", nargs="+", choices=DENSE, default=list(DENSE), help="(default: all)")
        add("--precisions", nargs="+", choices=list(PRECISIONS), default=list(PRECISIONS), help="(default: all)")
        add("--runs", type=int, valid=between(1, RUNS), default=1, help="with other options each, at each size; with "
            f"{RUNS} each size has the options in every combination")  # fmt: skip
        add("--steps", type=int, valid=COUNT, default=20, help="steps of a run")
        add("--seconds", type=float, valid=SECONDS, help="begin no further run after so many (default: no limit)")
        add("--keep", metavar="FILE", help="keep the results here, and go on where they end")

    def measure(self, given: Any, world: Communicator) -> Sequence[Case]:
        """Do the runs that are missing. Collective over ``world``."""
        fix_products()
        result = on_rank_zero(world, lambda: begun(given))
        measure(world, given, result)
        return [] if world.rank else [compared(result, list(cells(given.models, given.precisions, given.runs)))]

    def notes(self, given: Any, cases: Sequence[Case]) -> list[str]:
        """How many runs are done, and how many are alike."""
        told = cases[0].numbers
        return [
            f"- {len(told['rows'])} of {told['wanted']} runs of {told['settings']['steps']} steps are done, in "
            f"{sum(row['seconds'] for row in told['rows']):.0f} s",
            f"- {told['same']} of {told['compared']} runs have all digests of the run on one rank: of the loss, the "
            "norm and the weights of each step, and of all parameters, masters and moments after the last one",
            "- a resumed run stops in the middle of an epoch, and goes on at another layout. A control is a pair of "
            "runs without `--deterministic`, which must differ",
        ]

    def status(self, cases: Sequence[Case]) -> int:
        """1 for a wrong run; else whether runs are missing."""
        told = cases[0].numbers
        return super().status(cases) or (UNFINISHED if len(told["rows"]) < told["wanted"] else 0)


def compared(result: dict[str, Any], wanted: Sequence[GridRun]) -> Case:
    """The case of the rows of ``result`` that are ``wanted``: a side for each model and precision."""
    names = {cell.name for cell in wanted}
    rows = [row for row in result["rows"] if row["name"] in names]
    alike = [not row["differ"] for row in rows if row["kind"] in ("layout", "resumed")]
    case = Case(numbers={
        "settings": result["settings"], "rows": rows, "wanted": len(names), "same": sum(alike), "compared": len(alike),
    })  # fmt: skip
    for first in (row for row in rows if row["kind"] == "alone"):
        mine = [row for row in rows if (row["model"], row["precision"]) == (first["model"], first["precision"])]
        case.facts[f"{first['model']}, {first['precision']}"] = {
            "digests": first["digests"], "skipped steps": first["skipped"], "digest of all": f"`{first['digest']}`",
            **{column: _told([row for row in mine if row["column"] == column]) for column in COLUMNS},
        }  # fmt: skip
    case.errors = [
        f"{row['name']}: {row['differ']} digests differ: {', '.join(row['different'])}" for row in rows if wrong(row)
    ]
    return case


CONTEST = SameBitsContest()
