"""A small training run for faults: its command, its phases from outside, and whether it ended as an undisturbed one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support import mpirun

STEPS, SAVE_INTERVAL, EVAL_INTERVAL = 12, 3, 5  # the last evaluation comes after the last checkpoint
#: ranks and options of the layouts
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one rank": (1, []),
    "TP 2": (2, ["--tensor-model-parallel-size", "2"]),
    "DP 2": (2, []),
    "ZeRO-1 bf16": (2, ["--use-distributed-optimizer", "--bf16"]),
    "DP 4": (4, []),
    "TP 2 x DP 2": (4, ["--tensor-model-parallel-size", "2"]),
}
_OPTIONS = {
    "num-layers": 2, "hidden-size": 64, "num-attention-heads": 4, "seq-length": 64, "vocab-size": 500,
    "make-vocab-size-divisible-by": 4, "micro-batch-size": 2, "global-batch-size": 8, "eval-iters": 20,
    "eval-interval": EVAL_INTERVAL, "save-interval": SAVE_INTERVAL, "log-interval": 1, "sample-tokens": 8,
    "hidden-dropout": 0.1, "attention-dropout": 0.1, "lr": 1e-2, "distributed-timeout-minutes": 0.5,
}  # fmt: skip
FILES = ("model.safetensors", "optimizer.safetensors")
#: keys of report.json that do not depend on the machine's speed, or on how often the run was started
REPORTED = ("iteration", "parameters", "validation_loss", "validation_tokens", "unigram_entropy", "sample")


def words(layout: str, folder: Path, steps: int = STEPS, **options: Any) -> list[str]:
    """The arguments of Python for a run that is saved in ``folder`` and goes on there if it is started again.

    options: of pretrain_gpt, with underscores, in place of those above.
    """
    named = _OPTIONS | {"train-iters": steps} | {name.replace("_", "-"): value for name, value in options.items()}
    flags = [word for name, value in named.items() for word in (f"--{name}", str(value))]
    where = ["--save", str(folder), "--load", str(folder)]
    return ["-m", "trainers.pretrain_gpt", "--mock-data", *flags, *LAYOUTS[layout][1], *where]


def start(layout: str, arguments: Sequence[str], log: Path) -> subprocess.Popen[str]:
    """Start the run, with its output in the file ``log``."""
    argv = [mpirun.mpiexec(), "-n", str(LAYOUTS[layout][0]), sys.executable, *arguments]
    with log.open("w") as file:
        return mpirun.start(argv, stdout=file.fileno(), stderr=subprocess.STDOUT)


def finish(process: subprocess.Popen[str], log: Path, seconds: float = 90) -> int:
    """The exit status. Raises AssertionError, with the end of the output, if the run prints nothing for so long.

    A run shows its progress every 15 s; a busy machine makes it slow, and that is no hang.
    """
    size, last = -1, time.monotonic()
    try:
        while process.poll() is None:
            if (now := log.stat().st_size) != size:
                size, last = now, time.monotonic()
            assert time.monotonic() - last < seconds, f"a hang: not a word in {seconds:g} s: {tail(log)}"
            time.sleep(0.05)
        return process.returncode
    finally:
        if process.poll() is None:
            mpirun.stop(process)


def tail(log: Path) -> str:
    """The end of a run's output."""
    return log.read_text(errors="replace")[-1500:]


def undisturbed(shared: Path, layout: str, **options: Any) -> Path:
    """The folder of a run that nothing disturbs, made once. options: as for `words`."""
    folder = shared / "-".join([layout, *(f"{name}={value}" for name, value in options.items())]).replace(" ", "-")
    if not (folder / "report.json").exists():
        log = folder.with_suffix(".log")
        status = finish(start(layout, words(layout, folder, **options), log), log)
        assert status == 0, f"the undisturbed run ended with status {status}: {tail(log)}"
    return folder


def wait_for(holds: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 60) -> bool:
    """Wait until ``holds()``, and say so; False if the process ends before. Raises AssertionError after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not holds():
        if process.poll() is not None:
            return holds()
        assert time.monotonic() < deadline, f"the run did not come so far in {seconds:g} s"
        time.sleep(0.0005)
    return True


def rows(folder: Path, key: str = "lm_loss") -> dict[int, Any]:
    """Of metrics.jsonl the values of ``key``, by the iteration. A row that is being written is left out."""
    path, found = folder / "metrics.jsonl", {}
    for line in (path.read_text().split("\n") if path.exists() else [])[:-1]:
        row = json.loads(line)
        if key in row:
            found[row["iteration"]] = row[key]
    return found


def saved(folder: Path) -> int:
    """The iteration of the newest checkpoint, according to the pointer; 0 if there is none."""
    pointer = folder / "latest"
    return int(pointer.read_text().split()[0].removeprefix("iter_")) if pointer.exists() else 0


def remove_checkpoints_of_stops(folder: Path, wanted: Path) -> None:
    """Remove the checkpoints that only a run that was stopped early has."""
    for extra in {path.name for path in folder.glob("iter_*")} - {path.name for path in wanted.glob("iter_*")}:
        shutil.rmtree(folder / extra)


def differences(folder: Path, wanted: Path) -> list[str]:
    """In what a run that has ended differs from the undisturbed one: losses, checkpoint, report, files left over."""
    found = []
    for key in ("lm_loss", "grad_norm", "learning_rate", "validation_loss"):
        ours, theirs = rows(folder, key), rows(wanted, key)
        if ours != theirs:
            steps = sorted(step for step in ours.keys() | theirs.keys() if ours.get(step) != theirs.get(step))
            found.append(f"metrics.jsonl: {key} of steps {steps}")
    last = f"iter_{saved(wanted):07d}"
    if saved(folder) != saved(wanted):
        return [*found, f"latest is of iteration {saved(folder)} and not {saved(wanted)}"]
    found += [f"{last}/{name}" for name in FILES if _bytes(folder / last / name) != _bytes(wanted / last / name)]
    if not (folder / "report.json").exists():
        return [*found, "there is no report"]
    ours, theirs = (json.loads((each / "report.json").read_text()) for each in (folder, wanted))
    found += [f"report.json: {key}: {ours[key]} and not {theirs[key]}" for key in REPORTED if ours[key] != theirs[key]]
    names = [{path.name for path in each.iterdir()} for each in (folder, wanted)]
    if names[0] ^ names[1]:
        found.append(f"files {sorted(names[0] - names[1])} too many, {sorted(names[1] - names[0])} missing")
    return found


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None
