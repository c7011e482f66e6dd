"""Run commands on one rank each that are killed before a change that their export makes to a file, and run them again.

``killed_export.py CASES.json OUTCOMES.json``. A process is forked for each run, so that PyTorch is imported once.
CASES: {"first": commands that run before, each a list of its name and arguments, "cases": a list}. A case is
{"command": such as "convert", "words": its arguments, "place": the folder that it writes, alone in its parent,
"before": a folder with what is there before, or null, "many": whether a kill comes before every third change and each
rename, too, or before the first write and the second rename alone}. For each kill ``place`` gets the content of
``before``, the command is killed, and then started again. OUTCOMES: for each case {"whole": the files after a run that
nothing disturbs, "kills": a list of [name of the change, the files after the kill, the status of the second run, the
files after it]}; files: their paths from the parent of ``place``, and digests.
"""

import contextlib
import hashlib
import importlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch  # noqa: F401  # before the forks

import trainers.convert
import trainers.pretrain_gpt  # noqa: F401
from commengine import launch
from tests.support.file_operations import FileOperations
from trainers.weights import export

#: renames, in `FileOperations`
RENAMES = ("rename", "replace")


def content(place: Path) -> dict[str, str]:
    """The files below a folder, and their digests."""
    files = (path for path in sorted(place.rglob("*")) if path.is_file())
    return {str(path.relative_to(place)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def watch_export(change: int | None, names: Path) -> None:
    """Let this process be killed before this change of its export. None: write the changes' names into a file."""
    working_folder = export.working_folder
    seen: list[str] = []

    def before(number: int, name: str) -> None:
        seen.append(name)
        if number == change:
            os.kill(os.getpid(), signal.SIGKILL)

    @contextlib.contextmanager
    def watched(*arguments: Any) -> Any:
        with FileOperations(before), working_folder(*arguments) as own:
            yield own
        names.write_text(" ".join(seen))

    export.working_folder = watched


def run(case: dict[str, Any], change: int | None, names: Path) -> int:
    """The status of the command in a process of its own; negative for a signal."""
    child = os.fork()
    if child == 0:
        watch_export(change, names)
        sys.argv = [case["command"], *case["words"]]
        launch.run(importlib.import_module(f"trainers.{case['command']}").main)  # it ends the process
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def prepare(case: dict[str, Any]) -> Path:
    """Give the folder of a case the content that it has before."""
    place = Path(case["place"])
    shutil.rmtree(place.parent, ignore_errors=True)
    place.parent.mkdir()
    if case["before"]:
        shutil.copytree(case["before"], place)
    return place


def outcomes(case: dict[str, Any], names: Path) -> dict[str, Any]:
    """What the kills of one case leave."""
    place = prepare(case)
    assert run(case, None, names) == 0
    whole, changes, kills = content(place.parent), names.read_text().split(), []
    renames = [number for number, name in enumerate(changes) if name in RENAMES]
    chosen = {changes.index("pwrite"), *renames[1:2]}
    if case["many"]:
        chosen |= {*range(0, len(changes), 3), *renames, len(changes) - 1}
    for number in sorted(chosen):
        prepare(case)
        assert run(case, number + 1, names) == -signal.SIGKILL
        after = content(place.parent)
        kills.append([changes[number], after, run(case, None, names), content(place.parent)])
    return {"whole": whole, "kills": kills}


if __name__ == "__main__":
    cases, results = map(Path, sys.argv[1:])
    asked, names = json.loads(cases.read_text()), results.with_suffix(".names")
    for command, *words in asked["first"]:
        assert run({"command": command, "words": words}, None, names) == 0
    results.write_text(json.dumps([outcomes(case, names) for case in asked["cases"]]))
