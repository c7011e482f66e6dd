"""The files of examples/slurm run as they are, but for a tiny model in place of main.yaml's."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import mpirun
from tests.support.lab.slurm import ended, why_not
from tests.trainers.conftest import TINY
from tplayers.bridge import include

REASON = why_not()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=f"no Slurm: {REASON}"),
    pytest.mark.slurm,
    pytest.mark.slow,
]

EXAMPLES = mpirun.ROOT / "examples" / "slurm"


@pytest.fixture
def folder(tmp_path):
    """A folder to submit from: the packages, and a tiny.yaml like main.yaml."""
    for name in ("commengine", "tplayers", "trainers"):
        (tmp_path / name).symlink_to(mpirun.ROOT / name)
    settings = dict(zip(TINY[::2], TINY[1::2], strict=True))
    settings |= {"--mock-data": "true", "--vocab-size": "100", "--train-iters": "4", "--global-batch-size": "16",
                 "--micro-batch-size": "16", "--tensor-model-parallel-size": "2"}  # fmt: skip
    lines = (f"{name.removeprefix('--')}: {value}\n" for name, value in settings.items())
    (tmp_path / "tiny.yaml").write_text("".join(lines))
    return tmp_path


@pytest.fixture
def submit(cluster, folder):
    """``submit(name, *words, **variables)``: the number of the job of an example."""

    def submit(name, *words, **variables):
        variables = {"CONFIG": "tiny.yaml", "SLURM_MPI_TYPE": cluster.mpi.removeprefix("--mpi="), **variables}
        return cluster.submit(*words, str(EXAMPLES / name), env=variables, cwd=folder)

    return submit


def report(folder):
    return json.loads((folder / "report.json").read_text())


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_one_node(cluster, folder, submit):
    after = cluster.wait(submit("one-node.sbatch"), ended, timeout=100)
    assert after.state == "COMPLETED", (folder / f"one-node-{after.number}.out").read_text()
    assert after.fields["NumNodes"] == "1"
    assert (folder / "runs/one-node/iter_0000004").is_dir() and report(folder / "runs/one-node")


def test_several_nodes_train_as_one_node(cluster, folder, submit):
    """The tensor group is on each node, so the sums of each step are the same but for the order of two replicas."""
    one, two = submit("one-node.sbatch"), None
    assert cluster.wait(one, ended, timeout=100).state == "COMPLETED"
    two = cluster.wait(submit("several-nodes.sbatch"), ended, timeout=110)
    assert two.state == "COMPLETED", (folder / f"several-nodes-{two.number}.out").read_text()
    assert two.fields["NumNodes"] == "2"
    losses = [
        [row["lm_loss"] for row in rows(folder / "runs" / name) if "lm_loss" in row]
        for name in ("one-node", "several-nodes")
    ]
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


def test_an_array_of_runs(cluster, folder, submit):
    job = submit("array.sbatch", "--array=0-1", LEARNING_RATES="1e-3 2e-3")
    # The state of an array's number is that of one of its jobs.
    cluster.wait(job, lambda _: not cluster.run("squeue", "--noheader", timeout=20).stdout, timeout=110)
    reports = [report(folder / "runs/array" / f"lr-{rate}") for rate in ("1e-3", "2e-3")]
    assert len(reports) == 2
    first, second = ([row["lr"] for row in rows(folder / "runs/array" / f"lr-{rate}") if "lr" in row]
                     for rate in ("1e-3", "2e-3"))  # fmt: skip
    assert second == pytest.approx([2 * value for value in first])


def test_a_failed_run_is_a_failed_job(cluster, folder, submit):
    (folder / "tiny.yaml").write_text("no-such-option: 1\n")
    after = cluster.wait(submit("one-node.sbatch"), ended, timeout=100)
    assert (after.state, after.status) == ("FAILED", 2)
    text = (folder / f"one-node-{after.number}.out").read_text()
    assert text.count("error: ") == 1 + text.count("srun: error: ") and "no-such-option" in text


@pytest.mark.parametrize("start", ["srun", "mpiexec inside the job"])
def test_two_programs_on_two_nodes(cluster, folder, submit, start):
    """Each node has a rank of the solver and one of the network; by mpiexec each program has a node of its own."""
    wrapper = shutil.which("mpicc", path=str(Path(mpirun.mpiexec()).parent))
    if wrapper is None or shutil.which("cc") is None:
        pytest.skip("no C compiler, or this MPI has no mpicc")
    (folder / "examples").symlink_to(EXAMPLES.parent)
    solver = EXAMPLES.parent / "mpmd" / "solver.c"
    subprocess.run([wrapper, "-O2", "-o", str(folder / "solver"), str(solver), "-lm"], check=True)
    sizes = ["21", "16", "24", "3"]
    if start == "srun":
        after = cluster.wait(submit("two-programs.sbatch", SOLVER=" ".join(["./solver", *sizes])), ended, timeout=100)
        text = (folder / f"two-programs-{after.number}.out").read_text()
        assert after.state == "COMPLETED" and after.fields["NumNodes"] == "2", text
    else:
        network = ("python", "-m", "mpi4py", "examples/mpmd/network.py")
        words = ("mpiexec", "-n", "2", "./solver", *sizes, ":", "-n", "2", *network)
        done = cluster.run("salloc", "-N2", "-n4", *words, timeout=100, cwd=folder)
        text = done.stdout
        assert done.returncode == 0, done
    assert text.count("root mean square error of the network") == 3 and not list(folder.glob("*.conf"))


@pytest.mark.timeout(150)
def test_a_network_learns_through_a_cpp_solver_on_two_nodes(cluster, folder, submit):
    """Each node has ranks of both programs, and the field crosses the nodes."""
    wrapper = shutil.which("mpicxx", path=str(Path(mpirun.mpiexec()).parent))
    if wrapper is None or shutil.which("c++") is None:
        pytest.skip("no C++ compiler, or this MPI has no mpicxx")
    (folder / "examples").symlink_to(mpirun.ROOT / "examples")
    sources = mpirun.ROOT / "examples" / "bridge" / "heat.cpp"
    subprocess.run([wrapper, "-O2", "-I", include(), "-o", str(folder / "heat"), str(sources)], check=True)
    network = "python -m mpi4py examples/bridge/heating.py --color 1 --points 24 --iterations 100"
    after = cluster.wait(submit("two-programs.sbatch", SOLVER="./heat 24 10", NETWORK=network), ended, timeout=120)
    text = (folder / f"two-programs-{after.number}.out").read_text()
    assert after.state == "COMPLETED" and after.fields["NumNodes"] == "2", text
    found = [float(one) for one in re.findall(r"wrong by (\S+)", text)]
    assert found[1] < found[0] and found[2] < found[3], text


def test_every_example_is_bash_that_names_its_limits():
    for path in sorted(EXAMPLES.iterdir()):
        done = mpirun.command(["bash", "-n", str(path)], timeout=20)
        assert done.returncode == 0, done.stderr
        text = path.read_text()
        assert "#SBATCH --time=" in text and "OMP_NUM_THREADS=" in text and "SLURM_MPI_TYPE" in text


#: the first task fails at once, and srun ends the others while they import
FIRST_FAILS = """
import os, sys
if os.environ.get("SLURM_PROCID") == "0" and "trainers.pretrain_gpt" in sys.orig_argv:
    os._exit(1)
"""


@pytest.mark.parametrize("fault", ["another PMI", "a task that cannot start"])
def test_what_fails_each_time_is_not_requeued(cluster, folder, submit, fault):
    variables = {"SLURM_MPI_TYPE": "none"}
    if fault != "another PMI":
        (folder / "site").mkdir()
        (folder / "site/sitecustomize.py").write_text(FIRST_FAILS)
        variables = {"PYTHONPATH": str(folder / "site")}
    after = cluster.wait(submit("requeue.sbatch", MOST_RESTARTS="2", **variables), ended, timeout=100)
    text = (folder / f"requeue-{after.number}.out").read_text()
    assert (after.state, after.restarts) == ("FAILED", 0) and after.status not in (0, 75), text
    assert fault != "another PMI" or "do not speak the same PMI" in text


def test_the_script_for_512_gpus_on_two_nodes_without_one(cluster, folder):
    """Its own lines, but for the data; its last words make the job and the model small, and choose the CPU."""
    script = (EXAMPLES / "gpt-8.3b.sbatch").read_text()
    data = '--data-path "${DATA:-runs/data/corpus}"'
    assert data in script
    (folder / "job.sbatch").write_text(script.replace(data, "--mock-data"))
    job = ["--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=0", "--cpus-per-task=1"]
    words = [*TINY, "--vocab-size", "100", "--tensor-model-parallel-size", "2", "--train-iters", "4", "--device", "cpu"]
    environment = {"SLURM_MPI_TYPE": cluster.mpi.removeprefix("--mpi=")}
    after = cluster.wait(cluster.submit(*job, "job.sbatch", *words, env=environment, cwd=folder), ended, timeout=110)
    text = (folder / f"gpt-8.3b-{after.number}.out").read_text()
    assert after.state == "COMPLETED" and after.fields["NumNodes"] == "2", text
    assert len([row for row in rows(folder / "runs/gpt-8.3b") if "lm_loss" in row]) == 4
    assert (folder / "runs/gpt-8.3b/iter_0000004").is_dir() and report(folder / "runs/gpt-8.3b")
