"""Students of half the layers, with a teacher and without one, from several seeds: their held-out losses.

    make runs/data/stdlib.bin
    python -m bench.contest distillation --folder runs/distillation --output distillation.md --plot distillation.png

The runs have the text and the settings of make train, on two ranks. The teacher trains first, and students of one seed
begin with the same weights and read the same samples, unless they start from layers of the teacher. Each run is a
folder in that of --folder. A contest that was stopped goes on with the runs that it lacks.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.command.files import replace_json
from bench.contest.parts.base import Case, Contest
from bench.contest.parts.jobs import failed
from commengine import UsageError
from commengine.files.reading import read_json
from commengine.options.ranges import COUNT, between

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONFIG = "trainers/configs/main.yaml"
RANKS = 2
#: seconds after which a run is ended
MOST_SECONDS = 3600
#: of a model without a teacher, to which the others are compared
ALONE = "alone"
WITH = ["--teacher", "{teacher}"]
#: the options of each kind of student
SIDES = {
    ALONE: [],
    "with a teacher": WITH,
    "with a teacher, and its angle": [*WITH, "--distill-cosine", "1"],
    "with a teacher, from its layers": [*WITH, "--student-layers", "{layers}"],
}

Curve = list[tuple[int, float]]


class DistillationContest(Contest):
    """Students with a teacher and without one."""

    title = "Students with a teacher and without one"
    rounds = 0

    def add_options(self, add: Callable[..., Any]) -> None:
        """The runs, and where they are kept."""
        add("--folder", type=Path, default=Path("runs/distillation"), help="of all runs (default: %(default)s)")
        add("--seeds", type=int, valid=COUNT, default=3, help="students of each kind (default: %(default)s)")
        add("--steps", type=int, valid=between(20, 1_000_000), default=300, help="of a student (default: %(default)s)")
        add("--teacher-steps", type=int, valid=between(20, 1_000_000), default=600, help="(default: %(default)s)")
        add("--num-layers", type=int, valid=between(2, 1000), default=4, help="of the teacher (default: %(default)s)")
        add("--sides", nargs="+", choices=list(SIDES), default=list(SIDES), metavar="SIDE",
            help=f"kinds of students, of {', '.join(map(repr, SIDES))} (default: all)")  # fmt: skip
        add("--plot", metavar="FILE", help="file for the picture of the held-out losses")

    def measure(self, given: Any, world: Any) -> Sequence[Case]:
        """Train, as far as the folder does not hold the runs."""
        folder: Path = given.folder
        folder.mkdir(parents=True, exist_ok=True)
        known = folder / "settings.json"
        settings = {name: getattr(given, name) for name in ("steps", "teacher_steps", "num_layers")}
        if known.exists() and read_json(known) != settings:
            raise UsageError(f"--folder {folder}: its runs have other settings; give another folder")
        replace_json(known, settings)
        teacher, half = folder / "teacher", given.num_layers // 2
        _train(teacher, given.teacher_steps, ["--num-layers", str(given.num_layers)])
        kept = ",".join(str(layer * given.num_layers // half) for layer in range(half))
        curves: dict[str, list[Curve]] = {side: [] for side in given.sides}
        speeds: dict[str, list[float]] = {side: [] for side in given.sides}
        for seed in range(given.seeds):
            for side in given.sides:  # in turns, because the machine may become slower
                run = folder / f"{side.replace(', ', '-').replace(' ', '-')}-{seed}"
                words = [word.format(teacher=teacher, layers=kept) for word in SIDES[side]]
                _train(run, given.steps, ["--num-layers", str(half), "--seed", str(seed + 1), *words])
                curves[side].append(held_out(run))
                speeds[side].append(read_json(run / "report.json")["tokens_per_second"])
        return [compared(curves, speeds, held_out(teacher))]

    def notes(self, given: Any, cases: Sequence[Case]) -> list[str]:
        """What was trained."""
        return [
            f"- {RANKS} ranks; `{CONFIG}`; {given.seeds} seeds of students of {given.num_layers // 2} layers, "
            f"{given.steps} steps each",
            f"- a teacher of {given.num_layers} layers, {given.teacher_steps} steps, with a held-out loss of "
            f"{cases[0].numbers['teacher'][-1][1]:.4f} nats per token",
            "- of each kind: the mean, and in brackets the least and the largest of the seeds",
        ]

    def files(self, given: Any, cases: Sequence[Case]) -> None:
        """Draw the picture."""
        if given.plot:
            draw(cases[0]).savefig(given.plot, dpi=120)


def _train(run: Path, steps: int, words: Sequence[str]) -> None:
    """Train, unless the run is there. Raises UsageError with the last line that a run said."""
    if (run / "report.json").exists():
        return
    print(run.name, file=sys.stderr, flush=True)
    every = str(max(steps // 12, 1))
    fixed = ["--config", CONFIG, "--train-iters", str(steps), "--lr-warmup-iters", str(steps // 12), "--overwrite"]
    fixed += ["--save", str(run), "--eval-interval", every, "--save-interval", str(steps), "--sample-tokens", "0"]
    if problem := failed(RANKS, ["trainers.pretrain_gpt", *fixed, *words], run.with_suffix(".log"), MOST_SECONDS):
        raise UsageError(f"{run.name}: {problem}")


def held_out(run: Path) -> Curve:
    """(Step, held-out loss) of each evaluation of a run."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(row["iteration"], row["validation_loss"]) for row in rows if row.get("validation_loss") is not None]


def compared(curves: dict[str, list[Curve]], speeds: dict[str, list[float]], teacher: Curve) -> Case:
    """The case of these students. curves, speeds: for each kind those of its seeds."""
    case = Case(numbers={"curves": curves, "teacher": teacher})
    last = {side: [curve[-1][1] for curve in mine] for side, mine in curves.items()}
    for side, losses in last.items():
        case.facts[side] = {"held-out loss": _spread(losses)}
        if ALONE in last:
            apart = [loss - alone for loss, alone in zip(losses, last[ALONE], strict=True)]
            case.facts[side] |= {f"minus {ALONE}, of one seed": "" if side == ALONE else _spread(apart, "+")}
        case.facts[side]["tokens a second"] = round(statistics.median(speeds[side]))
    return case


def _spread(values: Sequence[float], sign: str = "") -> str:
    return f"{statistics.fmean(values):{sign}.4f} [{min(values):{sign}.4f}, {max(values):{sign}.4f}]"


def draw(case: Case) -> Figure:
    """The picture: the mean held-out loss of each kind over the steps, in the band between its least and largest."""
    from matplotlib.figure import Figure  # here: it takes a second to load

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="held-out loss, nats per token")
    axes.axhline(case.numbers["teacher"][-1][1], color="black", linestyle=":", label="the teacher, at its end")
    for side, curves in case.numbers["curves"].items():
        steps = [step for step, _ in curves[0]]
        losses = list(zip(*([loss for _, loss in curve] for curve in curves), strict=True))
        (line,) = axes.plot(steps, list(map(statistics.fmean, losses)), marker="o", markersize=3, label=side)
        axes.fill_between(steps, list(map(min, losses)), list(map(max, losses)), color=line.get_color(), alpha=0.25)
    axes.legend(frameon=False)
    return figure


CONTEST = DistillationContest()
