"""Contests whose sides are programs that do the same task and take turns (bench/programs)."""

from __future__ import annotations

import json
import math
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from bench.contest.parts.base import Case, Contest
from bench.programs.driver import Contestant, Running, rounds, started
from commengine.options.ranges import COUNT

COMPARED_STEPS = 4  # the losses of so many first steps must agree: before training, and after 1, 2 and 3 steps
TOLERANCE = 1e-4
#: a waiting contestant that uses more of a core than this disturbs the running one; threads of gloo wake now and then
IDLE_SHARE = 0.03
# glibc keeps freed activations instead of returning them to the system, which saves the page faults at every step. Each
# contestant gains about 5%, so every contestant gets the setting.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


@dataclass
class GivenTask:
    """One task of a contest. labels: of its case. task: a dataclass, which contestants get as JSON.

    tokens: of a step.
    """

    labels: dict[str, Any]
    task: Any
    tokens: int


class ProgramContest(Contest):
    """A contest of programs. All must report the same losses, and a waiting one must leave the cores alone.

    steps: of a turn; 0: there is no such option, and a turn is one step.
    """

    steps = 2

    def contestants(self, file: str, given: Any) -> list[Contestant]:
        """Those who do the task in ``file``; the ratios are to the first one's times."""
        raise NotImplementedError

    def tasks(self, given: Any) -> Iterator[GivenTask]:
        """Yield the tasks."""
        raise NotImplementedError

    def prepare(self, task: Any, folder: str) -> dict[str, Any]:
        """Write the files of a task, and give what its JSON says about them."""
        return {}

    def conclude(self, case: Case, task: Any, folder: str) -> None:
        """Add to a case what the contestants have left in ``folder``."""

    def add_options(self, add: Callable[..., Any]) -> None:
        """Options of the turns, and those that choose contestants."""
        if self.steps:
            add("--steps", type=int, valid=COUNT, default=self.steps, help="of each contestant in a round")
        add("--only", action="append", metavar="NAME", help="measure this contestant; may be repeated")

    def check(self, given: Any) -> None:
        """Raises ValueError for a contestant that does not exist."""
        names = [one.name for one in self.contestants("task.json", given)]
        given.only = given.only or names
        if unknown := [name for name in given.only if name not in names]:
            raise ValueError(f"--only {unknown[0]}: there is no such name; valid: {', '.join(names)}")

    def measure(self, given: Any, world: Any) -> Sequence[Case]:
        """A case for each task. Raises ContestError where a contestant failed."""
        return [self.case(given, task) for task in self.tasks(given)]

    def case(self, given: Any, task: GivenTask) -> Case:
        """Start the contestants of a task, let them take turns, and compare."""
        with tempfile.TemporaryDirectory(prefix="task-") as folder:
            file = Path(folder, "task.json")
            file.write_text(json.dumps(asdict(task.task) | self.prepare(task.task, folder), indent=1))
            wanted = [one for one in self.contestants(str(file), given) if one.name in given.only]
            steps = getattr(given, "steps", 1)
            with started([replace(one, env=ALLOCATOR | one.env) for one in wanted]) as running:
                case = self.compared(task, running, turns(running, given.rounds, steps))
            for told in case.numbers["contestants"].values():
                told["command"] = told["command"].replace(f"{folder}/", "")
            self.conclude(case, task.task, folder)
            return case

    def compared(self, task: GivenTask, running: Sequence[Running], seconds: dict[str, list[float]]) -> Case:
        """The case of contestants that have had their turns."""
        case = Case(dict(task.labels), seconds, numbers={"task": asdict(task.task), "contestants": {}})
        for one in running:
            case.errors += disturbed(one)
            case.facts[one.name] = {
                "ranks x threads": f"{one.contestant.ranks} x {one.contestant.env['OMP_NUM_THREADS']}",
                "tokens/s": task.tokens / case.spread(one.name).median,
                "peak RSS, MB": round(one.peak_rss_bytes / 1e6),
            }
            command = shlex.join(["python", *one.contestant.argv])
            case.numbers["contestants"][one.name] = {
                "command": command, "note": one.note, "loss": one.losses, "idle_core_share": idle_share(one),
            }  # fmt: skip
        difference = losses_differ_by(running)
        case.numbers["largest_loss_difference"] = difference
        if not difference <= TOLERANCE:
            text = f"losses of the first {COMPARED_STEPS} steps differ by {difference:.2e} > {TOLERANCE:g}"
            case.errors.insert(0, text)
        return case

    def notes(self, given: Any, cases: Sequence[Case]) -> list[str]:
        """The variables of every contestant, and how much losses differ."""
        difference = max(case.numbers["largest_loss_difference"] for case in cases)
        return [
            f"- set for every contestant: `{' '.join(f'{key}={value}' for key, value in ALLOCATOR.items())}`",
            "- peak RSS: of all ranks of a side together",
            f"- largest difference of the losses of the first {COMPARED_STEPS} steps: {difference:.1e}",
        ]

    def below(self, given: Any, cases: Sequence[Case]) -> list[str]:
        """The contestants' commands."""
        told = cases[0].numbers["contestants"]
        return [f"- {name}: `{one['command']}`; {one['note']}" for name, one in told.items()]


def saved(state: dict[str, Tensor], folder: str) -> dict[str, Any]:
    """What `ProgramContest.prepare` returns where all contestants get these initial weights."""
    save_file(state, weights := f"{folder}/weights.safetensors")
    return {"weights": weights}


def turns(running: Sequence[Running], count: int, steps: int) -> dict[str, list[float]]:
    """Warm up, and let the contestants take turns. Returns each one's seconds per step in every round."""
    for one in running:
        print(f"{one.name}: warming up ({one.note})", file=sys.stderr)
        one.run(COMPARED_STEPS)
    return rounds(running, count, steps)


def idle_share(one: Running) -> float:
    """The share of a core that a contestant used while others were running."""
    return one.idle_cpu_s / one.idle_wall_s if one.idle_wall_s else 0.0


def disturbed(one: Running) -> list[str]:
    """An error if a contestant did not wait quietly."""
    share = idle_share(one)
    return [f"{one.name} used {share:.1%} of a core while others were running"] if share > IDLE_SHARE else []


def losses_differ_by(running: Sequence[Running]) -> float:
    """The largest difference between any two losses at a compared step; NaN if a loss is not finite."""
    columns = list(zip(*(one.losses[:COMPARED_STEPS] for one in running), strict=True))
    if not all(math.isfinite(loss) for losses in columns for loss in losses):
        return math.nan
    return float(max(max(losses) - min(losses) for losses in columns))
