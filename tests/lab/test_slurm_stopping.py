"""Under a real Slurm: signals reach the run through srun, and the job's time limit is found and kept."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.support.lab.slurm import ended, slurm_cluster, why_not
from tests.trainers.conftest import MOCK, TINY

REASON = why_not()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=f"no Slurm: {REASON}"),
    pytest.mark.slurm,
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def cluster():
    with slurm_cluster(2) as cluster:
        yield cluster


def command(cluster, folder: Path, *more: str) -> str:
    """A run without end on both nodes, for a shell."""
    run = [*TINY, *MOCK, "--train-iters", "1000000", "--tensor-model-parallel-size", "2", "--save", str(folder)]
    words = ["srun", cluster.mpi, "-N2", "-n2", sys.executable, "-m", "trainers.pretrain_gpt", *run, *more]
    return shlex.join(words)


def stopped(out: str, reason: str, folder: Path) -> None:
    """Hold the output against the checkpoint that it names."""
    found = re.findall(r"^stopped by (\S+).* after step (\d+) of", out, re.MULTILINE)
    assert [name for name, _ in found] == [reason], out
    assert (folder / "latest").read_text().startswith(f"iter_{int(found[0][1]):07d}\n")


def signalled(cluster, folder: Path, kill: str):
    """Start the run by srun, run the shell command ``kill`` after its first row, and wait for srun's end."""
    rows = folder / "run" / "metrics.jsonl"
    script = (
        f"{command(cluster, folder / 'run', '--exit-signal', 'USR1')} & job=$!\n"
        f"until test -s {rows}; do kill -0 $job || exit 1; sleep 0.1; done\n{kill}\nwait $job; echo status $?"
    )
    return cluster.run("bash", "-c", script, timeout=90)


@pytest.mark.parametrize("name, kill", [
    ("SIGUSR1", "kill -USR1 $job"), ("SIGTERM", "scancel --signal=TERM $(squeue --noheader --format=%i)"),
])  # fmt: skip
def test_a_signal_through_srun_stops_the_run(cluster, tmp_path, name, kill):
    done = signalled(cluster, tmp_path, kill)
    stopped(done.stderr, name, tmp_path / "run")
    assert done.stdout.endswith("status 75\n"), done
    assert "Traceback" not in done.stderr


# Two signals without a pause may become one, because a signal that is pending is not queued again.
@pytest.mark.parametrize("kill", ["kill -TERM $job", "kill -INT $job; sleep 0.4; kill -INT $job"])
def test_srun_kills_the_ranks_if_it_gets_the_signal_itself(cluster, tmp_path, kill):
    """So docs/long-runs.md says; a job must use scancel."""
    done = signalled(cluster, tmp_path, kill)
    assert "status 0" not in done.stdout and "status 75" not in done.stdout, done
    assert "stopped by" not in done.stderr and "CANCELLED" in done.stderr, done


def test_a_job_stops_before_its_time_limit(cluster, tmp_path):
    """Slurm counts limits in minutes."""
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\nexec {command(cluster, tmp_path / 'run', '--exit-before-limit', '45')}\n")
    job = cluster.submit("--time=1", "-N2", "--output=job.out", str(script), cwd=tmp_path)
    after = cluster.wait(job, ended, timeout=90)
    text = (tmp_path / "job.out").read_text()
    assert (after.state, after.status) == ("FAILED", 75), (after, text)
    # In a job that is shorter than twice these seconds, half of the time that is left goes to training.
    before = re.search(r"the run saves and stops (\d+) s before it", text)
    assert before is not None and 10 <= int(before[1]) <= 30, text
    stopped(text, "--exit-before-limit", tmp_path / "run")
