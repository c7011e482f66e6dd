"""Two trainings at once on disjoint groups, while the program around them communicates on the world of both."""

import numpy as np
import pytest
import torch
from torch.nn.functional import conv1d

from commengine import CartesianGrid, Communicator
from tests.support.adjoints import random
from tplayers.movement.halo import plan_halo
from tplayers.movement.transfer import start_transfer


class Training:
    """Fits the three weights of a periodic convolution, on a field that the ranks of ``comm`` hold in uneven blocks.

    The same steps on the whole field, without communication, say what the weights must be.
    """

    def __init__(self, comm, points, seed):
        self.comm, self.stream = comm, comm.new_stream()
        self.grid = CartesianGrid(comm, (comm.size,), periodic=True)
        self.blocks = self.grid.decompose((points,))
        self.mine, self.plan = self.blocks.slices(self.grid.coords)[0], plan_halo(self.grid, self.blocks, 1)
        self.field, self.target = random((4, 1, points), torch.float64, seed), random((4, 1, points), torch.float64, 9)
        self.weights = torch.zeros(1, 1, 3, dtype=torch.float64, requires_grad=True)
        self.expected = torch.zeros(1, 1, 3, dtype=torch.float64, requires_grad=True)

    def step(self):
        started = start_transfer(self.field[..., self.mine], self.plan, self.comm, self.stream)
        self.weights.grad = None
        error = conv1d(started.wait(), self.weights) - self.target[..., self.mine]
        (error.square().sum() / self.field.numel()).backward()
        self.comm.all_reduce(self.weights.grad, stream=self.stream).wait()
        ends = self.field[..., -1:], self.field, self.field[..., :1]
        (conv1d(torch.cat(ends, -1), self.expected) - self.target).square().mean().backward()
        for weights in (self.weights, self.expected):
            weights.data -= 0.05 * weights.grad
        self.expected.grad = None
        torch.testing.assert_close(self.weights, self.expected, rtol=1e-11, atol=1e-13)


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("rounds", [50, pytest.param(1000, marks=pytest.mark.long)])
def test_no_message_is_taken_by_another(mpi_world, rounds):
    """The solver's receives are open while the trainings communicate, and take any tag; half of its sends come later.

    The groups take different numbers of steps in a round, on fields of different sizes.
    """
    from mpi4py import MPI

    rank, peers = mpi_world.rank, [peer for peer in range(mpi_world.size) if peer != mpi_world.rank]
    part = mpi_world.Split(rank // 2)
    checked = 0
    with Communicator(part, device="cpu") as comm:
        training = Training(comm, 31 if rank < 2 else 17, seed=rank // 2)
        for number in range(rounds):
            size = 20_000 if number % 50 == 0 else 4  # some are too long for MPI to send before the receiver is there
            sent = np.full(size, number * 10 + rank, dtype=np.float64)
            received = [np.full(size, np.nan) for _ in peers]
            total = np.array([number + rank], dtype=np.int64)
            requests = [
                mpi_world.Irecv(buffer, peer, MPI.ANY_TAG) for buffer, peer in zip(received, peers, strict=True)
            ]
            requests.append(mpi_world.Iallreduce(MPI.IN_PLACE, total))
            sending = [mpi_world.Isend(sent, peer, tag=0) for peer in peers if (peer + number) % 2]
            training.step()
            sending += [mpi_world.Isend(sent, peer, tag=number % 7) for peer in peers if not (peer + number) % 2]
            if rank >= 2:
                training.step()
            MPI.Request.Waitall(requests + sending)
            for buffer, peer in zip(received, peers, strict=True):
                assert (buffer == number * 10 + peer).all(), (number, peer)
                checked += 1
            assert total[0] == mpi_world.size * number + sum(range(mpi_world.size))
        assert not comm.mpi.Iprobe() and not mpi_world.Iprobe()
    part.Free()
    assert checked == rounds * len(peers)
    assert training.weights.abs().max() > 1e-3  # it has learnt something
