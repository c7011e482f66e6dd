"""The limit of MPI's communicators is an error on all ranks, and no crash; older versions of mpi4py and MPI."""

from pathlib import Path

import pytest
import torch

from commengine.mpi import NONE_LEFT

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture
def exhausted(mpi_world):
    """Whatever communicators MPI still has are taken, but ``left``: a function that frees that many more."""
    from mpi4py import MPI

    if "MPICH" not in MPI.Get_library_version():
        pytest.skip("only MPICH is known to have a limit that a test reaches")
    taken = []

    def take():
        while True:
            taken.append(mpi_world.Dup())

    with pytest.raises(MPI.Exception, match="|".join(NONE_LEFT)):
        take()

    def free(count):
        for _ in range(min(count, len(taken))):
            taken.pop().Free()

    yield free
    free(len(taken))


def test_without_communicators_each_call_that_needs_one_says_so(mpi_world, exhausted):
    from commengine import CollectiveError, Communicator
    from tests.support.exact import ALWAYS

    says = pytest.raises(CollectiveError, match="MPI has no communicator left to give")
    for left in (0, 1):
        exhausted(left)
        with says:
            Communicator(mpi_world, timeout=30)
    exhausted(2)  # three are left: too few for the ranks to find their node
    comm = Communicator(mpi_world, switch_points=ALWAYS)
    for call in (
        lambda: [comm.new_stream() for _ in range(5)],
        lambda: [comm.split(0) for _ in range(5)],
        lambda: comm.empty((8,)),
        lambda: comm.all_reduce(torch.ones(1 << 16)),
    ):
        with says:
            call()
    exhausted(100)
    tensor = torch.ones(1 << 16)
    comm.all_reduce(tensor)
    assert tensor.eq(comm.size).all()
    comm.close()


def test_a_grid_that_cannot_be_made_gives_its_groups_back(mpi_world, exhausted):
    from commengine import CollectiveError, Communicator, ProcessGrid

    exhausted(4)
    with Communicator(mpi_world, device="cpu") as comm:
        for _ in range(3):  # three are left, and a grid has five groups
            with pytest.raises(CollectiveError, match="MPI has no communicator left to give"):
                ProcessGrid(comm, tensor=comm.size)
            for part in [comm.split(0) for _ in range(3)]:
                part.close()
        exhausted(10)
        with ProcessGrid(comm, tensor=comm.size) as grid:
            assert grid.tensor.size == comm.size


def test_kept_tensors_hold_no_communicator_and_no_open_file(mpi_world, exhausted):
    from commengine import Communicator

    exhausted(10)
    kept, files = [], []
    for number in range(40):
        with Communicator(mpi_world) as comm:
            kept.append(comm.empty((8,)).fill_(number))
        files.append(len(list(Path("/proc/self/fd").iterdir())))
    assert [one.sum() for one in kept] == [8 * number for number in range(40)] and len(set(files)) == 1
    exhausted(100)
    with Communicator(mpi_world) as after:
        tensor = torch.ones(3)
        after.all_reduce(tensor)
        assert tensor.tolist() == [mpi_world.size] * 3


def test_ranks_of_a_part_in_the_order_of_the_part(mpi_world):
    from commengine.mpi import ranks_in, world_ranks_of

    back = mpi_world.Split(0, -mpi_world.rank)
    assert ranks_in(back, mpi_world) == list(reversed(range(mpi_world.size)))
    assert world_ranks_of(back) == ranks_in(back, mpi_world)
    back.Free()
