"""torch's fused attention of the host has one derivative; the layer with it refuses a second one, or has it right."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import tplayers
from commengine import Communicator
from tests.support.autograd.refusals import require_right_or_refused
from tests.tplayers.conftest import Group, draw

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2), pytest.mark.slow]


@pytest.mark.some(1)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "query_groups": 2}])
def test_right_or_refused(mpi_world, options):
    with Communicator(mpi_world, device="cpu", timeout=60) as comm:
        layer = tplayers.SelfAttention(8, 4, comm, dtype=torch.float64, **options)
        Group(comm).fill(layer)

        def plain(x):
            with sdpa_kernel(SDPBackend.MATH):
                return layer(x)

        assert require_right_or_refused(layer, plain, (layer, layer), draw(8, 2, 8), comm)[1] >= 25
