"""Ask the model of the protocol all questions, and see that it makes what the engine's code does: ``make prove``.

Answers are kept in a file, and a second run goes on where the first stopped. The exit status is 1 if a property does
not hold, a wait or a fence can be left out though nothing says why, a recorded run is rejected, or a mutation is not.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import traces
from .checking import HERE, ORDERS, Model, missing
from .mutations import MUTATIONS
from .questions import ONLY_WEAK, Question, left_out, properties

PARTS = ("left-out", "traces", "mutations", "properties")
RUNS, RUNS_OF_THREE, RUNS_OF_A_MUTATION = 900, 100, 24
#: the last steps of a story that are printed; the file of results has all
LAST_STEPS = 8


def _digest(*files: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()[:12]


class Answers:
    """Answers in a file, each with the digest of what it depends on; those that depend on other files are forgotten."""

    def __init__(self, file: Path) -> None:
        self._file = file
        model, engine = HERE.glob("*.pml"), (HERE.parent.parent / "commengine").rglob("*.py")
        self.model = _digest(*model)
        recorded = [HERE / f"{name}.py" for name in ("recording", "programs", "traces", "mutations")]
        self.engine = _digest(*recorded, *HERE.glob("*.pml"), *engine)
        kept = json.loads(file.read_text()) if file.exists() else {}
        self._kept = {key: one for key, one in kept.items() if key.split()[0] in (self.model, self.engine)}

    def get(self, key: str) -> Any:
        return self._kept.get(key)

    def add(self, key: str, answer: Any) -> Any:
        self._kept[key] = answer
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(self._kept, indent=1))
        return answer


class Asking:
    """Asks questions of models, each of which is compiled once."""

    def __init__(self, answers: Answers, folder: Path) -> None:
        self.answers, self._folder = answers, folder
        self._models: dict[tuple[int, str], Model] = {}

    def ask(self, question: Question, story: bool = False) -> dict[str, Any]:
        key = f"{self.answers.model} {question.key}"
        kept = self.answers.get(key)
        if kept is not None:
            return kept
        kind = question.ranks, question.order
        if kind not in self._models:
            self._models[kind] = Model(self._folder / f"{kind[1]}-{kind[0]}", *kind)
        model, lines = self._models[kind], list[str]()
        if story:
            found, lines = model.counterexample(question.setting)
        else:
            found = model.search(question.setting)
            if found.error is not None:
                lines = list(model.story(question.setting, found.error))
        return self.answers.add(key, {**found._asdict(), "story": lines})


def prove_properties(asking: Asking) -> bool:
    good = True
    print("\n| ranks | order | asked | searches | states | depth | seconds |\n|---|---|---|---|---|---|---|")
    for (ranks, order, words), parts in itertools.groupby(properties(), lambda one: (one.ranks, one.order, one.words)):
        searches, states, depth, seconds = 0, 0, 0, 0.0
        for question in parts:
            answer = asking.ask(question)
            searches, states, seconds = searches + 1, states + answer["states"], seconds + answer["seconds"]
            depth = max(depth, answer["depth"])
            if answer["error"] is not None or not answer["whole"]:
                good = False
                print(f"NOT PROVEN: {question}", *answer["story"][-LAST_STEPS:], sep="\n  ", flush=True)
        print(f"| {ranks} | {order} | {words} | {searches} | {states:,} | {depth} | {seconds:.0f} |", flush=True)
    return good


def leave_out(asking: Asking) -> bool:
    good = True
    for order in reversed(ORDERS):
        for question in left_out(order):
            answer = asking.ask(question, story=True)
            if answer["error"] is None:
                reason = order == "x86" and question.name in ONLY_WEAK
                good = good and reason
                print(f"\n{question.words}, {order}: {'no error: x86 keeps these in order' if reason else 'NO ERROR'}")
                continue
            steps = answer["story"]
            print(f"\n{question.words}, {order}: {len(steps) - 1} steps, of which the last:")
            print(*steps[-LAST_STEPS - 1 :], sep="\n", flush=True)
    return good


def play(answers: Answers, player: traces.Player, ranks: int, runs: int, mutation: str | None = None) -> list[Any]:
    """Record runs, and return which of them the model makes: [number, None, or why not]."""
    key = f"{runs} runs of {ranks} ranks{f', {mutation}' if mutation else ''}"
    kept = answers.get(f"{answers.engine} {key}")
    if kept is None:
        noted = traces.record(runs, ranks, mutation=mutation)
        kept = answers.add(f"{answers.engine} {key}", [list(one) for one in player.rejected(noted)])
    wrong = [why for _, why in kept if why is not None]
    print(f"{key}: {len(kept) - len(wrong)} accepted, {len(wrong)} rejected{f', such as: {wrong[0]}' if wrong else ''}",
          flush=True)  # fmt: skip
    return wrong


def main(given: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.proof", description=__doc__, allow_abbrev=False)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help=f"of {', '.join(PARTS)}; all")
    parser.add_argument("--results", type=Path, default=Path("runs/proof.json"), help="the file of the answers")
    args = parser.parse_args(given)
    lacking = missing()
    if lacking is not None:
        print(f"tests.proof: skipped: {lacking}")
        return 0
    parts, answers, began = args.parts or PARTS, Answers(args.results), time.monotonic()
    good = True
    with tempfile.TemporaryDirectory() as folder:
        asking = Asking(answers, Path(folder))
        if "left-out" in parts:
            good &= leave_out(asking)
        if "traces" in parts:
            for ranks, runs in ((2, RUNS), (3, RUNS_OF_THREE)):
                good &= not play(answers, traces.Player(Path(folder, f"player-{ranks}"), ranks), ranks, runs)
        if "mutations" in parts:
            player = traces.Player(Path(folder, "player"), 2)
            for mutation in MUTATIONS:
                good &= bool(play(answers, player, 2, RUNS_OF_A_MUTATION, mutation))
        if "properties" in parts:
            good &= prove_properties(asking)
    print(f"\n{'all holds' if good else 'NOT ALL HOLDS'} ({time.monotonic() - began:.0f} s)")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
