"""A real Slurm on emulated hosts: srun and sbatch start ranks on its nodes, and nothing of it is left behind."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.support import mpirun
from tests.support.lab.slurm import ended, why_not
from tests.trainers.conftest import MOCK, TINY

REASON = why_not()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=f"no Slurm: {REASON}"),
    pytest.mark.slurm,
    pytest.mark.slow,
]

WHERE = """
import json, os, socket
from mpi4py import MPI
world = MPI.COMM_WORLD
here = world.Split_type(MPI.COMM_TYPE_SHARED)
open(f"/dev/shm/of-{socket.gethostname()}", "w").close()
world.Barrier()
found = [name for name in os.listdir("/dev/shm") if name.startswith("of-")]
every = world.allgather((world.rank, socket.gethostname(), here.size, sorted(found)))
if world.rank == 0:
    print(json.dumps(every))
"""
RUN = [*TINY, *MOCK, "--train-iters", "6", "--tensor-model-parallel-size", "2"]

#: MPICH sends what lies in memory behind a network address, in a form that is long if that memory has no zeros
FULL_MEMORY = """
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
blocks = []
for size in range(16, 4096, 16):
    for _ in range(40):
        blocks.append(libc.malloc(size))
        ctypes.memset(blocks[-1], 0xA5, size)
for block in blocks[::2]:
    libc.free(block)
from commengine import launch
def main(world):
    assert world.mpi.allreduce(1) == world.size
    print("right")
launch.run(main)
"""


def losses(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["lm_loss"] for row in rows if "lm_loss" in row]


def test_srun_starts_ranks_on_both_nodes_and_each_node_has_memory_of_its_own(cluster):
    done = cluster.run("srun", cluster.mpi, "-N2", "--ntasks-per-node=2", sys.executable, "-c", WHERE, timeout=60)
    assert done.returncode == 0, done
    assert json.loads(done.stdout) == [
        [rank, host, 2, [f"of-{host}"]] for rank, host in enumerate(["lab2", "lab2", "lab3", "lab3"])
    ]


@pytest.mark.parametrize("ranks", [2, 4])
def test_srun_starts_ranks_whatever_lies_in_their_memory(cluster, ranks):
    """Without the relay of commengine.startup, MPI_Init fails on 2 ranks, and hangs on 4."""
    done = cluster.run("srun", cluster.mpi, "-N2", f"-n{ranks}", sys.executable, "-c", FULL_MEMORY, timeout=60)
    assert (done.returncode, done.stdout) == (0, "right\n" * ranks), done


@pytest.mark.parametrize(
    ("words", "status", "marks"),
    [
        (["doctr"], 2, (0, 1)),
        (["doctor", "--help"], 0, (1, 0)),
        (["doctor", "--seconds", "0"], 0, (1, 0)),
    ],
)
def test_commengine_runs_under_srun_and_one_rank_speaks(cluster, words, status, marks):
    command = [sys.executable, "-m", "commengine", *words]
    done = cluster.run("srun", cluster.mpi, "-N2", "--ntasks-per-node=2", *command, timeout=60)
    assert done.returncode == status, done
    said = "usage: python -m bench.doctor" if "--help" in words else "# Doctor\n"
    errors = re.findall(r"^commengine: error: ", done.stderr, re.MULTILINE)
    assert (done.stdout.count(said), len(errors)) == marks, done


#: every way to start that the pages show; each says the same
STARTS = {
    "launch": "from commengine import launch\nlaunch.run(lambda world: 0)",
    "embedded": "from mpi4py import MPI\nfrom commengine import Communicator\n"
    "Communicator(MPI.COMM_WORLD, timeout=9).close(), Communicator(MPI.COMM_WORLD).close()",
    "embedded, with abort_on_error": "from mpi4py import MPI\nfrom commengine import Communicator, launch\n"
    "with launch.abort_on_error():\n    Communicator(MPI.COMM_WORLD.Split(0)).close()",
    "split_world": "from commengine import launch\nwith launch.abort_on_error():\n    launch.split_world(0)",
    "example": "import runpy; runpy.run_path('examples/inside_mpi.py', run_name='__main__')",
}


@pytest.mark.parametrize("start", STARTS)
def test_tasks_that_are_worlds_of_their_own_say_so_once_each(cluster, start):
    done = cluster.run("srun", "--mpi=none", "-N2", "-n2", sys.executable, "-c", STARTS[start], timeout=60)
    said = [line for line in done.stderr.splitlines() if "MPI's world has 1 rank" in line]
    assert len(said) == 2 and all("srun and this MPI do not speak the same PMI" in line for line in said), done
    assert (done.returncode == 0) == ("embedded" in start), done


def test_a_world_of_one_that_is_meant_says_nothing(cluster):
    words = "from mpi4py import MPI\nfrom commengine import Communicator\nCommunicator(MPI.COMM_SELF).close()"
    done = cluster.run("srun", "--mpi=none", "-N2", "-n2", sys.executable, "-c", words, timeout=60)
    assert done.returncode == 0 and "world" not in done.stderr, done


def test_training_across_nodes_equals_training_on_one_machine(cluster, tmp_path):
    words = ["-m", "trainers.pretrain_gpt", *RUN]
    done = cluster.run(
        "srun", cluster.mpi, "-N2", "-n4", sys.executable, *words, "--save", str(tmp_path / "two"), timeout=110
    )
    assert done.returncode == 0, done
    done = mpirun.run(4, *words, "--save", str(tmp_path / "one"), timeout=100)
    assert done.returncode == 0, done
    assert len(losses(tmp_path / "one")) == 6
    assert losses(tmp_path / "two") == losses(tmp_path / "one")


def test_the_doctor_sees_both_nodes(cluster, tmp_path):
    words = ["-m", "bench.doctor", "--seconds", "4", "--json", str(tmp_path / "doctor.json")]
    done = cluster.run("srun", cluster.mpi, "-N2", "--ntasks-per-node=2", sys.executable, *words, timeout=100)
    assert done.returncode == 0, done
    result = json.loads((tmp_path / "doctor.json").read_text())
    facts = result["rank_facts"]
    assert [(one["host"], one["node"]) for one in facts] == [("lab2", 0), ("lab2", 0), ("lab3", 2), ("lab3", 2)]
    assert facts[0]["launcher"].startswith("srun (job ") and facts[0]["launcher"].endswith(f", {cluster.mpi[6:]})")
    groups = {(row["group"], row["transport"]) for row in result["rows"]}
    assert groups >= {(group, name) for group in ("node", "world") for name in ("engine", "mpi4py", "stream")}
    assert ("node", "shared") in groups and all(row["wrong"] == 0 for row in result["rows"])


def test_the_status_of_a_job_is_that_of_its_script(cluster, tmp_path):
    job = cluster.submit("--wrap", "sleep 0.2; exit 75", cwd=tmp_path)
    after = cluster.wait(job, ended, timeout=20)
    assert (after.state, after.status, after.restarts) == ("FAILED", 75, 0)


def test_a_requeued_job_starts_again(cluster, tmp_path):
    script = 'echo start ${SLURM_RESTART_COUNT:-0}; test -n "$SLURM_RESTART_COUNT" || sleep 100'
    job = cluster.submit("--requeue", "--open-mode=append", "--output=job.out", "--wrap", script, cwd=tmp_path)
    cluster.wait(job, lambda job: job.state == "RUNNING" and (tmp_path / "job.out").exists(), timeout=20)
    assert cluster.run("scontrol", "requeue", str(job), timeout=20).returncode == 0
    cluster.wait(job, lambda job: job.state == "PENDING", timeout=40)
    cluster.start_again(job)
    after = cluster.wait(job, ended, timeout=20)
    assert (after.state, after.restarts) == ("COMPLETED", 1)
    text = (tmp_path / "job.out").read_text()
    assert "start 0" in text and "start 1" in text


def test_everything_ends_with_whoever_started_it():
    """Also when that is killed: daemons, a job's script and what it started."""
    program = (
        "import time; from tests.support.lab.slurm import slurm_cluster\n"
        "with slurm_cluster(1) as cluster:\n"
        "    job = cluster.submit('--wrap', 'sleep 1000', '--output=/dev/null')\n"
        "    cluster.wait(job, lambda job: job.state == 'RUNNING', timeout=20)\n"
        "    print(*cluster.hosts.processes(), flush=True); time.sleep(1000)\n"
    )
    process = mpirun.start([sys.executable, "-c", program], stdout=-1)
    pids = [int(word) for word in process.stdout.readline().split()]
    names = {Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids}
    assert names >= {"munged", "slurmctld", "slurmd", "slurmstepd", "sleep"}
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
