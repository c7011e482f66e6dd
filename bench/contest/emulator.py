"""Predict training on a cluster that this machine emulates, then train there, and compare.

    python -m bench.contest emulator --seed 2 --folder runs/emulator-2 --output emulator.md
    python -m bench.contest emulator --runs pipelines --seed 3 --output pipelines.md

A seed draws the cluster: its devices, links, skew and noise. Jobs of 8 to 64 ranks measure it as a user measures a real
one: collectives, kernels, and a step of one rank. The fits of bench.study and bench.predict get these measurements and
nothing else. The predictions of all runs are in predictions.json of the folder before the first of them trains: twelve
layouts, or with --runs pipelines tensor groups across a slow link beside stages on both sides of it, and the bubbles
of schedules.
Ranks add up the time that they would compute, and a network process carries the messages of their collectives, so the
time is a number, two cores are enough, and a second run finds the same times.

Each result is a file of the folder. A contest that was stopped goes on where it stopped. 64 ranks need 16 GB of memory.
"""

from __future__ import annotations

import datetime as dt
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.command.files import replace_json
from bench.contest.parts.base import Case, Contest
from bench.contest.parts.jobs import failed
from bench.emulator.layouts import ACROSS, INSIDE, NODES, RANKS_PER_NODE, RUNS, LayoutRun, part_of, settings
from bench.emulator.machine import EmulatedMachine
from bench.emulator.predicting import arguments, predict, write_cluster
from commengine import UsageError
from commengine.files.reading import read_json
from commengine.options.ranges import SEED

JOB = "bench.emulator.job"
#: seconds after which a job is ended
MOST_SECONDS = 1800


class EmulatorContest(Contest):
    """Predictions of an emulated cluster."""

    title = "Predictions of an emulated cluster"
    rounds = 0

    def add_options(self, add: Callable[..., Any]) -> None:
        """The runs, the cluster and the folder."""
        add("--runs", choices=tuple(RUNS), default="layouts", help="which runs (default: %(default)s)")
        add("--seed", type=int, valid=SEED, default=1, help="draws the cluster")
        add("--folder", type=Path, default=None, metavar="FOLDER",
            help="of all results (default: runs/emulator-RUNS-SEED)")  # fmt: skip

    def measure(self, given: Any, world: Any) -> Sequence[Case]:
        """Measure, predict and train, as far as the folder does not hold the results."""
        runs = RUNS[given.runs]
        folder = given.folder = given.folder or Path("runs", f"emulator-{given.runs}-{given.seed}")
        folder.mkdir(parents=True, exist_ok=True)
        drawn = EmulatedMachine.drawn(given.seed, NODES, RANKS_PER_NODE)
        _same_machine(folder / "machine.json", drawn)
        predictions = folder / "predictions.json"
        if not predictions.exists():
            replace_json(predictions, predict_all(folder, drawn, runs))
        predicted = read_json(predictions)
        train_all(folder, drawn, runs)
        steps = {run.name: read_json(_trained(folder, run)) for run in runs}
        return [compared(predicted, steps, drawn, runs)]

    def notes(self, given: Any, cases: Sequence[Case]) -> list[str]:
        """What came first, and the errors."""
        told = cases[0].numbers
        wrong = told["relative errors"]
        return [
            f"- the last prediction was written at {told['predicted']}, and the first run was measured at "
            f"{told['measured']}",
            f"- mean error {100 * statistics.fmean(map(abs, wrong)):.1f}%, largest {100 * max(wrong, key=abs):+.1f}%",
            *(
                [f"- {ACROSS}, over {INSIDE}: predicted {told['across over inside'][0]:.2f} times as long, measured "
                 f"{told['across over inside'][1]:.2f}"]
                if told["across over inside"] else []
            ),
        ]  # fmt: skip

    def below(self, given: Any, cases: Sequence[Case]) -> list[str]:
        """The machine."""
        found = [f"- {name}: `{json.dumps(value)}`" for name, value in cases[0].numbers["machine"].items()]
        return ["The machine as it was drawn; neither the measurements nor the predictions read it:", "", *found]


def compared(
    predictions: Mapping[str, Any], steps: Mapping[str, Any], machine: EmulatedMachine, runs: Sequence[LayoutRun]
) -> Case:
    """The case of these runs. predictions, steps: by the names of the runs; "seconds" and "date" of each."""
    case = Case(numbers={"machine": asdict(machine), "relative errors": []})
    case.numbers["predicted"] = max(predictions[run.name]["date"] for run in runs)
    case.numbers["measured"] = min(step["date"] for step in steps.values())
    for run in runs:
        predicted, inside = predictions[run.name]["seconds"], run.ranks <= machine.ranks_per_node
        measured = steps[run.name]["seconds"]
        wrong = predicted / measured - 1
        case.numbers["relative errors"].append(wrong)
        case.facts[run.name] = {
            "ranks": run.ranks, "links between nodes": "-" if inside else run.network,
            "predicted, ms": f"{1e3 * predicted:.1f}", "measured, ms": f"{1e3 * measured:.1f}",
            "error": f"{100 * wrong:+.1f}%",
        }  # fmt: skip
        if run.stages > 1 and run.tensor == 1:  # with a tensor group a stage also waits for that
            case.facts[run.name] |= {"a stage waits": _waits(steps[run.name]), "by formula": f"{run.bubble:.1%}"}
    case.numbers["across over inside"] = [
        found[ACROSS]["seconds"] / found[INSIDE]["seconds"] for found in (predictions, steps) if ACROSS in found
    ]
    return case


def _waits(step: Mapping[str, Any]) -> str:
    """The share of a pass in which a stage waits: the mean over all ranks, and the median over the steps."""
    return f"{statistics.median(statistics.fmean(one['waits']) for one in step['steps']):.1%}"


def predict_all(folder: Path, drawn: EmulatedMachine, runs: Sequence[LayoutRun]) -> dict[str, Any]:
    """Measure the cluster, and predict these runs from that. Raises UsageError if one of them was trained already."""
    early = [run.name for run in runs if _trained(folder, run).exists()]
    if early:
        names = "; ".join(early)
        raise UsageError(f"--folder {folder}: these runs have no predictions: {names}; give another folder")
    clusters = {}
    for place in sorted({run.measured for run in runs}, key=lambda one: (one[1], one[0])):
        network, ranks = place
        name = f"{network.replace(' ', '-')}-{ranks}"
        path = folder / f"{name}-measured.json"
        tensors = sorted({run.tensor for run in runs if run.measured == place})
        if not path.exists():
            _job(folder, name, part_of(drawn, network, ranks), {"measure": str(path), "tensor": tensors})
        clusters[place] = write_cluster(folder, name, read_json(path), settings(), RANKS_PER_NODE)
    found = {}
    for run in runs:
        cluster = clusters[run.measured]
        seconds = predict(cluster, run, folder / f"{run.file}-predicted.json")
        command = shlex.join(["python", "-m", "bench.predict", *arguments(cluster, run)])
        date = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        found[run.name] = {"seconds": seconds, "command": command, "date": date}
    return found


def train_all(folder: Path, drawn: EmulatedMachine, runs: Sequence[LayoutRun]) -> None:
    """Train those of these runs that have no result yet."""
    for network, ranks in sorted({(run.network, run.ranks) for run in runs}, key=lambda one: (one[1], one[0])):
        mine = [run for run in runs if (run.network, run.ranks) == (network, ranks)]
        left = {run.name: str(_trained(folder, run)) for run in mine if not _trained(folder, run).exists()}
        if left:
            _job(folder, f"{network.replace(' ', '-')}-{ranks}", part_of(drawn, network, ranks), {"train": left})


def _trained(folder: Path, run: LayoutRun) -> Path:
    return folder / f"{run.file}-trained.json"


def _same_machine(path: Path, drawn: EmulatedMachine) -> None:
    """Raises UsageError if the folder is of another machine."""
    try:
        same = not path.exists() or EmulatedMachine.load(path) == drawn
    except (ValueError, TypeError, KeyError):
        same = False
    if not same:
        raise UsageError(f"--folder {path.parent}: its results are of another seed or version; give another folder")
    drawn.save(path)


def _job(folder: Path, name: str, machine: EmulatedMachine, task: Mapping[str, Any]) -> None:
    """Run a job on the ranks of a machine. Raises UsageError with the last line that it said."""
    kind = "measure" if "measure" in task else "train"
    print(f"{name}: {kind}", file=sys.stderr, flush=True)
    path, log = folder / f"{name}-{kind}.json", folder / f"{name}-{kind}.log"
    machine.save(folder / f"{name}-machine.json")
    path.write_text(json.dumps({"machine": str(folder / f"{name}-machine.json"), **task}, indent=1))
    if problem := failed(machine.ranks, [JOB, str(path)], log, MOST_SECONDS):
        raise UsageError(f"{name}: {kind}: {problem}")


CONTEST = EmulatorContest()
