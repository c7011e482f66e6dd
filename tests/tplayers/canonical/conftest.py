"""Groups of the same ranks that reduce in a tree, with the canonical shards of four."""

import pytest

from commengine import Communicator
from tplayers import CanonicalShards


@pytest.fixture(scope="module")
def shards(mpi_world):
    """The shards of the tensor group of all ranks."""
    with Communicator(mpi_world, order="tree") as comm:
        yield CanonicalShards(4, comm)


@pytest.fixture(scope="module")
def alone():
    """The shards of a rank alone, which are the truth."""
    from mpi4py import MPI

    with Communicator(MPI.COMM_SELF, order="tree") as comm:
        yield CanonicalShards(4, comm)
