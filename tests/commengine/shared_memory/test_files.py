"""The files of shared memory where ranks have namespaces of their own, where /dev/shm is small, and after kills."""

import random
import sys

import pytest

from commengine.shared_memory.files import PREFIX
from tests.support import mpirun
from tests.support.lab import small_shm

pytestmark = pytest.mark.slow

#: large collectives of every kind of memory, of two groups one inside the other, against the results; prints the way
PROGRAM = """
import os, sys
import torch
from commengine import Communicator, launch
from commengine.shared_memory import files, windows
if "named" in sys.argv:
    windows.WAYS = (files.NAMED,)
def main(world):
    with Communicator(world.mpi, timeout=60) as comm, comm.split(0) as part:
        stream = comm.new_stream()
        for group in (comm, part):
            for number in range(3):
                kept = group.empty((1 << 20,)).fill_(number)
                for tensor in (kept, torch.full((1 << 18,), float(number))):
                    group.all_reduce(tensor)
                    if group is comm:
                        group.all_reduce(tensor, stream=stream).wait()
                    assert tensor.eq(number * group.size ** (2 if group is comm else 1)).all()
        memory = comm._shared._memory
        way = "private" if memory is None else "named" if memory.way.left is files.disk_left else "nameless"
        shared = comm._shared.reaches(comm.empty((1 << 20,)))
    sys.stdout.write(f"{way} {shared}\\n")
    sys.stdout.flush()
def again(world):
    sys.stdout.write("ready\\n")
    sys.stdout.flush()
    while True:
        with Communicator(world.mpi) as comm:
            comm.empty((1 << 20,))
launch.run(again if "again" in sys.argv else main)
"""

#: a rank in a namespace of its own: the pid is another process there, or /proc does not let it open the other's files
SPACES = {
    "user": ("--user", "--map-root-user"),
    "pid": ("--pid", "--fork", "--mount-proc", "--kill-child"),
}


def program(folder):
    (folder / "program.py").write_text(PROGRAM)
    return [sys.executable, str(folder / "program.py")]


needs_mounts = pytest.mark.skipif(bool(small_shm.why_not()), reason="this user may not mount a disk of its own")


@pytest.mark.long
@pytest.mark.parametrize(
    "space", ["pid", *(pytest.param(one, marks=pytest.mark.long) for one in SPACES if one != "pid")]
)
def test_ranks_in_namespaces_of_their_own_share_a_named_file(tmp_path, space):
    reason = small_shm.allowed([*SPACES[space], "true"])
    if reason:
        pytest.skip(reason)
    launch = [mpirun.mpiexec(), "-n", "2", "unshare", *SPACES[space]]
    done = mpirun.command([*launch, *program(tmp_path)], timeout=90)
    alone = [*launch, sys.executable, "-c", "from mpi4py import MPI; MPI.COMM_WORLD.allgather(bytes(1 << 20))"]
    if done.returncode and mpirun.command(alone, timeout=60).returncode:
        pytest.skip("mpi4py alone dies in such a namespace, too (Open MPI 5 in PID namespaces)")
    assert done.returncode == 0 and done.stdout.count("named True\n") == 2, done  # UCX tells of its own failures


@pytest.mark.long
@needs_mounts
@pytest.mark.parametrize(
    ("megabytes", "way", "told"),
    [pytest.param(20, "", "nameless True", marks=pytest.mark.long), (36, "named", "named False")],
)
def test_a_small_dev_shm(tmp_path, megabytes, way, told):
    """Memory without a name needs none of it; named files leave MPI its part, and the group goes on without more."""
    argv = " ".join([mpirun.mpiexec(), "-n", "2", *program(tmp_path), way])
    done = mpirun.command(small_shm.in_small_shm(megabytes, argv), timeout=90)
    assert (done.returncode, done.stdout) == (0, f"{told}\n" * 2), done


@needs_mounts
@pytest.mark.long
def test_two_jobs_that_share_a_small_dev_shm_at_once(tmp_path):
    """Each reserves, so neither writes to what the other has taken. A job that finds too little goes on without."""
    job = " ".join([mpirun.mpiexec(), "-n", "2", *program(tmp_path), "named"])
    both = f"{job} & first=$!; {job}; second=$?; wait $first && exit $second"
    for _ in range(3):
        done = mpirun.command(small_shm.in_small_shm(64, both), timeout=100)
        said = sorted(line.split()[0] for line in done.stdout.splitlines())
        assert done.returncode == 0 and said in (["named"] * 4, ["named"] * 2 + ["private"] * 2), done


@needs_mounts
@pytest.mark.long
@pytest.mark.parametrize("way", ["", "named"])
def test_a_kill_while_memory_is_made_leaves_nothing_of_it(tmp_path, way):
    """SIGKILL for all at a moment that is drawn: at most an empty file with a name, which the next start removes."""
    draw = random.Random(4)
    listing = tmp_path / "left"
    for _ in range(4):
        argv = [mpirun.mpiexec(), "-n", "2", *program(tmp_path), "again", way]
        pids = "ps -o pid= --ppid $(ps -o pid= --ppid $job)"
        script = (
            f": > {tmp_path}/out; {' '.join(argv)} >> {tmp_path}/out & job=$!; "
            f"while [ $(grep -c ready {tmp_path}/out) -lt 2 ]; do sleep 0.05; done; sleep {draw.random():.4f}; "
            f"kill -9 $job $({pids}) $(ps -o pid= --ppid $job); wait; ls -s /dev/shm | tail -n +2 > {listing}"
        )
        mpirun.command(small_shm.in_small_shm(64, f"({script}) 2>/dev/null"), timeout=60)
        left = [line.split() for line in listing.read_text().splitlines()]
        assert [(size, name) for size, name in left if PREFIX in name and (size != "0" or not way)] == []
