"""A schedule over NCCL: the real CuPy and a libnccl of ours on host memory; skipped without them.

Streams run at the same time, as a GPU's do. Autograd computes at once here, so each chunk begins with what its stream
waits for, and a message for which nobody waits is NaN. The libnccl blocks the host until both ranks of a pair
have come to their first message, as NCCL does, and a rank that never comes is an error.
"""

import contextlib

import pytest
import torch

from tests.support.device.device_stand_in import communicator_stand_in, on_device
from tests.support.device.eager_streams import EagerRuns
from tplayers import ModelPart
from trainers.pipeline.messages import StageMessages
from trainers.pipeline.schedule import Schedule

pytestmark = pytest.mark.mpi(min_size=2)

ROWS, WIDTH = 3, 5


def weights(chunks):
    """Of each virtual stage."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) for _ in range(chunks)]


def samples(count):
    generator = torch.Generator().manual_seed(8)
    return [torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(count)]


def whole(parts, batches):
    """Losses and gradients of all chunks, on one rank."""
    parts = [part.clone().requires_grad_() for part in parts]
    losses = []
    for x in batches:
        for part in parts:
            x = torch.tanh(x @ part)
        losses.append(x.square().sum())
        losses[-1].backward()
    return [float(loss) for loss in losses], [part.grad for part in parts]


def eager_pipeline(monkeypatch, mpi_world):
    """A communicator of stand-ins, and its runtime."""
    # With an order of launches NCCL lets them overlap from CUDA 12.3 on. The libnccl runs them one after the other.
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "0")
    pipeline, runtime = communicator_stand_in(monkeypatch, mpi_world)
    EagerRuns(runtime.cuda)
    return pipeline, runtime


@pytest.fixture(autouse=True)
def sent(monkeypatch):
    """What is sent is the device's. A stand-in needs their memory to the end, and a GPU's allocator does not."""
    kept, send = [], StageMessages._send

    def send_kept(self, tensor, *to):
        kept.append(tensor)
        send(self, on_device(tensor), *to)

    monkeypatch.setattr(StageMessages, "_send", send_kept)
    return kept


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("count", [4, 5])
def test_losses_and_gradients_are_those_of_one_rank(mpi_world, monkeypatch, chunks, count):
    pipeline, runtime = eager_pipeline(monkeypatch, mpi_world)
    stages, here = pipeline.size, runtime.cuda
    part = ModelPart(stages * chunks, tuple(range(at, at + 1) for at in range(pipeline.rank, stages * chunks, stages)))
    values, batches = weights(stages * chunks), samples(count)
    mine = [values[chunk.start].clone().requires_grad_() for chunk in part.chunks]
    schedule = Schedule(pipeline, part)
    losses, passes = {}, []

    def ready():
        """What a chunk's kernels would wait for; the first ones are loaded, for which CUDA may wait for all streams."""
        if len(passes) == 1:
            here.synchronize()
        else:
            here.current_stream().synchronize()

    def forward(number, at):
        ready()
        x = batches[number] if at.received is None else at.received.as_subclass(torch.Tensor)
        result = torch.tanh(x @ mine[at.chunk])
        if part.ends(at):
            result = result.square().sum()
            losses[number] = result.item()
        result.register_hook(lambda gradient: ready() or gradient.clone())
        return result

    def like(_):
        return on_device(torch.full((ROWS, WIDTH), torch.nan, dtype=torch.float64))

    expected, gradients = whole(values, batches)
    with pipeline:
        for number in range(3):
            passes.append(number)
            for value in mine:
                value.grad = None
            losses.clear()
            schedule.run(count, forward, like, lambda chunk: contextlib.nullcontext())
            here.synchronize()
            assert [losses[number] for number in sorted(losses)] == (pytest.approx(expected) if part.last else [])
            for chunk, value in zip(part.chunks, mine, strict=True):
                torch.testing.assert_close(value.grad, gradients[chunk.start])
