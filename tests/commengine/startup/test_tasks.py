"""The launcher and MPI disagree about the number of tasks."""

import subprocess
import sys
import time

import pytest

from commengine.errors import LaunchError
from commengine.startup import tasks
from commengine.startup.tasks import check_world_size, first_on_node, say_if_alone, seconds_to_wait
from tests.support import mpirun

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("variable", ["SLURM_NTASKS", pytest.param("OMPI_COMM_WORLD_SIZE", marks=pytest.mark.long)])
def test_launcher_of_four_tasks_with_a_world_of_one(tmp_path, variable):
    program = "from commengine import launch\nlaunch.run(lambda world: print('ran'))\n"
    done = mpirun.command([sys.executable, "-c", program], timeout=40, env={variable: "4"}, fresh=False)
    assert done.returncode != 0 and "ran" not in done.stdout
    assert f"error: {variable}=4, but MPI's world has 1 rank. Likely cause: " in done.stderr
    assert ("srun" if variable.startswith("SLURM") else "mpiexec on PATH belongs to another MPI") in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("first_is_there", [True, pytest.param(False, marks=pytest.mark.long)])
def test_launcher_mismatch_is_said_once_whichever_task_starts_first(tmp_path, first_is_there):
    """When one task has failed, srun ends the others. So they wait for the first task, and speak if it is missing."""
    program = "from commengine import launch\nlaunch.run(lambda world: print('ran'))\n"
    tasks = [
        mpirun.start([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                     env={"SLURM_NTASKS": "4", "SLURM_PROCID": str(number)}, fresh=False)
        for number in ((0, 1, 2) if first_is_there else (1, 2))
    ]  # fmt: skip
    said = ""
    try:
        while all(task.poll() is None for task in tasks):
            time.sleep(0.01)
    finally:
        for task in tasks:
            task.kill()
            out, err = task.communicate()
            said += err
            assert out == ""
    assert all(task.returncode != 0 for task in tasks)
    assert said.count("error: SLURM_NTASKS=4, but MPI's world has 1 rank. Likely cause: ") == 1, said


def test_mpiexec_inside_a_slurm_allocation(job):
    """Slurm counts its own tasks; mpiexec's count, which comes first, is the one that matters."""
    done, _ = job("return 0", env={"SLURM_NTASKS": "16"})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("variable", ["PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"])
def test_check_world_size(variable):
    check_world_size(1, {})
    check_world_size(4, {variable: "4"})
    with pytest.raises(LaunchError, match=rf"^{variable}=4, but MPI's world has 1 rank\. Likely cause: "):
        check_world_size(1, {variable: "4"})
    with pytest.raises(LaunchError, match=rf"^{variable}=1, but MPI's world has 4 ranks\. "):
        check_world_size(4, {variable: "1"})


def test_check_world_size_believes_the_innermost_launcher():
    check_world_size(2, {"SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "2"})
    check_world_size(2, {"SLURM_NTASKS": "16", "PMI_SIZE": "2"})
    with pytest.raises(LaunchError, match="PMI_SIZE"):
        check_world_size(2, {"SLURM_NTASKS": "2", "PMI_SIZE": "16"})


INTEL = "Intel(R) MPI Library 2021.18.1 for Linux* OS\n"
MPICH, OPEN_MPI = "MPICH Version:      5.0.2\nMPICH Release date: ...", "Open MPI v5.0.8, package: Open MPI ..."


@pytest.mark.parametrize(
    "environ, library, said",
    [
        ({"SLURM_STEP_NUM_TASKS": "2"}, MPICH, "this Python's MPI is MPICH 5.0.2. MPICH and .* need `srun --mpi=pmi2`"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, INTEL, "is Intel.* 2021.18.1 .* need `srun --mpi=pmi2`"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, OPEN_MPI, "is Open MPI v5.0.8. .*, Open MPI `srun --mpi=pmix`"),
        # srun --mpi=pmi2 sets PMI_SIZE, as MPICH's mpiexec does
        ({"PMI_SIZE": "2", "SLURM_PROCID": "0"}, OPEN_MPI, "srun and this MPI do not speak the same PMI: .*--mpi=pmix"),
        (
            {"PMI_SIZE": "2", "SLURM_PROCID": "0"},
            "MVAPICH 4.0",
            "MPICH and Intel's MPI need .*pmi2`, Open MPI",
        ),
        ({"PMI_SIZE": "2", "SLURM_PROCID": "0", "MPI_LOCALRANKID": "0"}, OPEN_MPI, "the mpiexec on PATH belongs to"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, MPICH, "the mpiexec on PATH belongs to another MPI than mpi4py's"),
    ],
)
def test_the_cause_names_what_to_do(environ, library, said):
    with pytest.raises(LaunchError, match=said):
        check_world_size(1, environ, library)


def test_a_world_of_one_says_once_that_it_is_one_of_several(capsys, monkeypatch):
    monkeypatch.setattr(tasks, "_said_alone", False)
    for size, environ in ((1, {}), (1, {"SLURM_NTASKS": "4"}), (1, {"PMI_SIZE": "1"}), (2, {"PMI_SIZE": "4"})):
        say_if_alone(size, environ)
    assert capsys.readouterr().err == ""
    for _ in range(2):
        say_if_alone(1, {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, MPICH)
    said = capsys.readouterr().err
    assert said.startswith("[task 1] SLURM_STEP_NUM_TASKS=2, but MPI's world has 1 rank. ") and said.count("\n") == 1
    assert "--mpi=pmi2" in said and "over MPI.COMM_SELF" in said


def test_the_task_that_speaks():
    assert seconds_to_wait({}) == seconds_to_wait({"SLURM_PROCID": "0"}) == seconds_to_wait({"PMI_RANK": "0"}) == 0
    waits = [seconds_to_wait({"OMPI_COMM_WORLD_RANK": str(number)}) for number in (1, 2, 10, 1000)]
    assert waits == sorted(waits) and waits[0] > 0 and waits[-1] == waits[-2]
    # An mpiexec inside sbatch: all of its tasks inherit the number of the batch script.
    assert seconds_to_wait({"SLURM_PROCID": "0", "PMI_RANK": "2"}) == seconds_to_wait({"PMI_RANK": "2"})
    assert first_on_node({}) and first_on_node({"SLURM_LOCALID": "0"}) and not first_on_node({"MPI_LOCALRANKID": "1"})
