"""A transfer that was started has one derivative, and so has a layer that computes meanwhile."""

import pytest
import torch
from torch import nn

import tplayers
from commengine import CartesianGrid, Communicator
from tests.support.autograd.refusals import require_right_or_refused
from tests.tplayers.conftest import Group, draw

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2), pytest.mark.slow]


def test_started_is_right_or_refused(mpi_world):
    with Communicator(mpi_world, device="cpu", timeout=60) as comm:
        grid, stream = CartesianGrid(comm, (comm.size,)), comm.new_stream()
        plan = tplayers.plan_halo(grid, grid.decompose((3 * comm.size,)), 1)
        answers, refusals = require_right_or_refused(
            lambda x: tplayers.start_transfer(x, plan, comm, stream).wait(),
            lambda x: tplayers.transfer(x, plan, comm), (nn.Module(), nn.Module()), draw(2, 3, seed=comm.rank), comm,
        )  # fmt: skip
        assert refusals >= 20, (answers, refusals)


def test_a_convolution_that_overlaps_is_right_or_refused(mpi_world):
    with Communicator(mpi_world, device="cpu", timeout=60) as comm:
        grid = CartesianGrid(comm, (comm.size,))
        field, options = grid.decompose((4 * comm.size,)), {"padding": 1, "dtype": torch.float64}
        layer = tplayers.FieldConv(2, 2, 3, grid, field, **options, overlap_stream=comm.new_stream())
        plain = tplayers.FieldConv(2, 2, 3, grid, field, **options)
        Group(comm).fill(layer)
        plain.load_state_dict(layer.state_dict())
        answers, refusals = require_right_or_refused(layer, plain, (layer, plain), draw(2, 2, 4, seed=comm.rank), comm)
        assert answers + refusals >= 40
