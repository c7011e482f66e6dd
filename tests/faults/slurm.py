"""Signals, limits, killed tasks and lost nodes under a real Slurm, with examples/slurm/requeue.sbatch."""

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.faults import signals
from tests.support import mpirun
from tests.support.faults import runs
from tests.support.faults.parts import Case
from tests.support.lab import slurm
from tests.support.lab.slurm import Job, SlurmCluster, ended, slurm_cluster

KINDS = (
    "USR1 by --signal before the limit",
    "USR1 by scancel",
    "scancel",
    "time limit",
    "task killed, -K0",
    "task killed, -K1",
    "node down",
)
LAYOUTS = ("TP 2", "DP 2", "ZeRO-1 bf16")

TITLE = (
    "under Slurm, two nodes: USR1 before the limit, scancel, the time limit, one task killed with -K0 and -K1, a node "
    "that goes down"
)
DEMAND = (
    "saved and requeued, or a report that names the rank within the timeout and 10 s; submitted again, the job ends "
    "bit for bit as an undisturbed run"
)
CASES = len(KINDS) * len(LAYOUTS)
SHORT = [KINDS.index(kind) for kind in ("USR1 by scancel", "task killed, -K0", "task killed, -K1", "node down")]
LIMIT_S = 540.0
why_not = slurm.why_not

SCRIPT = mpirun.ROOT / "examples" / "slurm" / "requeue.sbatch"
TIMEOUT_S = 12.0  # of a collective
MORE_S = 10.0
#: of a run that goes on until it is stopped: Slurm looks for jobs at their limit twice a minute
ENDLESS = {"steps": 1_000_000, "save_interval": 10_000, "eval_interval": 10_000, "lr_decay_iters": 1000}
#: steps after the stop
MORE_STEPS = 20


def run(case: Case) -> str:
    kind, layout = KINDS[case.number % len(KINDS)], LAYOUTS[case.number // len(KINDS)]
    with slurm_cluster(3 if kind == "node down" else 2) as cluster:
        return ACTS[kind](Disturbed(case, cluster, kind, layout))


class Disturbed:
    """A run of requeue.sbatch: its folder, and its jobs. options: of the run, beside those of `runs.words`.

    A run of the kinds with a limit has no last step until `stop_soon`.
    """

    def __init__(self, case: Case, cluster: SlurmCluster, kind: str, layout: str) -> None:
        self.case, self.cluster, self.layout = case, cluster, layout
        self.options = dict(ENDLESS) if "limit" in kind else {}
        self.folder, self.script = case.folder / "run", case.folder / "job.sbatch"
        text = SCRIPT.read_text()
        assert text.count("--kill-on-bad-exit=1") == 1
        self.script.write_text(text.replace("--kill-on-bad-exit=1", f"--kill-on-bad-exit={int(kind[-2:] != 'K0')}"))
        self.settings = case.folder / "settings.yaml"
        self.settings.write_text(f"train-iters: {self.options.get('steps', runs.STEPS)}\n")

    def submit(self, *options: str) -> int:
        """``sbatch OPTIONS``: the number of the job, whose ranks are one on each of two nodes."""
        own = {"exit_before_limit": 0, "distributed_timeout_minutes": TIMEOUT_S / 60}
        words = runs.words(self.layout, self.folder, **(self.options | own))[2:]
        steps = words.index("--train-iters")
        del words[steps : steps + 2]  # the file of settings has it
        tensor = [] if "--tensor-model-parallel-size" in words else ["--tensor-model-parallel-size", "1"]
        return self.cluster.submit(
            "--ntasks-per-node=1", "--output=job-%j.out", *options, str(self.script), *words, *tensor,
            env={"CONFIG": str(self.settings), "SLURM_MPI_TYPE": self.cluster.mpi[6:]},
            cwd=self.case.folder,
        )  # fmt: skip

    def text(self, job: int) -> str:
        """What the job has printed, all starts of it together."""
        path = self.case.folder / f"job-{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def stop_soon(self) -> None:
        """Let a run without a last step, which has stopped, come to its end if it is started again."""
        if self.options:
            self.options["steps"] = runs.saved(self.folder) + MORE_STEPS
            self.settings.write_text(f"train-iters: {self.options['steps']}\n")

    def wait_for_step(self, job: int, step: int) -> None:
        """Wait until the run has written the row of ``step``."""

        def there(now: Job) -> bool:
            assert not ended(now), f"{now.state}: {self.text(job)[-2000:]}"
            return max(runs.rows(self.folder), default=0) >= step

        self.cluster.wait(job, there, 90)

    def ranks(self) -> dict[int, int]:
        """The process of each rank, by its number."""
        found = {}
        for pid in self.case.processes("python"):
            try:
                words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            if b"trainers.pretrain_gpt" in command and b"srun" not in command.split(b"\0")[0]:
                found.update({int(word[13:]): pid for word in words if word.startswith(b"SLURM_PROCID=")})
        return found

    def stopped(self, job: int, *by: str) -> None:
        """Check that the run said once that it stopped, by one of these signals, and saved there."""
        text = self.text(job)
        lines = signals.STOPPED.findall(text)
        assert len(lines) == 1 and lines[0][0] in by, f"{lines}: {text[-2000:]}"
        assert "Traceback" not in text, text[-2000:]
        assert runs.saved(self.folder) == int(lines[0][1]), f"{lines}, saved {runs.saved(self.folder)}"

    def requeued(self, job: int, *changes: str) -> int:
        """Let the job run to its end, and start at once, changed, whenever it is requeued. Returns how often it was."""

        def over(now: Job) -> bool:
            if now.state == "PENDING" and now.restarts:
                self.stop_soon()
                self.cluster.start_again(job, *changes)
            if not ended(now):
                return False
            time.sleep(3)  # a job that asked to be requeued has ended for a moment
            return ended(self.cluster.job(job))

        restarts = self.cluster.wait(job, over, 400).restarts
        assert restarts, f"it was not requeued: {self.text(job)[-2000:]}"
        self.complete(job)
        return restarts

    def complete(self, job: int) -> None:
        """Wait for the end of a job that nothing disturbs any more, and compare with an undisturbed run."""
        after = self.cluster.wait(job, ended, 300)
        assert after.state == "COMPLETED", f"{after}: {self.text(job)[-2000:]} {self.cluster.logs()}"
        wanted = runs.undisturbed(self.case.folder if self.options else self.case.shared, self.layout, **self.options)
        for path in self.folder.glob("iter_*"):
            if not (wanted / path.name).exists():
                shutil.rmtree(path)  # the checkpoint of the stop
        assert not (found := runs.differences(self.folder, wanted)), "; ".join(found)

    def in_time(self, job: int, holds: Callable[[], bool], what: str) -> None:
        """Wait until ``holds()``. Raises AssertionError after the timeout of a collective and MORE_S."""
        deadline = time.monotonic() + TIMEOUT_S + MORE_S
        while not holds():
            assert time.monotonic() < deadline, f"{what}: {self.text(job)[-3000:]}"
            time.sleep(0.1)


def usr1_before_the_limit(run: Disturbed) -> str:
    # Slurm sends it 40 to 10 seconds before the limit: earlier, and a run would not come to its first step.
    job = run.submit("--time=1", "--signal=USR1@10")
    run.requeued(job, "TimeLimit=20")
    lines = signals.STOPPED.findall(run.text(job))
    assert {name for name, _ in lines} == {"SIGUSR1"}, f"{lines}: {run.text(job)[-2000:]}"
    return "saved and requeued"


def usr1_by_scancel(run: Disturbed) -> str:
    job = run.submit()
    run.wait_for_step(job, run.case.random.randint(1, 8))
    assert run.cluster.run("scancel", "--signal=USR1", str(job), timeout=20).returncode == 0
    run.cluster.wait(job, lambda now: now.restarts == 1 or ended(now), 60)
    run.stopped(job, "SIGUSR1")
    return f"saved and requeued {run.requeued(job)} time"


def cancelled(run: Disturbed) -> str:
    job = run.submit()
    run.wait_for_step(job, run.case.random.randint(1, 8))
    assert run.cluster.run("scancel", str(job), timeout=20).returncode == 0
    after = run.cluster.wait(job, ended, 60)
    run.cluster.wait(job, lambda _: run.cluster.ready(), 60)  # the ranks have ended, too
    assert after.state == "CANCELLED", after
    run.stopped(job, "SIGTERM")
    run.complete(run.submit())
    return "saved; submitted again"


def at_the_limit(run: Disturbed) -> str:
    job = run.submit("--time=1")
    run.wait_for_step(job, 3)
    done = run.cluster.run("scontrol", "update", f"JobId={job}", "EndTime=now+1", timeout=20)
    assert done.returncode == 0, done.stderr
    after = run.cluster.wait(job, ended, 120)
    run.cluster.wait(job, lambda _: run.cluster.ready(), 60)
    assert after.state == "TIMEOUT", f"{after}: {run.text(job)[-2000:]}"
    run.stopped(job, "SIGTERM", "SIGUSR1")  # USR1 is due as soon as the limit is near
    run.stop_soon()
    run.complete(run.submit())
    return "saved; submitted again"


def task_killed(run: Disturbed) -> str:
    """SIGKILL of rank 1, which is on the second node."""
    job = run.submit()
    run.wait_for_step(job, run.case.random.randint(1, 8))
    os.kill(run.ranks()[1], signal.SIGKILL)
    run.in_time(job, lambda: ended(run.cluster.job(job)), "no end in time")
    after, text = run.cluster.job(job), run.text(job)
    assert after.state == "FAILED" and after.status not in (0, 75), after
    by_us, by_srun = "missing: rank 1" in text, "task 1: Killed" in text
    assert by_us or by_srun, f"no report names the rank: {text[-3000:]}"
    run.complete(run.submit())
    return f"ended, named by {'the report' if by_us else 'srun'}; submitted again"


def node_down(run: Disturbed) -> str:
    """The link of the second node is cut, and everything on it is killed: it never answers again."""
    job = run.submit()
    run.wait_for_step(job, run.case.random.randint(1, 8))
    address = run.cluster.nodes["lab3"]
    run.cluster.hosts.cut(address)
    run.cluster.kill(address)
    run.in_time(job, lambda: "missing: rank 1" in run.text(job), "no report in time")
    return f"report in time, requeued {run.requeued(job)} time"


ACTS: dict[str, Callable[[Disturbed], str]] = {
    "USR1 by --signal before the limit": usr1_before_the_limit,
    "USR1 by scancel": usr1_by_scancel,
    "scancel": cancelled,
    "time limit": at_the_limit,
    "task killed, -K0": task_killed,
    "task killed, -K1": task_killed,
    "node down": node_down,
}
