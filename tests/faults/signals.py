"""Send a signal to one rank, all ranks or the launcher of a run, or let its time end, then start the command again."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.faults import kills
from tests.support import mpirun
from tests.support.faults import runs
from tests.support.faults.parts import Case
from tests.support.lab.hosts import is_open_mpi

SIGNALS = ("SIGUSR1", "SIGTERM", "SIGINT")
TARGETS = ("one rank", "all ranks", "the launcher")
PHASES = ("training", "saving", "evaluation", "reporting")
LAYOUTS = ("TP 2", "DP 2", "ZeRO-1 bf16")
KINDS = [(name, target, phase) for phase in PHASES for target in TARGETS for name in SIGNALS]
KINDS += [(name, target, "starting") for target in TARGETS for name in ("SIGTERM", "SIGINT")]
CLOCKS = ("--exit-duration-in-mins", "--exit-before-limit")
KINDS += [(name, "the clock", "training") for name in CLOCKS for _ in range(6)]

TITLE = (
    "SIGUSR1, SIGTERM or SIGINT to one rank, all ranks or the launcher, in each phase; --exit-duration-in-mins and "
    "--exit-before-limit"
)
DEMAND = (
    "one line and a checkpoint of the step under way, status 75 (0 if nothing is left), and the same command ends bit "
    "for bit as an undisturbed run"
)
CASES = len(KINDS)
SHORT = [KINDS.index(("SIGUSR1", "all ranks", "evaluation"))]
#: steps of a run whose time ends
CLOCK_STEPS = 200
#: seconds that a run may need for the time from its last step to its end, or to its first step
END_S = 4.0

STOPPED = re.compile(r"^stopped by (\S+).* after step (\d+) of \d+", re.MULTILINE)


def run(case: Case) -> str:
    name, target, phase = KINDS[case.number]
    layout, folder, log = LAYOUTS[case.number % len(LAYOUTS)], case.folder / "run", case.folder / "stopped.log"
    draw = case.random
    if target == "the launcher" and name == "SIGTERM" and is_open_mpi():
        return "not tried: Open MPI's launcher kills its ranks"
    options = {"train_iters": CLOCK_STEPS} if target == "the clock" else {}
    wanted = runs.undisturbed(case.shared, layout, **options)
    if target == "the clock":
        status, late, inside = *under_the_clock(name, layout, folder, log, draw), True
    else:
        process = runs.start(layout, runs.words(layout, folder, exit_signal="USR1"), log)
        inside = kills.wait_for_phase(phase, folder, process, draw)
        send(case, signal.Signals[name], target, process, draw)
        late = len(runs.rows(folder)) >= runs.STEPS - 1
        status = runs.finish(process, log, 60)
    stopped = judged(phase, name, status, late, log, folder) if phase != "starting" else "in starting"
    if phase == "starting":
        assert status != 0, "a run that was ended in its first seconds has status 0"

    log = case.folder / "again.log"
    status = runs.finish(runs.start(layout, runs.words(layout, folder, **options), log), log)
    text = log.read_text()
    assert status == 0 and "Traceback" not in text, f"the same command ended with status {status}: {runs.tail(log)}"
    runs.remove_checkpoints_of_stops(folder, wanted)
    assert not (found := runs.differences(folder, wanted)), "; ".join(found)
    return stopped if inside else "after the end"


def judged(phase: str, name: str, status: int, late: bool, log: Path, folder: Path) -> str:
    """How the run ended. Raises AssertionError if its words, its status and its files do not fit together.

    late: whether the signal, or the end of the time, may have come when no step was left.
    """
    text = log.read_text()
    assert "Traceback" not in text, runs.tail(log)
    lines = STOPPED.findall(text)
    if status == 0:
        assert late, f"it went on to its end: {runs.tail(log)}"
        assert not lines and (folder / "report.json").exists(), runs.tail(log)
        return f"status 0 in {phase}"
    assert status == 75, f"status {status}: {runs.tail(log)}"
    assert [word for word, _ in lines] == [name], f"the line that says why: {lines}"
    assert runs.saved(folder) == int(lines[0][1]), f"stopped after {lines[0][1]}, saved {runs.saved(folder)}"
    return f"status 75 in {phase}"


def send(
    case: Case, number: signal.Signals, target: str, process: "subprocess.Popen[str]", draw: random.Random
) -> None:
    """Send the signal. A rank that has not started yet is the launcher."""
    ranks = sorted(case.processes("python"))
    pids = [process.pid] if target == "the launcher" or not ranks else ranks
    for pid in [draw.choice(pids)] if target == "one rank" else pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue  # it has just ended


def under_the_clock(name: str, layout: str, folder: Path, log: Path, draw: random.Random) -> tuple[int, bool]:
    """(Status, whether it ended before its time) of a run whose time ends at a random moment, mostly of its steps.

    It has `CLOCK_STEPS`, so that it takes longer than the time that it is given, on most machines.
    """
    env, began = {}, time.time()
    if name == "--exit-duration-in-mins":  # counted from the first step on, about
        seconds = draw.uniform(0, 3)
        words = runs.words(layout, folder, CLOCK_STEPS, exit_duration_in_mins=max(seconds, 1e-3) / 60)
    else:
        seconds = round(began + draw.uniform(3, 6)) - began
        env["SLURM_JOB_END_TIME"] = str(round(began + seconds) + 1)
        words = runs.words(layout, folder, CLOCK_STEPS, exit_before_limit=1)
    with log.open("w") as file:
        argv = [mpirun.mpiexec(), "-n", str(runs.LAYOUTS[layout][0]), sys.executable, *words]
        process = mpirun.start(argv, env=env, stdout=file.fileno(), stderr=subprocess.STDOUT)
    status = runs.finish(process, log, 60)
    return status, time.time() - began < seconds + END_S
