"""Several programs in one MPI.COMM_WORLD: parts by color, by the launcher's command, and what is refused."""

import sys
import textwrap

import numpy as np
import pytest

from commengine import LaunchError
from commengine.startup.programs import GREATEST_COLOR, split_world
from tests.support import mpirun

PROGRAM = """
import sys
import mpi4py
mpi4py.rc.thread_level = sys.argv[1]
import numpy as np
import torch
from mpi4py import MPI
from commengine import Communicator, launch

with launch.abort_on_error():
    assert MPI.Query_thread() == {"single": MPI.THREAD_SINGLE, "multiple": MPI.THREAD_MULTIPLE}[sys.argv[1]]
    MPI.COMM_WORLD.Barrier()  # a call of the program itself before ours
    with launch.split_world() as part, Communicator(part.comm) as comm:
        mine = torch.tensor([float(part.color), 1.0])
        stream = comm.new_stream()
        comm.all_reduce(mine, stream=stream).wait()
        theirs = np.empty((part.other.remote_size, 2), np.float32)
        part.other.Allgather(mine.numpy(), theirs)
        print(f"color {part.color}: {mine.tolist()} {theirs[0].tolist()}\\n", end="")
"""


def programs(path, *argv):
    """``mpiexec -n 2 PROGRAM : -n 1 PROGRAM``."""
    path.write_text(PROGRAM)
    one = [sys.executable, str(path), *argv]
    return mpirun.command([mpirun.mpiexec(), "-n", "2", *one, ":", "-n", "1", *one], timeout=60, fresh=False)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["single", pytest.param("multiple", marks=pytest.mark.long)])
def test_two_programs_of_one_launcher_at_a_thread_level(tmp_path, level):
    done = programs(tmp_path / "program.py", level)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "color 0: [0.0, 2.0] [1.0, 1.0]",
        "color 0: [0.0, 2.0] [1.0, 1.0]",
        "color 1: [1.0, 1.0] [0.0, 2.0]",
    ]


def job(path, text, n=2):
    path.write_text("import time\nfrom mpi4py import MPI\nfrom commengine import launch\n" + textwrap.dedent(text))
    return mpirun.run(n, str(path), timeout=60)


@pytest.mark.slow
def test_a_wrong_color_ends_the_job_with_one_line(tmp_path):
    text = """
    with launch.abort_on_error():
        launch.split_world(-3 if MPI.COMM_WORLD.rank == 1 else 0)
    """
    done = job(tmp_path / "program.py", text)
    assert done.returncode == 1
    assert done.stderr.count("error: split_world needs a color from 0 to") == 1, done.stderr
    assert "rank 1 of 2 gave none" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.long
def test_a_program_that_does_not_take_part_is_waited_for_with_a_word(tmp_path):
    text = """
    import commengine.startup.programs as programs
    programs.SLOW_SECONDS = 0.5
    if MPI.COMM_WORLD.rank == 1:
        time.sleep(3)
    launch.split_world(0).close()
    """
    done = job(tmp_path / "program.py", text)
    assert done.returncode == 0
    assert done.stderr.count("launch.split_world has waited for 0.5 s: every rank of the 2 must take part") == 1
    assert done.stderr.startswith("[rank 0]")


@pytest.mark.mpi
@pytest.mark.every_size
@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_pair_of_parts_is_connected(mpi_world, count):
    color = 5 * (mpi_world.rank % count)
    colors = {5 * (rank % count) for rank in range(mpi_world.size)}
    outside = None
    if mpi_world.size > 1 and mpi_world.rank < 2:  # a message that is on its way on the world meanwhile
        outside = mpi_world.irecv(source=1 - mpi_world.rank, tag=7)
        mpi_world.isend(mpi_world.rank, dest=1 - mpi_world.rank, tag=7).wait()
    with split_world(color, comm=mpi_world) as part:
        ranks = [rank for rank in range(mpi_world.size) if 5 * (rank % count) == color]
        assert part.color == color and set(part.others) == colors - {color}
        assert (part.comm.size, part.comm.rank) == (len(ranks), ranks.index(mpi_world.rank))
        for theirs, between in sorted(part.others.items()):
            said = np.empty(between.remote_size, np.int64)
            between.Allgather(np.array([mpi_world.rank]), said)
            assert said.tolist() == [rank for rank in range(mpi_world.size) if 5 * (rank % count) == theirs]
        if len(colors) == 2:
            assert part.other is next(iter(part.others.values()))
        else:
            with pytest.raises(LaunchError, match="no other part" if len(colors) == 1 else "2 other parts"):
                _ = part.other
    part.close()  # again
    assert outside is None or outside.wait() == 1 - mpi_world.rank


@pytest.mark.mpi
def test_a_rank_alone_is_a_part(mpi_world):
    from mpi4py import MPI

    with split_world(7, comm=MPI.COMM_SELF) as part:
        assert part.comm.size == 1 and part.others == {}


@pytest.mark.mpi
@pytest.mark.parametrize("wrong", [-1, GREATEST_COLOR + 1, True, 1.5, "one"])
def test_a_wrong_color_is_an_error_on_every_rank(mpi_world, wrong):
    last = mpi_world.size - 1
    color = wrong if mpi_world.rank == last else 0
    with pytest.raises(LaunchError, match=f"rank {last} of {mpi_world.size} gave none .rank {mpi_world.rank}: color="):
        split_world(color, comm=mpi_world)


@pytest.mark.mpi
def test_a_communicator_is_needed(mpi_world):
    from mpi4py import MPI

    for wrong in (MPI.COMM_NULL, "world"):
        with pytest.raises(LaunchError, match="needs an MPI intracommunicator"):
            split_world(0, comm=wrong)
