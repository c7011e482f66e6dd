"""Small tensors that are summed in rank order: the buffers that are kept, and the sums."""

import pytest
import torch

from commengine import Communicator
from commengine.host.small_buffers import MOST_BUFFERS, SmallBuffers
from tests.support.exact import NEVER, expected, ops_of, values

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.every_size]


def empty(shape, dtype):
    return torch.empty(shape, dtype=dtype)


@pytest.fixture(scope="module")
def world(mpi_world):
    with Communicator(mpi_world, switch_points=NEVER) as world:
        yield world


def test_a_buffer_is_kept_for_a_dtype_and_shape(world):
    """The parts are the ranks' rows of one memory; no more buffers than the limit are kept."""
    buffers = SmallBuffers(3, world._host.types, empty)
    one = buffers[torch.float16, torch.Size((2, 5))]
    assert buffers[torch.float16, torch.Size((2, 5))] is one and len(one.parts) == 3 and not one.pair
    assert [part.shape for part in one.parts] == [(2, 5)] * 3
    assert one.received[0].address == one.parts[0].data_ptr() and one.received[0].nbytes == 60
    assert SmallBuffers(2, world._host.types, empty)[torch.bfloat16, torch.Size(())].pair
    for numel in range(3 * MOST_BUFFERS):
        assert len(buffers) <= MOST_BUFFERS
        assert buffers[torch.int8, torch.Size((numel,))].parts[2].numel() == numel


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


def test_autograd_sees_nothing(world):
    """Neither the sum of two halves nor the general way makes a version that a graph would stumble over."""
    for op in ("sum", "max"):
        leaf = torch.full((50,), 2.0, dtype=torch.bfloat16, requires_grad=True)
        saved = (leaf * leaf).sum()
        world.all_reduce(leaf, op)
        saved.backward()
        assert leaf.grad.eq(2.0 * (2.0 * world.size if op == "sum" else 2.0)).all()
