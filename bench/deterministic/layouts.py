"""Compare tiny deterministic runs at every layout: each must have the bits of the run on one rank.

    mpiexec -n 16 python -m bench.deterministic.layouts --json grid.json --output grid.md
    mpiexec -n 4 python -m bench.deterministic.layouts --json grid.json --models gpt --seconds 60

A run trains a GPT, a BERT or a Llama of one layer, with dropout and clipping. Its digests are those of the loss, the
gradient's norm and the weights of each step, and of every parameter, master and moment after the last one. The layouts
are all with 1, 2 and 4 tensor-parallel and 1, 2 and 4 data-parallel ranks. The options change from run to run; with
--runs 3 each size has them in every combination. Other runs stop in the middle of an epoch, and go on elsewhere.

The results are kept in the file of --json after every run. A further call with the same file goes on with the runs that
it lacks and for which the job has ranks. So the grid can be done in pieces, and small layouts by small jobs. The status
is 1 if a run differs, or if ordinary runs do not differ; else 3 if runs are missing; else 0.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.command.files import add_files, check_writable, publish, replace_json
from bench.command.machine import environment, heading
from bench.command.parser import CommandParser, new_parser
from bench.command.start import progress, run_on_ranks
from commengine import Communicator, UsageError
from commengine.mpi import sleep_until_all
from commengine.rank_zero import on_rank_zero
from trainers.files.reading import read_json
from trainers.options import COUNT, SECONDS, between
from trainers.run.startup import fix_products

from .grid import ALONE, COLUMNS, MOVES, RUNS, GridRun, cells, wrong
from .tiny_run import LLAMA, MODELS, PRECISIONS, SETTINGS, Digests, run, unlike

if TYPE_CHECKING:
    from mpi4py import MPI

COMMAND = "bench.deterministic.layouts"
#: seconds between looks of a rank that waits
POLL_SECONDS = 0.02
#: names of digests that a row keeps, of those that differ
NAMED = 5
#: the exit status where runs are missing
UNFINISHED = 3
#: the settings with which every digest of the grid may change
DEPENDS_ON = ("steps", "model", "hardware", "versions", "MKL_CBWR")


def measure(world: Communicator, given: Namespace, result: dict[str, Any]) -> None:
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
            found = on_some(world, cell.ranks, lambda mpi, cell=cell: digests_of(mpi, cell, given.steps))  # type: ignore[misc]
            if world.rank == 0:
                result["rows"].append(_row(cell, found, result["rows"]) | {"seconds": time.perf_counter() - start})
                if given.json is not None:
                    replace_json(Path(given.json), result)
            bar.update()


def digests_of(mpi: MPI.Intracomm, cell: GridRun, steps: int) -> Digests:
    """Train the cell's run on the ranks of ``mpi``. Collective over ``mpi``, which has as many as it needs."""
    more: dict[str, Any] = {"precision": cell.precision, "steps": steps, "deterministic": cell.deterministic}
    if cell.first is None:
        return run(mpi, cell.model, cell.layout, **more)
    folder = Path(mpi.bcast(tempfile.mkdtemp() if mpi.rank == 0 else None))
    try:
        return run(mpi, cell.model, cell.layout, resumed=(cell.first, max(steps // 2, 1), folder), **more)
    finally:
        mpi.Barrier()
        if mpi.rank == 0:
            shutil.rmtree(folder)


def on_some(world: Communicator, ranks: int, work: Callable[[MPI.Intracomm], dict[str, Any]]) -> dict[str, Any]:
    """``work`` on the first ``ranks`` ranks, while the others sleep: there may be more ranks than cores.

    All ranks get rank 0's result. Collective over ``world``.
    """
    found, mine = None, world.rank < ranks
    group: Any = world.mpi.Split(int(mine), world.rank)
    if mine:
        found = work(group)
    sleep_until_all(world.mpi, POLL_SECONDS)
    group.Free()
    return dict(world.mpi.bcast(found))


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


def markdown(result: dict[str, Any], wanted: Sequence[GridRun]) -> str:
    """The result in markdown."""
    names = {cell.name for cell in wanted}
    rows = [row for row in result["rows"] if row["name"] in names]
    compared = [row for row in rows if row["kind"] in ("layout", "resumed")]
    same = sum(not row["differ"] for row in compared)
    lines = [
        *heading("The same bits at every layout", result),
        f"- {len(rows)} of {len(names)} runs of {result['settings']['steps']} steps are done, in "
        f"{sum(row['seconds'] for row in rows):.0f} s",
        f"- {same} of {len(compared)} runs have all digests of the run on one rank: of the loss, the norm and the "
        "weights of each step, and of all parameters, masters and moments after the last one",
        "- A resumed run stops in the middle of an epoch, and goes on at another layout. A control is a pair of runs "
        "without `--deterministic`, which must differ",
        "",
        f"| model | precision | digests | skipped steps | digest of all | {' | '.join(COLUMNS)} |",
        f"|---|---|---:|---:|---|{'---|' * len(COLUMNS)}",
    ]
    for first in rows:
        if first["kind"] != "alone":
            continue
        found = [_told([row for row in rows if _of(row, first) and row["column"] == column]) for column in COLUMNS]
        lines.append(
            f"| {first['model']} | {first['precision']} | {first['digests']} | {first['skipped']} | "
            f"`{first['digest']}` | {' | '.join(found)} |"
        )
    lines += ["", "The runs at layouts by their options:", "", "| option | runs |", "|---|---|"]
    lines += _by_option(
        [cell for cell in wanted if cell.kind == "layout" and cell.name in {row["name"] for row in rows}]
    )
    lines += ["", "The resumed runs:", ""]
    lines += [f"- {first}; and then {second}" for first, second in MOVES]
    for row in rows:
        if wrong(row):
            lines.append(f"- WRONG: {row['name']}: {row['differ']} digests differ: {', '.join(row['different'])}")
    return "\n".join([*lines, ""])


def _by_option(done: Sequence[GridRun]) -> list[str]:
    counts = Counter((name, str(value)) for cell in done for name, value in cell.layout.options.items())
    off = Counter(name for cell in done for name in cell.layout.options)
    names = sorted(off)
    found = []
    for name in names:
        values = {value: number for (of, value), number in sorted(counts.items()) if of == name}
        if rest := len(done) - off[name]:
            values["without"] = rest
        told = ", ".join(f"{'with' if value == 'True' else value}: {number}" for value, number in values.items())
        found.append(f"| `--{name.replace('_', '-')}` | {told} |")
    return found


def _of(row: dict[str, Any], first: dict[str, Any]) -> bool:
    return bool((row["model"], row["precision"]) == (first["model"], first["precision"]))


def _told(rows: Sequence[dict[str, Any]]) -> str:
    """One field of the table: runs alike of all runs; of the controls, runs that differ."""
    if not rows:
        return ""
    if rows[0]["kind"] == "control":
        return f"{sum(bool(row['differ']) for row in rows)} of {len(rows)} differ"
    return f"{sum(not row['differ'] for row in rows)} of {len(rows)}"


def parser() -> CommandParser:
    """The command line."""
    options = new_parser(COMMAND, __doc__)
    add = options.add_argument
    add("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="(default: all)")
    add("--precisions", nargs="+", choices=list(PRECISIONS), default=list(PRECISIONS), help="(default: all)")
    add("--runs", type=int, valid=between(1, RUNS), default=1, help="with other options each, at each size; with "
        f"{RUNS} each size has the options in every combination (default: %(default)s)")  # fmt: skip
    add("--steps", type=int, valid=COUNT, default=20, help="steps of a run (default: %(default)s)")
    add("--seconds", type=float, valid=SECONDS, help="begin no further run after so many seconds (default: no limit)")
    add_files(options, json="keep the results here, and go on where they end")
    return options


def read(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """The options. Raises ValueError that names the option at fault."""
    given = parser().parse_args(argv)
    check_writable(output=given.output, json=given.json)
    return {**vars(given)}


def begun(given: Namespace, surroundings: dict[str, Any]) -> dict[str, Any]:
    """The result so far: that in the file of ``--json``, or an empty one.

    Raises UsageError if the file has another grid, or one of another machine or other versions.
    """
    settings = {
        "steps": given.steps,
        "model": [SETTINGS, LLAMA],
        "MKL_CBWR": os.environ.get("MKL_CBWR"),
        "hardware": surroundings["hardware"],
        "versions": surroundings["versions"],
    }
    settings = json.loads(json.dumps(settings))
    result = surroundings | {"settings": settings, "rows": []}
    if given.json is None or not Path(given.json).exists() or Path(given.json).stat().st_size == 0:
        return result
    older = read_json(Path(given.json))
    if not isinstance(older, dict) or not isinstance(older.get("rows"), list):
        raise UsageError(f"--json {given.json}: is no result of this command; name another file")
    for name in DEPENDS_ON:
        if older["settings"].get(name) != settings[name]:
            raise UsageError(
                f"--json {given.json}: has runs with other settings ({name}: {older['settings'].get(name)}, now "
                f"{settings[name]}); name another file"
            )
    return result | {"rows": older["rows"]}


def main(world: Communicator, argv: Sequence[str] | None = None) -> int:
    """Compare; rank 0 prints and writes. Returns the status. Collective over ``world``."""
    fix_products()
    surroundings = environment(COMMAND, argv)
    given = Namespace(**on_rank_zero(world, lambda: read(argv)))
    result = on_rank_zero(world, lambda: begun(given, surroundings))
    measure(world, given, result)
    wanted = list(cells(given.models, given.precisions, given.runs))
    files = {"output": given.output, "json_file": given.json}
    on_rank_zero(world, lambda: publish(markdown(result, wanted), result, **files))
    return int(world.mpi.bcast(_status(result, wanted)))


def _status(result: dict[str, Any], wanted: Sequence[GridRun]) -> int:
    if any(wrong(row) for row in result["rows"]):
        return 1
    return 0 if {cell.name for cell in wanted} <= {row["name"] for row in result["rows"]} else UNFINISHED


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run_on_ranks(COMMAND, main, parser)
