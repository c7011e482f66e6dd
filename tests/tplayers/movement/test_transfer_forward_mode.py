"""Forward-mode differentiation of the operators: the tangent-linear model of a program."""

import pytest
import torch

from commengine import CartesianGrid
from tests.support.adjoints import assert_forward_mode
from tplayers.movement.halo import halo_accumulate, plan_halo
from tplayers.movement.operators import (
    all_gather,
    all_reduce,
    all_to_all,
    all_to_all_v,
    broadcast,
    gather,
    scatter,
    sum_reduce,
)
from tplayers.movement.plan import PADDINGS
from tplayers.movement.transfer import transfer

pytestmark = [
    pytest.mark.mpi(min_size=1),  # on 2 ranks; make test-long runs it on 1 and 4, too
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),  # torch loads it for forward mode
]


@pytest.mark.parametrize("padding", PADDINGS)
def test_halos(groups, padding):
    for group in groups:
        grid = CartesianGrid(group, (1, group.size))
        blocks = grid.decompose((3, 2 * group.size + 1))
        plan = plan_halo(grid, blocks, 1, padding)

        def accumulated(y, grid=grid, blocks=blocks):
            return halo_accumulate(y, grid, 1, decomposition=blocks, padding=padding)

        assert_forward_mode(lambda x, p=plan, g=group: transfer(x, p, g), (2, *plan.source_shape), group)
        assert_forward_mode(accumulated, (2, *plan.target_shape), group, torch.complex128)


def test_collectives(groups):
    """A rank without an input gives an empty tensor, whose empty tangent takes part."""
    for group in groups:
        first = group.rank == 0
        assert_forward_mode(lambda x, g=group: broadcast(x, g), (3, 2) if first else (0,), group)
        assert_forward_mode(lambda x, g=group: scatter(x, g), (5, 2) if first else (0, 2), group)
        assert_forward_mode(lambda x, g=group: gather(all_reduce(x, g), g), (3, 2), group, torch.complex128)
        some = [4 - group.size + 1] + [1] * (group.size - 1)
        assert_forward_mode(lambda x, g=group, some=some: all_to_all_v(x, g, some)[0], (4, 2), group)
        assert_forward_mode(lambda x, g=group: sum_reduce(all_gather(all_to_all(x, g, 1, 0), g, 1), g), (2, 4), group)
