"""Kill a run that goes back to an earlier checkpoint of its folder, then go on there; and repeat the command itself."""

import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.support import mpirun
from tests.support.faults import runs
from tests.support.faults.parts import Case

LAYOUT, BACK_TO, LATER = "one rank", 4, 10
OPTIONS: dict[str, Any] = {"eval_iters": 5, "eval_interval": 4, "hidden_size": 32, "seq_length": 32}
#: what is abandoned: another learning rate, a checkpoint every 2 steps, and a report of step LATER
ABANDONED = {**OPTIONS, "lr": 3e-2, "save_interval": 2}
#: name -> (options of the run that goes back, about how many changes it makes to files)
MODES: dict[str, tuple[dict[str, Any], int]] = {
    "another interval": ({**OPTIONS, "steps": 9, "save_interval": 3}, 117),
    "--keep-last": ({**OPTIONS, "steps": LATER, "save_interval": 3, "keep_last": 1}, 168),
    "evaluation at the end": ({**OPTIONS, "steps": LATER, "save_interval": 100}, 94),
}
#: those among them that `trainers.checkpoints.history.settle` makes
FIRST = 40
#: which command comes after the kill, and whether the kill comes while the folder is made the run's own
KINDS = [
    (mode, again, early, number)
    for number in range(5)
    for again in ("--load D", "the same")
    for early in (True, False)
    for mode in MODES
]

TITLE = "SIGKILL of a run that goes back to an earlier checkpoint, at a change to a file or up to 0.3 s later; started "
TITLE += "again with --load D, or by the same command"
DEMAND = "checkpoints, metrics and report are, bit for bit, those of a run in a copy of the folder that was cut there"
CASES = len(KINDS)
SHORT = [KINDS.index(("--keep-last", "--load D", True, 0))]
LIMIT_S = 300


def run(case: Case) -> str:
    mode, again, early, _ = KINDS[case.number]
    options, changes = MODES[mode]
    folder, random = case.folder / "run", case.random
    abandoned = _abandoned(case.shared)
    wanted = _wanted(case.shared, abandoned, mode)
    shutil.copytree(abandoned, folder)
    goes_on = runs.words(LAYOUT, folder, **options)
    goes_back = [*goes_on[:-1], str(folder / f"iter_{BACK_TO:07d}"), "--overwrite"]

    change = random.randrange(1, FIRST) if early else random.randrange(FIRST, changes)
    seconds = 0.0 if early or random.random() < 0.3 else random.uniform(0, 0.3)
    log = case.folder / "killed.log"
    program = str(mpirun.JOBS / "killed_history.py")
    with patch.dict(os.environ, {"KILL": f"{change},{seconds}"}):
        process = runs.start(LAYOUT, [program, *goes_back[2:]], log)
    status = runs.finish(process, log)
    assert "Traceback" not in log.read_text(errors="replace"), runs.tail(log)
    assert status or change > FIRST, "it was not killed"
    moved = (folder / "latest").read_bytes() != (abandoned / "latest").read_bytes()
    begun = moved or not (folder / "iter_0000008").exists()  # which no mode saves; the last step's may be there again

    words = goes_on if again == "--load D" and begun else goes_back  # before the pointer has moved nothing has happened
    log = case.folder / "again.log"
    status = runs.finish(runs.start(LAYOUT, words, log), log)
    assert status == 0, f"killed at change {change}; then {again} ended with status {status}: {runs.tail(log)}"
    assert not (found := differences(folder, wanted)), f"killed at change {change}: {'; '.join(found)}"
    return f"{mode}, {again if begun else 'not begun'}"


def differences(folder: Path, wanted: Path) -> list[str]:
    """As `runs.differences`, and in all files below the two folders by name, and in the tensors of each checkpoint."""
    found = runs.differences(folder, wanted)
    names = [{str(path.relative_to(each)) for path in each.rglob("*")} for each in (folder, wanted)]
    found += [f"files {sorted(names[0] - names[1])} too many, {sorted(names[1] - names[0])} missing"] * (
        names[0] != names[1]
    )
    for path in sorted(wanted.glob("iter_*/*.safetensors")):
        name = path.relative_to(wanted)
        if (folder / name).exists() and (folder / name).read_bytes() != path.read_bytes():
            found.append(f"{name} differs")
    return found


def _abandoned(shared: Path) -> Path:
    """The folder of a run that has ended at step LATER, with what a killed save leaves."""
    folder = runs.undisturbed(shared, LAYOUT, steps=LATER, **ABANDONED)
    (folder / "batches").mkdir(exist_ok=True)
    (folder / "batches" / f"step_{LATER:07d}-replica_0.safetensors").touch()
    (folder / f"iter_{LATER + 1:07d}.tmp").mkdir(exist_ok=True)
    return folder


def _wanted(shared: Path, abandoned: Path, mode: str) -> Path:
    """The folder of a run that went on in a copy of the abandoned one, cut at BACK_TO by hand."""
    folder = shared / f"cut-{mode.replace(' ', '-')}"
    if (folder / "report.json").exists():
        return folder
    shutil.copytree(abandoned, folder, dirs_exist_ok=True)
    for path in folder.glob("iter_*"):
        if int(path.stem.removeprefix("iter_")) > BACK_TO:
            shutil.rmtree(path)
    for name in ("latest", "report.json", "report.txt", "loss.png"):  # without a pointer the highest checkpoint counts
        (folder / name).unlink()
    for path in (folder / "batches").iterdir():
        path.unlink()
    rows = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [row for row in rows if json.loads(row)["iteration"] <= BACK_TO]
    (folder / "metrics.jsonl").write_text("".join(kept))
    log = shared / f"{folder.name}.log"
    status = runs.finish(runs.start(LAYOUT, runs.words(LAYOUT, folder, **MODES[mode][0]), log), log)
    assert status == 0, f"the run in the cut copy ended with status {status}: {runs.tail(log)}"
    return folder
