"""Small tensors that are summed in rank order: the memory that is kept, and the sums."""

import pytest
import torch

from commengine import Communicator
from commengine.host.wire import SMALL_BYTES
from tests.support.exact import NEVER, expected, ops_of, values

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.every_size]


@pytest.fixture(scope="module")
def world(mpi_world):
    with Communicator(mpi_world, switch_points=NEVER) as world:
        yield world


def test_small_tensors_share_one_memory(world):
    """The parts are the ranks' rows of it, of any dtype and shape."""
    wire = world._host.wire
    one, other = wire.small(torch.empty(2, 5, dtype=torch.float16)), wire.small(torch.empty((), dtype=torch.int8))
    assert one.shape == (world.size, 2, 5) and other.shape == (world.size,)
    assert one.data_ptr() == other.data_ptr() and one.is_contiguous()
    assert wire.small(torch.empty(SMALL_BYTES, dtype=torch.int8)).numel() == world.size * SMALL_BYTES


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int16], ids=str)
def test_the_same_shape_again_and_again(run, world, dtype):
    """Each call has the right result, whatever the call before left in the buffer, in every mode of torch."""
    for shape in ((7,), (), (3, 1, 2), (7,)):
        for op in ops_of(dtype):
            numel = torch.Size(shape).numel()
            tensor = values(dtype, numel, world.rank).view(shape)
            run("all_reduce", tensor, op)
            assert torch.equal(tensor.view(-1), expected(dtype, numel, world.size, op)), (shape, op)
    with torch.inference_mode():
        made_there = torch.full((9,), world.rank).to(dtype)
    run("all_reduce", made_there, "sum")
    assert made_there.eq(sum(range(world.size))).all()


def test_autograd_sees_that_a_leaf_changed(world):
    """By the sum of two halves and by the general way: a graph that saved the old values has no gradient."""
    for op in ("sum", "max"):
        leaf = torch.full((50,), 2.0, dtype=torch.bfloat16, requires_grad=True)
        saved = (leaf * leaf).sum()
        world.all_reduce(leaf, op)
        assert leaf.eq(2.0 * world.size if op == "sum" else 2.0).all()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.backward()
