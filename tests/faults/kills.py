"""Kill a rank, the launcher, its proxy or all of a run at a random moment, then start the same command again."""

import os
import signal
import subprocess
import time
from pathlib import Path
from random import Random

from tests.support.faults import runs
from tests.support.faults.parts import Case

PHASES = ("starting", "training", "saving", "evaluation", "reporting")
LAYOUTS = ("TP 2", "DP 2", "ZeRO-1 bf16")
VICTIMS = ("a rank", "the launcher", "its proxy", "all")
KINDS = [(layout, victim, phase) for phase in PHASES for victim in VICTIMS for layout in LAYOUTS]

TITLE = (
    "SIGKILL of a rank, the launcher, its proxy or all, at a random moment of each phase; TP 2, DP 2, ZeRO-1 in bf16"
)
DEMAND = (
    "the same command goes on from the newest checkpoint and ends bit for bit as an undisturbed run, with its report"
)
CASES = len(KINDS)
SHORT = [KINDS.index(("TP 2", "a rank", "saving"))]
LIMIT_S = 240


def run(case: Case) -> str:
    layout, victim, phase = KINDS[case.number]
    random, folder = case.random, case.folder / "run"
    wanted = runs.undisturbed(case.shared, layout)
    words, log = runs.words(layout, folder), case.folder / "killed.log"
    process = runs.start(layout, words, log)
    inside = wait_for_phase(phase, folder, process, random)
    kill(case, victim, process, random)
    status = runs.finish(process, log, 60)
    saved = runs.saved(folder)
    assert status != 0 or not inside or (folder / "report.json").exists(), f"a killed run ended with status 0: {status}"
    if random.random() < 0.5:  # otherwise the next run may meet ranks of this one
        deadline = time.monotonic() + case.left_s
        while case.processes() and time.monotonic() < deadline:
            time.sleep(0.05)

    log = case.folder / "again.log"
    status = runs.finish(runs.start(layout, words, log), log)
    assert status == 0, f"killed at checkpoint {saved}; the same command ended with status {status}: {runs.tail(log)}"
    text = log.read_text()
    assert "Traceback" not in text, runs.tail(log)
    if 0 < saved < runs.STEPS:
        assert f"starting from iteration {saved} " in text, f"the newest checkpoint is {saved}: {runs.tail(log)}"
    assert not (found := runs.differences(folder, wanted)), f"killed at checkpoint {saved}: {'; '.join(found)}"
    return f"in {phase}" if inside else "after the end"


def wait_for_phase(phase: str, folder: Path, process: "subprocess.Popen[str]", random: Random) -> bool:
    """Wait for a random moment of the phase; False if the run has ended before."""
    if phase == "starting":
        time.sleep(random.uniform(0, 3))
        return True
    if phase == "training":
        step, delay = random.randrange(1, runs.STEPS), random.uniform(0, 0.05)
        inside = runs.wait_for(lambda: step in runs.rows(folder), process)
    elif phase == "saving":
        step, delay = (
            random.choice(range(runs.SAVE_INTERVAL, runs.STEPS + 1, runs.SAVE_INTERVAL)),
            random.uniform(0, 0.03),
        )
        names = [folder / f"iter_{step:07d}{suffix}" for suffix in (".tmp", "")]
        inside = runs.wait_for(lambda: any(path.exists() for path in names), process)
    elif phase == "evaluation":
        step, delay = (
            random.choice([*range(runs.EVAL_INTERVAL, runs.STEPS, runs.EVAL_INTERVAL), runs.STEPS]),
            random.uniform(0, 0.2),
        )
        inside = runs.wait_for(lambda: step in runs.rows(folder), process)
    else:
        delay = random.uniform(0, 0.6)
        inside = runs.wait_for(lambda: runs.STEPS in runs.rows(folder, "validation_loss"), process)
    time.sleep(delay)
    return inside and process.poll() is None


def kill(case: Case, victim: str, process: "subprocess.Popen[str]", random: Random) -> None:
    """SIGKILL the victim. A rank that has not started yet, or a proxy that this launcher lacks, is the launcher."""
    if victim == "all":
        pids = case.processes()
    elif victim == "a rank":
        pids = random.sample(found, 1) if (found := sorted(case.processes("python"))) else [process.pid]
    elif victim == "its proxy":
        pids = case.processes("hydra_pmi_proxy") or [process.pid]
    else:
        pids = [process.pid]
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it has just ended
