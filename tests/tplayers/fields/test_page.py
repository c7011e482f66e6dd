"""The programs of docs/fields.md run as they stand."""

import pytest
import torch

from commengine import CartesianGrid, Communicator
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
    exec(PROGRAMS[2], names)
    with Communicator(mpi_world, device="cpu") as world:
        grid, groups = names["replicas"](world, world.size)
        assert grid.shape == (world.size, 1)
        assert groups.data.size == 1
        groups.close()


def test_a_torch_module(mpi_world):
    names: dict = {}
    exec(PROGRAMS[1], names)
    with Communicator(mpi_world, device="cpu") as world:
        grid = CartesianGrid(world, (1, world.size))
        field = grid.decompose((15, 8 * world.size + 1))
        module = names["parallel"](grid, field)
        assert module.output == field
        assert module(torch.ones(1, 4, *field.local_shape(grid.coords))).shape[2:] == field.local_shape(grid.coords)


def test_attention_and_dropout(mpi_world):
    names: dict = {}
    exec(PROGRAMS[3], names)
    with Communicator(mpi_world, device="cpu") as world:
        grid = CartesianGrid(world, (1, world.size))
        losses = [names["step"](grid, grid.decompose((16, 8 * world.size)), number) for number in (0, 0, 1)]
        assert torch.isfinite(losses[0])
        assert losses[0] == losses[1] != losses[2]
