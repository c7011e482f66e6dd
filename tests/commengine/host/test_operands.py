"""Where operands lie: by the table of switch points, and not in groups that span nodes or have one rank."""

import pytest
import torch

from commengine import CollectiveError, Communicator
from commengine.host.operands import Operands
from commengine.host.switch_points import Key, Point, SwitchPoints
from commengine.shared_memory.windows import SharedTensors

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.every_size]

POINTS = SwitchPoints({
    Key("all_reduce", "full", 2): Point(window=1 << 12, bounce=1 << 13),
    Key("all_reduce", "half", 2): Point(window=1 << 11),
    Key("all_gather", "full", 2): Point(),
})  # fmt: skip


def test_from_the_size_at_which_windows_are_faster(mpi_world):
    with Communicator(mpi_world, switch_points=POINTS) as comm:
        for dtype, elements in ((torch.float32, 1 << 10), (torch.bfloat16, 1 << 10)):
            for shape, shared in (((elements - 1,), False), ((elements,), True), ((2, elements // 2), True)):
                made = comm.operand("all_reduce", shape, dtype)
                assert made.shape == shape and made.dtype == dtype and made.is_contiguous()
                assert comm._shared.reaches(made) == (shared and comm.size > 1)
        assert not comm._shared.reaches(comm.operand("all_gather", (1 << 20,)))
        assert comm.operand("all_reduce", (0, 4)).shape == (0, 4)
        assert comm.operand("all_reduce", ()).shape == ()
        del made


def test_a_part_of_a_group_has_a_pool_of_its_own(mpi_world):
    with (
        Communicator(mpi_world, switch_points=POINTS, operand_bytes=1 << 16) as comm,
        comm.split(0, name="part") as part,
    ):
        first = part.operand("all_reduce", (1 << 12,)).fill_(1.0)
        second = part.operand("all_reduce", (1 << 13,)).fill_(1.0)  # 16 KB and 32 KB of 64 KB
        third = part.operand("all_reduce", (1 << 13,)).fill_(1.0)
        shared = comm.size > 1
        assert [part._shared.reaches(one) for one in (first, second, third)] == [shared, shared, False]
        assert not comm._shared.reaches(first)
        for one in (first, second, third):
            part.all_reduce(one)
            assert one.eq(part.size).all()
        del first, second, third, one


def test_a_result_may_be_changed_in_place_by_autograd(mpi_world):
    """It is no view: autograd refuses to change a view that a Function has returned."""
    with Communicator(mpi_world, switch_points=POINTS) as comm:
        made = comm.operand("all_reduce", (4, 1 << 10))
        assert made._base is None
        del made


@pytest.mark.parametrize("limit", [-1, 1.5, None, "1"])
def test_a_limit_that_is_no_number_of_bytes_is_an_error_on_all_ranks(mpi_world, limit):
    for given in (limit, limit if mpi_world.rank == mpi_world.size - 1 else 5):
        with pytest.raises(CollectiveError, match=r"operand_bytes=.* must be a number of bytes, 0 or more"):
            Communicator(mpi_world, operand_bytes=given)


def test_the_pool_is_made_once(mpi_world):
    with Communicator(mpi_world, switch_points=POINTS) as comm:
        shared = SharedTensors(comm.mpi, comm.name)
        operands = Operands(shared, POINTS, 1 << 20)
        assert operands.look_up("all_reduce", torch.float32) == (1 << 12 if comm.size > 1 else float("inf"))
        operands.open()
        pool = shared.pool
        operands.open()
        assert operands.opened and shared.pool is pool and (pool is not None) == (comm.size > 1)
        shared.close()
