"""complex128 at multiples of 8 bytes, as NumPy places it: torch's own code ends the process there."""

import numpy as np
import pytest
import torch

from commengine import Communicator
from commengine.host.transport import _misaligned
from tests.support.device.device_stand_in import on_device
from tests.support.exact import ALWAYS, NEVER, expected, ops_of, values

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]
DTYPE, BESIDE = torch.complex128, 7


@pytest.fixture(params=["windows", "slots", "MPI", "rank", "tree"])
def comm(mpi_world, request):
    order = request.param if request.param in ("rank", "tree") else None
    points = {"MPI": NEVER, "slots": ALWAYS, "windows": ALWAYS}.get(request.param)
    with Communicator(mpi_world, device="cpu", order=order, switch_points=points) as comm:
        if request.param == "windows":
            comm.empty((1,), torch.uint8)
        yield comm


def misaligned(numel, filled=None):
    """An array of ``numel`` numbers 8 bytes behind a multiple of 16, and the 8 bytes on each side of it."""
    memory = np.full(numel * 2 + 4, BESIDE, np.float64)
    first = 1 + memory.ctypes.data // 8 % 2
    array = memory[first : first + 2 * numel].view(np.complex128)
    assert array.ctypes.data % 16 == 8
    array[:] = 0 if filled is None else filled.numpy()
    return array, memory[first - 1 : first + 2 * numel + 1 : 2 * numel + 1]


@pytest.mark.parametrize("numel", [1, 3, 4099])
def test_reductions(comm, numel):
    n, rank = comm.size, comm.rank
    mine, own = values(DTYPE, numel * n, rank), slice(rank * numel, (rank + 1) * numel)
    for op in ops_of(DTYPE):
        right = expected(DTYPE, numel * n, n, op).numpy()
        output, beside = misaligned(numel * n, mine)
        comm.all_reduce(output, op)
        assert (output == right).all() and (beside == BESIDE).all(), op
        output, beside = misaligned(numel * n, mine)
        comm.reduce(output, n - 1, op)
        assert (output == (right if rank == n - 1 else mine.numpy())).all() and (beside == BESIDE).all(), op
        input, _ = misaligned(numel * n, mine)
        output, beside = misaligned(numel)
        comm.reduce_scatter(output, input, op)
        assert (output == right[own]).all() and (input == mine.numpy()).all() and (beside == BESIDE).all(), op
        comm.reduce_scatter(input[own], input, op)
        assert (input[own] == right[own]).all(), op


def test_one_rank_alone_is_misaligned_beside_a_window(comm):
    """Its other tensor stays in the window: elsewhere the ranks' places would differ."""
    n, rank, numel = comm.size, comm.rank, 4099
    mine, right = values(DTYPE, numel * n, rank), expected(DTYPE, numel * n, n, "sum")
    input, output = comm.empty((numel * n,), DTYPE), comm.empty((numel * n,), DTYPE)
    part, _ = misaligned(numel) if rank == 0 else (np.zeros(numel, np.complex128), None)
    own = slice(rank * numel, (rank + 1) * numel)
    input.copy_(mine)
    comm.reduce_scatter(part, input)
    assert (part == right.numpy()[own]).all()
    comm.all_gather(output, part)
    assert torch.equal(output, right)
    row = comm.empty((numel,), DTYPE)  # at the same place on every rank
    row.copy_(right[own])
    private, _ = misaligned(numel * n) if rank == 0 else (np.zeros(numel * n, np.complex128), None)
    comm.all_gather(private, row)
    assert (private == right.numpy()).all()


def test_a_devices_memory_is_left_to_the_device(mpi_world):
    """The host cannot copy it. A message of an MPI that takes device addresses needs no multiple of 16."""
    array, _ = misaligned(3)
    assert _misaligned(torch.from_numpy(array)) and not _misaligned(on_device(torch.from_numpy(array)))
