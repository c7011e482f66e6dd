"""A slow link delays what it carries, by its rate, and changes nothing else."""

import time
from types import SimpleNamespace

import pytest

RATE = 20e6  # bytes a second
ELEMENTS = 250_000  # a megabyte of fp32: 50 ms


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_collective_takes_at_least_its_bytes_over_the_rate(streamed, mpi_world):
    import torch

    from bench.timing.slow_link import slow_down
    from commengine import Communicator

    with Communicator(mpi_world) as world:
        stream = world.new_stream() if streamed else None
        tensor = torch.full((ELEMENTS,), float(world.rank))
        slow_down(world, RATE)
        start = time.perf_counter()
        work = world.all_reduce(tensor, stream=stream)
        enqueued = time.perf_counter() - start
        work.wait()
        spent = time.perf_counter() - start
        assert spent >= 4 * ELEMENTS / RATE
        assert not streamed or enqueued < spent
        assert torch.equal(tensor, torch.full((ELEMENTS,), float(sum(range(world.size)))))
        # Of the larger of two tensors all but this rank's part counts, and the order of calls is kept.
        whole, part = torch.zeros(world.size * 1000), torch.arange(1000.0) + world.rank
        start = time.perf_counter()
        world.all_gather(whole, part, stream=stream).wait()
        assert time.perf_counter() - start >= (whole.nbytes - part.nbytes) / RATE
        assert torch.equal(whole, torch.cat([torch.arange(1000.0) + rank for rank in range(world.size)]))


def test_only_calls_with_tensors_wait_and_attributes_pass():
    import torch

    from bench.timing.slow_link import SlowLink
    from commengine.operations.operation import Touched

    class Routes:
        name = "host"

        def prepared(self, operation, args):
            return (lambda output, source: output.copy_(source)) if args else lambda: None

    slow = SlowLink(Routes(), 1e6)
    output = torch.zeros(10_000)
    start = time.perf_counter()
    message = SimpleNamespace(
        name="send", pairwise=True, touched=lambda args: [Touched(args[1], True, False), Touched(args[0], False, True)]
    )
    slow.run(message, (output, torch.ones(10_000)))
    assert time.perf_counter() - start >= 0.04
    assert torch.equal(output, torch.ones(10_000)) and slow.name == "host"
    start = time.process_time()
    slow.run(message, (output, torch.zeros(10_000)))
    assert time.process_time() - start < 0.03  # it sleeps: the core is free for compute
