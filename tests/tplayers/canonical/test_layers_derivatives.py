"""Canonical layers have one derivative: a second one is refused in every way to ask for it."""

import pytest
from torch import nn

import tplayers
from commengine import Communicator
from tests.support.autograd.refusals import require_right_or_refused
from tests.tplayers.conftest import Group, draw

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2), pytest.mark.slow]

WIDE, NARROW, PARTS = 16, 8, 4
LAYERS = {
    "column": lambda comm, **options: tplayers.ColumnParallelLinear(NARROW, WIDE, comm, **options),
    "row": lambda comm, **options: tplayers.RowParallelLinear(WIDE, NARROW, comm, **options),
    "MLP": lambda comm, **options: tplayers.MLP(NARROW, WIDE, comm, **options),
    "SwiGLU": lambda comm, **options: tplayers.SwiGLU(NARROW, WIDE, comm, **options),
    "LayerNorm": lambda comm, **options: tplayers.LayerNorm(NARROW, **options),
    "RMSNorm": lambda comm, **options: tplayers.RMSNorm(NARROW, **options),
}


@pytest.mark.some(3)
@pytest.mark.parametrize("name", LAYERS)
def test_right_or_refused(mpi_world, name):
    with Communicator(mpi_world, device="cpu", order="tree", timeout=60) as comm:
        layer, plain = (LAYERS[name](comm, dtype=draw(1).dtype) for _ in range(2))
        Group(comm).fill(layer)
        plain.load_state_dict(layer.state_dict())
        tplayers.use_canonical_shards(nn.ModuleList([layer]), comm, PARTS)
        x = draw(4, 2, WIDE // comm.size if name == "row" else NARROW, seed=comm.rank * (name == "row"))
        assert require_right_or_refused(layer, plain, (layer, plain), x, comm)[1] >= 40
