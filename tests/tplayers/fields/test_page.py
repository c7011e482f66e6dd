"""The programs of docs/fields.md run as they stand."""

import pytest
import torch

from commengine import Communicator
from tests.support import documents, mpirun

pytestmark = pytest.mark.mpi

PROGRAMS = [block.text for block in documents.blocks(mpirun.ROOT / "docs" / "fields.md") if block.language == "python"]


def test_a_solvers_own_communicator_and_a_unet(mpi_world):
    names: dict = {}
    exec(PROGRAMS[0], names)
    assert torch.isfinite(names["loss"])
    assert names["field"].shape == (64, 32)


def test_replicas(mpi_world):
    names: dict = {}
    exec(PROGRAMS[1], names)
    with Communicator(mpi_world, device="cpu") as world:
        grid, groups = names["replicas"](world, world.size)
        assert grid.shape == (world.size, 1)
        assert groups.data.size == 1
        groups.close()
