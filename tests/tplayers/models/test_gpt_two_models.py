"""Two Communicators on disjoint halves of the world train two different models at the same time."""

import pytest
import torch
from torch import nn

import tplayers
from commengine import Communicator
from tplayers import GPT, GPTConfig, Randomness

STEPS = 4


def gpt(comm):
    config = GPTConfig(2, 8, 4, 13, 8, hidden_dropout=0.1, attention_dropout=0.1, make_vocab_size_divisible_by=16)
    model = GPT(config, comm)
    tplayers.initialize(model, 11)
    tokens = torch.randint(13, (STEPS, 2, 7), generator=torch.Generator().manual_seed(1))
    return model, lambda step: model(tokens[step, :, :-1], tokens[step, :, 1:], Randomness(3, step, (0, 1)))


def regression(comm):
    """Of other layers and sizes, with other collectives in each step, so that the halves never run alike."""
    model = nn.Sequential(tplayers.ColumnParallelLinear(6, 8, comm), nn.Tanh(), tplayers.RowParallelLinear(8, 4, comm))
    tplayers.initialize(model, 12)
    data = torch.randn(STEPS, 5, 6, generator=torch.Generator().manual_seed(2))
    return model, lambda step: (model(data[step]) - data[step, :, :4]).square()


def trained(make, comm, rate):
    """The losses of a few steps of SGD."""
    model, losses_of = make(comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = losses_of(step).mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.mpi(min_size=2)
@pytest.mark.every_size
def test_two_models_at_once(mpi_world):
    """Only the last line of the test looks across the halves: neither waits for the other while it trains."""
    from mpi4py import MPI

    second = mpi_world.rank >= mpi_world.size // 2
    half = mpi_world.Split(int(second), mpi_world.rank)
    make, rate = (regression, 0.3) if second else (gpt, 0.5)
    with Communicator(half, name="half") as comm:
        assert comm.size == (mpi_world.size // 2 if not second else mpi_world.size - mpi_world.size // 2)
        losses = trained(make, comm, rate)
    half.Free()
    with Communicator(MPI.COMM_SELF) as alone:
        expected = trained(make, alone, rate)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    assert losses[-1] != losses[0]
    everything = mpi_world.allgather(losses)
    assert everything[0] != everything[-1]


@pytest.mark.mpi(min_size=2)
def test_two_models_of_one_process_on_two_communicators(mpi_world):
    """Both on the whole world, their steps interleaved: no state is shared between them."""
    from mpi4py import MPI

    with Communicator(mpi_world) as one, Communicator(mpi_world) as two, Communicator(MPI.COMM_SELF) as alone:
        (a, a_losses), (b, b_losses) = gpt(one), regression(two)
        (c, c_losses), (d, d_losses) = gpt(alone), regression(alone)
        for step in range(STEPS):
            first, second = a_losses(step).mean(), b_losses(step).mean()
            torch.testing.assert_close(first, c_losses(step).mean(), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(second, d_losses(step).mean(), rtol=1e-5, atol=1e-5)
            (second + first).backward()
            (c_losses(step).mean() + d_losses(step).mean()).backward()
            with torch.no_grad():
                for parameter in (p for model in (a, b, c, d) for p in model.parameters()):
                    parameter -= 0.3 * parameter.grad
                    parameter.grad = None
