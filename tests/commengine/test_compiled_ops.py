"""The collectives as operators of torch.library, and the table of the communicators they may name."""

import gc

import pytest
import torch

from commengine import CollectiveError, Communicator
from commengine import compiled_ops as operators

pytestmark = pytest.mark.mpi


def calls(comm, x, whole):
    """Each operator, and arguments for it. x: the rows of a rank, whole: those of all."""
    yield torch.ops.commengine.all_reduce, (x, comm.handle, "max")
    yield torch.ops.commengine.all_gather, (x, comm.handle, comm.size, [x, whole])
    yield torch.ops.commengine.all_reduce, (x[0, 0], comm.handle, "min")
    yield torch.ops.commengine.reduce_scatter, (whole, comm.handle, comm.size, [])


@pytest.mark.every_size
@pytest.mark.parametrize("turned", [False, True])
def test_operators_do_what_the_communicator_does(world, turned):
    """With inputs of any strides, which stay as they are."""
    ranks = [torch.arange(6.0).view(3, 2) + rank for rank in range(world.size)]
    x, whole = ranks[world.rank], torch.cat(ranks)
    expected = (ranks[-1], whole, ranks[0][0, 0], world.size * x)
    for (operator, arguments), right in zip(calls(world, x, whole), expected, strict=True):
        given = arguments[0].t().contiguous().t() if turned else arguments[0].clone()
        found = operator(given, *arguments[1:])
        assert torch.equal(found, right) and found.is_contiguous() and torch.equal(given, arguments[0])


@pytest.mark.every_size
def test_schemas_and_fakes(world):
    """Torch's own check: nothing is changed, as the schema says, and the fake is like what comes out."""
    for operator, arguments in calls(world, torch.ones(3, 2), torch.ones(3 * world.size, 2)):
        torch.library.opcheck(operator.default, arguments, test_utils=("test_schema", "test_faketensor"))
        # Inductor lets kernels read what an operator is to write before it has: see test_inductor of the models.
        assert not operator.default._schema.is_mutable


def test_a_communicator_is_named_while_it_is_open(mpi_world):
    one, other = Communicator(mpi_world), Communicator(mpi_world)
    part = one.split(0)
    assert len({one.handle, other.handle, part.handle}) == 3
    for comm in (part, one, other):
        torch.ops.commengine.all_reduce(torch.ones(1), comm.handle, "sum")
        handle = comm.handle
        comm.close()
        comm.close()
        with pytest.raises(CollectiveError, match=f"communicator {handle}, which is closed"):
            torch.ops.commengine.all_reduce(torch.ones(1), handle, "sum")


def test_the_table_keeps_no_communicator_alive(mpi_world):
    comm = Communicator(mpi_world)
    handle, mpi = comm.handle, comm.mpi
    assert operators._live[handle] is comm
    del comm
    gc.collect()
    assert handle not in operators._live
    mpi.Free()


def test_errors_are_those_of_the_communicator(world):
    with pytest.raises(CollectiveError, match=r"all_reduce: op='first' is not one of"):
        torch.ops.commengine.all_reduce(torch.ones(2, 3), world.handle, "first")
