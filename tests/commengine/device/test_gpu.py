"""Device tensors for real, on as many ranks as NCCL allows: RANKS="1 2" tests/run -m "gpu and mpi".

On one GPU, ranks share it where NCCL is 2.30 or newer and NCCL_MULTI_RANK_GPU_ENABLE=1.
"""

import pytest
import torch

from commengine import CollectiveError, Communicator, trace
from commengine.device.stream import DeviceStream
from tests.commengine.test_communicator_collectives import (  # noqa: F401  run here with the `run` of this file
    test_all_gather,
    test_all_gather_in_place,
    test_all_reduce,
    test_all_to_all,
    test_broadcast,
    test_gather,
    test_reduce,
    test_reduce_scatter,
    test_scatter,
)

if not torch.cuda.is_available():
    pytest.skip("no CUDA device, or not asked for with -m gpu", allow_module_level=True)

pytestmark = [pytest.mark.gpu, pytest.mark.mpi(min_size=1)]

SLEEP_CYCLES = 400_000_000  # some 0.2 s


def opened(mpi_world, transport):
    try:
        return Communicator(mpi_world, device="cuda", transport=transport)
    except CollectiveError as error:
        if "needs one for each rank" in str(error) or "does not say that it takes device" in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="module", params=["nccl", "nccl stream", "staged", "staged stream", "mpi"])
def run(request, mpi_world):
    """``run("all_reduce", ...)``: the operation on copies on the device, copied back into the arguments."""
    with opened(mpi_world, request.param.split()[0]) as comm:
        lane = comm.new_stream() if request.param.endswith("stream") else None

        def run(operation, *args):
            if "reduce" in operation and args[0].dtype == torch.int16 and comm._backend.refusal(torch.int16, "sum"):
                pytest.skip("NCCL has no 16-bit integers")
            moved = [arg.to(comm.device) if isinstance(arg, torch.Tensor) else arg for arg in args]
            getattr(comm, operation)(*moved, stream=lane).wait()
            for arg, there in zip(args, moved, strict=True):
                if isinstance(arg, torch.Tensor):
                    arg.copy_(there.cpu())

        yield run


@pytest.fixture(scope="module")
def comm(mpi_world):
    with opened(mpi_world, "nccl") as comm:
        yield comm


def test_stream_waits_for_the_producer_and_the_consumer_for_the_stream(comm):
    stream = comm.new_stream()
    assert isinstance(stream, DeviceStream)
    tensor = torch.full((1 << 20,), float("nan"), device=comm.device)
    torch.cuda._sleep(SLEEP_CYCLES)
    tensor.fill_(comm.rank + 1)
    work = comm.all_reduce(tensor, stream=stream)
    assert not work.done()  # the device sleeps, the host does not
    work.wait()
    assert not work.done()
    result = tensor.clone()
    del tensor
    torch.full((1 << 20,), float("nan"), device=comm.device)  # where the tensor was
    assert (result == sum(range(1, comm.size + 1))).all()
    assert work.done()


def test_memory_in_flight_is_nobody_elses(comm):
    stream = comm.new_stream()
    for _ in range(20):
        tensor = torch.ones(1 << 18, device=comm.device)
        with torch.cuda.stream(stream.cuda_stream):
            torch.cuda._sleep(SLEEP_CYCLES // 100)
        work = comm.all_reduce(tensor, stream=stream)
        poison = [torch.full((1 << 18,), float("nan"), device=comm.device) for _ in range(4)]
        work.wait()
        assert (tensor == comm.size).all()
        del poison


def test_coalesced_calls(comm):
    tensors = [torch.full((count,), float(comm.rank), device=comm.device) for count in (1, 7, 100_000)]
    received = torch.empty(5, device=comm.device)
    sent = torch.full((5,), float(comm.rank), device=comm.device)
    with comm.coalesce():
        for tensor in tensors:
            comm.all_reduce(tensor)
        comm.sendrecv(sent, (comm.rank + 1) % comm.size, received, (comm.rank - 1) % comm.size)
    assert all((tensor == sum(range(comm.size))).all() for tensor in tensors)
    assert (received == (comm.rank - 1) % comm.size).all()


@pytest.mark.mpi(min_size=2)
def test_split(comm):
    with comm.split(comm.rank % 2) as part:
        tensor = torch.ones(3, device=part.device)
        part.all_reduce(tensor)
        assert (tensor == part.size).all()


def test_trace_times_are_the_hosts_seconds(comm):
    stream = comm.new_stream()
    tensor = torch.ones(1 << 22, device=comm.device)
    with trace(comm) as log:
        work = comm.all_reduce(tensor, stream=stream)
        torch.cuda._sleep(SLEEP_CYCLES)
        work.wait()
    (event,) = log.events
    assert event.enqueue - 1e-3 < event.start <= event.end <= event.wait_start + 1e-3
    assert event.hidden_seconds == pytest.approx(event.seconds, abs=1e-4)


def test_numpy_and_torch_find_the_same_nccl(comm):
    from commengine.device.choice import loaded_nccl

    assert len(loaded_nccl()) == 1
