"""The relay between MPICH and Slurm's pmi2 plugin. tests/lab/test_slurm.py has it with a real Slurm."""

import os
import signal
import socket

import pytest

from commengine.startup.pmi_relay import needs_relay, start_relay

TASK = {"PMI_FD": "11", "SLURM_STEP_NUM_NODES": "2"}


@pytest.mark.parametrize(
    ("environ", "needed"),
    [
        (TASK, True),
        ({}, False),
        ({"PMI_FD": "11"}, False),  # mpiexec without Slurm
        ({"SLURM_STEP_NUM_NODES": "2"}, False),  # PMIx
        (TASK | {"SLURM_STEP_NUM_NODES": "1"}, False),
        (TASK | {"SLURM_STEP_NUM_NODES": "many"}, False),
        (TASK | {"MPI_LOCALNRANKS": "2"}, False),  # mpiexec inside sbatch
    ],
)
def test_only_tasks_of_srun_on_several_nodes_need_it(environ, needed):
    assert needs_relay(environ) is needed


def test_without_need_nothing_changes():
    environ = {"PMI_FD": "11"}
    assert start_relay(environ) is None and environ == {"PMI_FD": "11"}


@pytest.fixture
def ends():
    """The relay's process, and the sockets of the rank and of Slurm."""
    slurm, task = socket.socketpair()
    environ = TASK | {"PMI_FD": str(task.detach())}
    process = start_relay(environ)
    with slurm, socket.socket(fileno=int(environ["PMI_FD"])) as rank:
        for one in (slurm, rank):
            one.settimeout(20)
        yield process, rank, slurm
    process.kill()
    process.wait()


@pytest.mark.slow
def test_lines_pass_and_the_longest_value_is_made_smaller(ends):
    _, rank, slurm = ends
    rank.sendall(b"cmd=get_maxes\n")
    assert slurm.recv(4096) == b"cmd=get_maxes\n"
    slurm.sendall(b"cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=1024\n")
    assert rank.recv(4096) == b"cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=0896\n"
    value = b"cmd=put key=a value=" + b"x" * 900 + b" vallen_max=1024\n"  # a rank's own words are passed as they are
    rank.sendall(value)
    assert slurm.recv(4096) == value


@pytest.mark.slow
def test_signals_to_the_step_do_not_end_it_and_the_end_of_mpi_does(ends):
    process, rank, slurm = ends
    rank.sendall(b"cmd=init\n")
    assert slurm.recv(4096) == b"cmd=init\n"  # it runs now
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        os.kill(process.pid, number)
    rank.sendall(b"cmd=finalize\n")
    assert slurm.recv(4096) == b"cmd=finalize\n"
    slurm.shutdown(socket.SHUT_RDWR)
    assert process.wait(20) == 0
    assert rank.recv(1) == b""
