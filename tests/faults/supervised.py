"""Kill a supervised run again and again: it comes to its end without a hand on it, also on fewer ranks."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

from tests.support import mpirun
from tests.support.faults import runs
from tests.support.faults.parts import Case
from trainers.supervision.command import STEP_FILE

#: (layout, steps, kills, whether a host is lost on the way)
KINDS = (
    ("TP 2", runs.STEPS, 2, False),
    ("TP 2", 200, 20, False),
    ("DP 2", 200, 20, False),
    ("ZeRO-1 bf16", 200, 20, False),
    ("TP 2 x DP 2", 200, 20, True),
    ("DP 4", 200, 20, True),
)
VICTIMS = ("a rank", "the launcher", "all")

TITLE = (
    "`trainers.supervise` over 20 SIGKILLs of a run of 200 steps, at random steps and in starts; with a host lost, "
    "from 4 ranks to 2"
)
DEMAND = "ends by itself with status 0, as an undisturbed run: bit for bit on the same ranks, but for rounding on fewer"
CASES = len(KINDS)
SHORT = [0]
LIMIT_S = 540


def run(case: Case) -> str:
    layout, steps, kills, loses_host = KINDS[case.number]
    random, folder, log = case.random, case.folder / "run", case.folder / "supervised.log"
    wanted = runs.undisturbed(case.shared, layout, **({} if steps == runs.STEPS else {"train_iters": steps}))
    gone = case.folder / "gone-b"
    argv = [sys.executable, "-m", "trainers.supervise", *options(layout, loses_host, case.folder), "--"]
    argv += ["env", "HOSTS={hosts}"] if loses_host else []
    argv += [mpirun.mpiexec(), "-n", "{ranks}", sys.executable, *runs.words(layout, folder, steps)]
    with log.open("w") as file:
        process = mpirun.start(argv, stdout=file.fileno(), stderr=subprocess.STDOUT)
    lost_at = None
    try:
        for number, step in enumerate(sorted(random.randrange(1, steps) for _ in range(kills))):
            if loses_host and number == kills // 2:
                gone.touch()
                lost_at = step
            strike(case, process, folder / STEP_FILE, log, number, step, random)
        status = runs.finish(process, log, 90)
    finally:
        if process.poll() is None:
            mpirun.stop(process)
    text = log.read_text()
    assert status == 0, f"status {status}: {runs.tail(log)}"
    starts = [line for line in text.splitlines() if line.startswith("supervise: starting ")]
    assert len(starts) == kills + 1, f"{len(starts)} starts after {kills} kills"
    if lost_at is None:
        assert not (found := runs.differences(folder, wanted)), "; ".join(found)
        return f"{kills} kills"
    assert "no answer from b" in text and " -n 2 " in starts[-1] and " -n 4 " in starts[0], starts
    require_close(folder, wanted, steps)
    return f"{kills} kills, from 4 ranks to 2"


def options(layout: str, loses_host: bool, folder: Path) -> list[str]:
    """The options of supervise. Random kills may hit one start or one step several times in a row."""
    words = ["--repeats", "6", "--back-off", "0.05", "--longest-back-off", "0.2"]
    if loses_host:
        probe = f"test ! -e {shlex.quote(str(folder))}/gone-{{host}}"
        return [*words, "--ranks", "4,2", "--hosts", "a:2,b:2", "--probe", probe]
    return [*words, "--ranks", str(runs.LAYOUTS[layout][0])]


def strike(
    case: Case, process: "subprocess.Popen[str]", step_file: Path, log: Path, number: int, step: int, random: Random
) -> None:
    """Kill a victim when the run has begun ``step``, or in one case of five while it starts."""
    starts = f"{number + 1} starts"

    def started() -> bool:
        return log.read_text(errors="replace").count("supervise: starting ") > number

    def begun() -> bool:
        try:
            return int(step_file.read_text()) >= step
        except (OSError, ValueError):
            return False

    assert runs.wait_for(started, process), f"it ended before {starts}: {runs.tail(log)}"
    if random.random() < 0.2:
        time.sleep(random.uniform(0, 2))
    else:
        assert runs.wait_for(begun, process), f"it ended before step {step} in {starts}: {runs.tail(log)}"
        time.sleep(random.uniform(0, 0.05))
    kill(case, random.choice(VICTIMS), process.pid, random)


def kill(case: Case, victim: str, supervisor: int, random: Random) -> None:
    """SIGKILL the victim among the processes of the run; the supervisor stays."""
    every = [pid for pid in case.processes() if pid != supervisor]
    launchers = [pid for pid in every if parent(pid) == supervisor]
    ranks = sorted(set(case.processes("python")) - {supervisor})
    chosen: Sequence[int] = {"all": every, "the launcher": launchers}.get(victim) or random.sample(
        ranks, min(1, len(ranks))
    )
    for pid in chosen or launchers or every:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it has just ended


def parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def require_close(folder: Path, wanted: Path, steps: int) -> None:
    """Raise AssertionError unless all steps are there, with the losses of the undisturbed run but for rounding."""
    for key in ("lm_loss", "validation_loss"):
        ours, theirs = runs.rows(folder, key), runs.rows(wanted, key)
        assert ours.keys() == theirs.keys(), f"{key} of other steps"
        worst = max(abs(ours[step] / theirs[step] - 1) for step in ours)
        assert worst < 1e-3, f"{key} differs by {worst:.1e}"
    assert runs.saved(folder) == steps and (folder / "report.json").exists()
