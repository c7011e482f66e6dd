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

#: what comes to supervise itself, once
SIGNALS = ("SIGTERM", "SIGUSR1", "SIGINT", "SIGKILL")

TITLE = (
    "`trainers.supervise` over 20 SIGKILLs of a run of 200 steps, at random steps and in starts; with a host lost, "
    "from 4 ranks to 2; signals to supervise itself; a run that diverges"
)
DEMAND = (
    "ends by itself with status 0, as an undisturbed run: bit for bit on the same ranks, but for rounding on fewer; "
    "a signal stops it with status 75, and the same command ends it; it gives up a run that diverges, with status 1"
)
CASES = len(KINDS) + len(SIGNALS) + 1
SHORT = [0]
LIMIT_S = 540


def run(case: Case) -> str:
    if case.number < len(KINDS):
        return over_kills(case, *KINDS[case.number])
    if case.number < len(KINDS) + len(SIGNALS):
        return stopped(case, SIGNALS[case.number - len(KINDS)])
    return diverged(case)


def start(case: Case, log: Path, words: Sequence[str], options: Sequence[str]) -> "subprocess.Popen[str]":
    """Start supervise. words: the arguments of Python for the run."""
    argv = [sys.executable, "-m", "trainers.supervise", *options, "--"]
    argv += ["env", "HOSTS={hosts}"] if "--hosts" in options else []
    argv += [mpirun.mpiexec(), "-n", "{ranks}", sys.executable, *words]
    with log.open("w") as file:
        return mpirun.start(argv, stdout=file.fileno(), stderr=subprocess.STDOUT)


def over_kills(case: Case, layout: str, steps: int, kills: int, loses_host: bool) -> str:
    random, folder, log = case.random, case.folder / "run", case.folder / "supervised.log"
    wanted = runs.undisturbed(case.shared, layout, **({} if steps == runs.STEPS else {"train_iters": steps}))
    process = start(case, log, runs.words(layout, folder, steps), options(layout, loses_host, case.folder))
    lost_at = None
    try:
        for number, step in enumerate(sorted(random.randrange(1, steps) for _ in range(kills))):
            if loses_host and number == kills // 2:
                (case.folder / "gone-b").touch()
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


def stopped(case: Case, name: str) -> str:
    """One signal to supervise at a random step. If it is killed itself, the launcher passes SIGTERM on to the ranks."""
    layout, steps, folder, log = "DP 2", 200, case.folder / "run", case.folder / "stopped.log"
    wanted = runs.undisturbed(case.shared, layout, train_iters=steps)
    words = [*runs.words(layout, folder, steps), "--exit-signal", "USR1"]
    process = start(case, log, words, ["--ranks", "2"])
    step = case.random.randrange(1, steps - 50)
    assert runs.wait_for(lambda: begun(folder / STEP_FILE, step), process), runs.tail(log)
    os.kill(process.pid, getattr(signal, name))
    status = runs.finish(process, log, 60)
    assert status == (-signal.SIGKILL if name == "SIGKILL" else os.EX_TEMPFAIL), f"status {status}: {runs.tail(log)}"
    if name != "SIGKILL":
        assert runs.saved(folder) >= step and not (folder / STEP_FILE).exists(), runs.tail(log)
    log = case.folder / "again.log"
    status = runs.finish(start(case, log, words, ["--ranks", "2"]), log)
    assert status == 0, f"the same command ended with status {status}: {runs.tail(log)}"
    runs.remove_checkpoints_of_stops(folder, wanted)
    assert not (found := runs.differences(folder, wanted)), "; ".join(found)
    return f"{name} to supervise"


def diverged(case: Case) -> str:
    folder, log = case.folder / "run", case.folder / "diverged.log"
    words = runs.words("DP 2", folder, lr=1000, weight_decay=1000, clip_grad=0)
    status = runs.finish(start(case, log, words, ["--ranks", "2", "--repeats", "2", "--back-off", "0.05"]), log)
    text = log.read_text()
    assert status == 1 and text.count("the run has diverged") == 2, f"status {status}: {runs.tail(log)}"
    assert "2 times in a row: a restart does not help" in text, runs.tail(log)
    return "gave up"


def begun(step_file: Path, step: int) -> bool:
    """Whether a supervised run has begun this step since its last start."""
    try:
        return int(step_file.read_text()) >= step
    except (OSError, ValueError):
        return False


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

    assert runs.wait_for(started, process), f"it ended before {starts}: {runs.tail(log)}"
    if random.random() < 0.2:
        time.sleep(random.uniform(0, 2))
    else:
        assert runs.wait_for(lambda: begun(step_file, step), process), (
            f"it ended before step {step} in {starts}: {runs.tail(log)}"
        )
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
