"""The collectives as operators of torch.library, and the table of the communicators they may name."""

import gc

import pytest
import torch

from commengine import CollectiveError, Communicator
from commengine import compiled_ops as operators

pytestmark = pytest.mark.mpi


@pytest.mark.every_size
def test_operators_do_what_the_communicator_does(world):
    x = torch.arange(6.0).view(3, 2) + world.rank
    expected = x.clone()
    world.all_reduce(expected, "max")
    torch.ops.commengine.all_reduce_(x, world.handle, "max")
    assert torch.equal(x, expected)

    whole = torch.empty(3 * world.size, 2)
    torch.ops.commengine.all_gather_into_(whole, x + world.rank, world.handle)
    assert torch.equal(whole, torch.cat([x + rank for rank in range(world.size)]))

    part = torch.empty(3, 2)
    torch.ops.commengine.reduce_scatter_into_(part, whole, world.handle)
    assert torch.equal(part, world.size * (x + world.rank))


@pytest.mark.every_size
def test_schemas_and_fakes(world):
    """Torch's own check: the schema says what is changed, and the fake what comes out."""
    x, whole = torch.ones(3, 2), torch.ones(3 * world.size, 2)
    for operator, arguments in (
        (torch.ops.commengine.all_reduce_, (x, world.handle, "sum")),
        (torch.ops.commengine.all_gather_into_, (whole, x, world.handle)),
        (torch.ops.commengine.reduce_scatter_into_, (x, whole, world.handle)),
    ):
        torch.library.opcheck(operator.default, arguments, test_utils=("test_schema", "test_faketensor"))


def test_a_communicator_is_named_while_it_is_open(mpi_world):
    one, other = Communicator(mpi_world), Communicator(mpi_world)
    part = one.split(0)
    assert len({one.handle, other.handle, part.handle}) == 3
    for comm in (part, one, other):
        torch.ops.commengine.all_reduce_(torch.ones(1), comm.handle, "sum")
        handle = comm.handle
        comm.close()
        comm.close()
        with pytest.raises(CollectiveError, match=f"communicator {handle}, which is closed"):
            torch.ops.commengine.all_reduce_(torch.ones(1), handle, "sum")


def test_the_table_keeps_no_communicator_alive(mpi_world):
    comm = Communicator(mpi_world)
    handle, mpi = comm.handle, comm.mpi
    assert operators._live[handle] is comm
    del comm
    gc.collect()
    assert handle not in operators._live
    mpi.Free()


def test_errors_are_those_of_the_communicator(world):
    with pytest.raises(CollectiveError, match=r"all_reduce: tensor of shape .* is not contiguous"):
        torch.ops.commengine.all_reduce_(torch.ones(2, 3).t(), world.handle, "sum")
