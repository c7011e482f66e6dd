"""A communicator over the whole job, for the tests marked ``mpi``."""

import pytest


@pytest.fixture(scope="module")
def world(mpi_world):
    from commengine import Communicator

    with Communicator(mpi_world) as world:
        yield world
        world.close()


@pytest.fixture
def stream(mpi_world):
    """A stream of a communicator of its own: what breaks it breaks nothing else."""
    from commengine import Communicator

    comm = Communicator(mpi_world, name="streamed")
    made = comm.new_stream()
    made.comm = comm
    yield made
    comm.close()
