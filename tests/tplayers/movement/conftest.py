"""Groups of 1, 2, 3 and 4 ranks over the jobs of 1, 2 and 4 ranks that tests/run starts."""

import pytest

from commengine import Communicator


@pytest.fixture(scope="module")
def world(mpi_world):
    with Communicator(mpi_world) as world:
        yield world
        world.close()


@pytest.fixture(scope="module")
def groups(world):
    """All ranks; in the job of 4 ranks also a group of the first three. A rank gets the groups that it belongs to."""
    three = world.split(0 if world.rank < 3 else None, name="three") if world.size == 4 else None
    yield [world] if three is None else [world, three]
    if three is not None:
        three.close()
