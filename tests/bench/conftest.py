"""The communicator and the folder of a test that runs a command on its own ranks."""

import pytest


@pytest.fixture
def world(mpi_world):
    from commengine import Communicator

    with Communicator(mpi_world) as world:
        yield world


@pytest.fixture
def folder(mpi_world, tmp_path):
    """One folder for all ranks."""
    return mpi_world.bcast(tmp_path)
