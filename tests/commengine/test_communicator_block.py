"""The communicators of a group's blocks: who is in them, when they close, and that a trace has them."""

import numpy as np
import pytest
import torch

from commengine import CollectiveError, Communicator, trace

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]


def test_a_trace_of_a_group_has_its_blocks(world):
    size = next(n for n in (2, 3, 1) if world.size % n == 0)
    block = world.block(size)
    assert world.block(size) is block and world.blocks == (block,)
    assert (block.size, block.rank, block.name) == (size, world.rank % size, f"{world.name}/block{size}")
    with trace(world) as log:
        x = torch.tensor([float(world.rank)])
        block.all_reduce(x)
    first = world.rank - world.rank % size
    assert x.item() == sum(range(first, first + size))
    assert [(event.group, event.operation) for event in log.events] == [(block.name, "all_reduce")]
    said = rf"block: size={world.size + 1} must be an integer that divides the group's size {world.size}"
    with pytest.raises(CollectiveError, match=said):
        world.block(world.size + 1)


def test_a_trace_has_the_blocks_that_are_made_inside(mpi_world):
    with Communicator(mpi_world) as comm, trace(comm) as log:
        with log.paused():
            first = comm.block(1)
        first.all_reduce(torch.ones(1))
        second = comm.block(comm.size)
        second.barrier()
        second.block(1).barrier()
        names = [first.name, *[second.name] * (comm.size > 1), f"{second.name}/block1"]
        if comm.size > 1:  # otherwise both blocks are one
            assert [event.group for event in log.events] == names
        assert set(log.groups()) >= set(names)


def test_blocks_close_with_their_group(mpi_world):
    with Communicator(mpi_world) as comm:
        block = comm.block(1)
        block.all_reduce(torch.ones(1))
    with pytest.raises(CollectiveError, match="closed"):
        block.all_reduce(torch.ones(1))


def test_an_integer_of_any_type_is_the_size(mpi_world):
    with Communicator(mpi_world) as comm:
        assert comm.block(np.int64(comm.size) if comm.rank == 0 else comm.size).size == comm.size
