"""The arguments of operators on blocks are compared, also where a call is known to some ranks."""

import pytest
import torch

from commengine import CartesianGrid, CollectiveError, CollectiveMismatch, Communicator, Decomposition
from tplayers.movement.halo import flip, halo_accumulate, halo_exchange, roll, shift
from tplayers.movement.operators import repartition

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.sizes(2, only=True), pytest.mark.timeout(60)]

BLOCKS = Decomposition(((4, 4),)), Decomposition(((3, 5),))


def on_two(operator, blocks, more, world):
    """A call of ``operator`` on this rank's block of a field on a grid of two ranks."""
    grid = CartesianGrid(world, (2,), periodic=more.get("periodic", False))
    if operator is repartition:
        return repartition(torch.ones(blocks.local_shape(grid.coords)), world, blocks, more["target"])
    x = torch.ones(blocks.local_shape(grid.coords)[0] + 2 * more.get("widths", 0) * (operator is halo_accumulate))
    named = {name: one for name, one in more.items() if name != "periodic"}
    return operator(x, grid, **named, decomposition=blocks)


#: operators with the arguments of rank 0 and of the other one
DIFFERENT = [
    (halo_exchange, (BLOCKS[0], {"widths": 1}), (BLOCKS[1], {"widths": 1})),
    (halo_exchange, (BLOCKS[0], {"widths": 1}), (BLOCKS[0], {"widths": 2})),
    (halo_exchange, (BLOCKS[0], {"widths": 1}), (BLOCKS[0], {"widths": 0})),
    (halo_exchange, (BLOCKS[0], {"widths": 1, "padding": "reflect"}), (BLOCKS[0], {"widths": 1, "padding": "zeros"})),
    (halo_exchange, (BLOCKS[0], {"widths": 1, "periodic": True}), (BLOCKS[0], {"widths": 1})),
    (halo_accumulate, (BLOCKS[0], {"widths": 1}), (BLOCKS[1], {"widths": 1})),
    (halo_accumulate, (BLOCKS[0], {"widths": 1, "padding": "zeros"}), (BLOCKS[0], {"widths": 1, "padding": "reflect"})),
    (shift, *((BLOCKS[0], {"axis": 0, "step": step, "periodic": True}) for step in (1, 2))),
    (roll, (BLOCKS[0], {"shifts": 1, "axes": 0}), (BLOCKS[1], {"shifts": 1, "axes": 0})),
    (flip, (BLOCKS[0], {"axes": 0}), (BLOCKS[1], {"axes": 0})),
    (repartition, (BLOCKS[0], {"target": BLOCKS[1]}), (BLOCKS[0], {"target": Decomposition(((5, 3),))})),
    (repartition, (BLOCKS[0], {"target": BLOCKS[1]}), (BLOCKS[1], {"target": BLOCKS[0]})),
]


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("number", range(len(DIFFERENT)))
def test_arguments_that_differ_at_the_first_call_are_an_error_on_every_rank(mpi_world, number, checked):
    operator, *given = DIFFERENT[number]
    with Communicator(mpi_world, checked=checked) as comm:
        blocks, more = given[comm.rank]
        with pytest.raises(CollectiveMismatch, match="the ranks disagree"):
            on_two(operator, blocks, more, comm)
        on_two(operator, given[0][0], given[0][1], comm)  # and the ranks are still in step
        comm.close()


@pytest.mark.parametrize("knows", [0, 1])
@pytest.mark.parametrize("number", [0, 1, 5, 7, 8])
def test_arguments_that_are_known_to_one_rank_alone_are_an_error_on_both(mpi_world, number, knows):
    """The one would compare, and the other send. A rank that only sends hears nothing, and its result is right."""
    operator, *given = DIFFERENT[number]
    with Communicator(mpi_world, timeout=20) as comm:
        on_two(operator, given[0][0], given[0][1], comm)
        blocks, more = given[comm.rank != knows]
        with pytest.raises(CollectiveError, match=r"a call that is known|exchange: "):
            on_two(operator, blocks, more, comm)


def test_known_calls_that_differ_are_an_error_on_every_rank_soon(mpi_world):
    """Their messages are equally long, so that nothing else tells."""
    calls = [(BLOCKS[0], {"widths": 1, "padding": one}) for one in ("reflect", "zeros")]
    with Communicator(mpi_world) as comm:
        for blocks, more in calls * 40:
            on_two(halo_exchange, blocks, more, comm)

        def differ():
            for blocks, more in calls[comm.rank :] + calls * 32:
                on_two(halo_exchange, blocks, more, comm)

        with pytest.raises(CollectiveMismatch, match="the last 64 operators on blocks"):
            differ()
        comm.close()
