"""Device tensors for real, on as many ranks as NCCL allows: RANKS="1 2" tests/run -m "gpu and mpi".

On one GPU, ranks share it where NCCL is 2.30 or newer and NCCL_MULTI_RANK_GPU_ENABLE=1. On one rank NCCL enqueues
nothing for a sum, product, minimum or maximum in place. So the tests of streams use averages, for which it launches a
kernel, and operations from one tensor to another, for which it copies.
"""

import pytest
import torch

from commengine import CollectiveError, Communicator, trace
from commengine.device.stream import DeviceStream
from commengine.errors import TransferError
from tests.commengine.test_communicator_collectives import (  # noqa: F401  run here with the `run` of this file
    test_all_gather,
    test_all_gather_in_place,
    test_all_gather_v,
    test_all_to_all,
    test_all_to_all_v,
    test_broadcast,
    test_gather,
    test_scatter,
)
from tests.support.device.exact_reductions import (  # noqa: F401  likewise
    test_all_reduce,
    test_reduce,
    test_reduce_scatter,
)
from tests.support.device.moving import moved_together

if not torch.cuda.is_available():
    pytest.skip("no CUDA device, or not asked for with -m gpu", allow_module_level=True)

pytestmark = [pytest.mark.gpu, pytest.mark.mpi(min_size=1), pytest.mark.every_size]

SLEEP_CYCLES = 400_000_000  # some 0.2 s


def opened(mpi_world, transport):
    try:
        return Communicator(mpi_world, device="cuda", transport=transport)
    except CollectiveError as error:
        if "needs one for each rank" in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="module", params=["nccl", "nccl stream", "staged", "staged stream"])
def run(request, mpi_world):
    """``run("all_reduce", ...)``: the operation on copies on the device, copied back into the arguments."""
    with opened(mpi_world, request.param.split()[0]) as comm:
        lane = comm.new_stream() if request.param.endswith("stream") else None

        def run(operation, *args):
            if "reduce" in operation and args[0].dtype == torch.int16 and comm._backend.refusal(torch.int16, "sum"):
                pytest.skip("NCCL has no 16-bit integers")
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            moved = moved_together(tensors, comm.device)
            there = iter(moved)
            call = [next(there) if isinstance(arg, torch.Tensor) else arg for arg in args]
            getattr(comm, operation)(*call, stream=lane).wait()
            for tensor, result in zip(tensors, moved, strict=True):
                tensor.copy_(result.cpu())

        yield run


@pytest.fixture(scope="module")
def comm(mpi_world):
    with opened(mpi_world, "nccl") as comm:
        yield comm


def connected_stream(comm):
    """A stream whose ranks have connected: the first collective blocks the host until they have."""
    stream = comm.new_stream()
    tensor, gathered = torch.ones(1 << 20, device=comm.device), torch.empty(comm.size << 20, device=comm.device)
    comm.all_reduce(tensor, "avg", stream=stream)
    comm.all_gather(gathered, tensor, stream=stream)
    stream.synchronize()
    return stream


def test_stream_waits_for_the_producer_and_the_consumer_for_the_stream(comm):
    stream = connected_stream(comm)
    assert isinstance(stream, DeviceStream)
    tensor = torch.full((1 << 20,), float("nan"), device=comm.device)
    gathered = torch.full((comm.size << 20,), float("nan"), device=comm.device)
    torch.cuda._sleep(SLEEP_CYCLES)
    tensor.fill_(2 * comm.rank + 2)
    work = comm.all_gather(gathered, tensor, stream=stream)
    reduced = comm.all_reduce(tensor, "avg", stream=stream)
    assert not work.done() and not reduced.done()  # the device sleeps, the host does not
    work.wait()
    reduced.wait()
    assert not work.done() and not reduced.done()
    result, rows = tensor.clone(), gathered.view(comm.size, -1).clone()
    del tensor, gathered
    torch.full((comm.size << 20,), float("nan"), device=comm.device)  # where the tensors were
    bound = 0 if comm.size & (comm.size - 1) == 0 else (comm.size + 1) * torch.finfo(torch.float32).eps * comm.size * 2
    assert ((result - (comm.size + 1)).abs() <= bound).all()
    assert all((row == 2 * rank + 2).all() for rank, row in enumerate(rows))
    assert work.done() and reduced.done()


def test_memory_in_flight_is_nobody_elses(comm):
    stream = connected_stream(comm)
    for _ in range(20):
        gathered = torch.empty(comm.size << 18, device=comm.device)
        with torch.cuda.stream(stream.cuda_stream):
            torch.cuda._sleep(SLEEP_CYCLES // 100)
        work = comm.all_gather(gathered, torch.ones(1 << 18, device=comm.device), stream=stream)
        poison = [torch.full((1 << 18,), float("nan"), device=comm.device) for _ in range(4)]
        work.wait()
        assert (gathered == 1).all()
        del poison


def test_coalesced_calls(comm):
    tensors = [torch.full((count,), float(comm.rank), device=comm.device) for count in (1, 7, 100_000)]
    received = torch.empty(5, device=comm.device)
    sent = torch.full((5,), float(comm.rank), device=comm.device)
    gathered = torch.full((comm.size, 5), float("nan"), device=comm.device).flatten()
    with comm.coalesce():
        for tensor in tensors:
            comm.all_reduce(tensor)
        comm.all_gather(gathered, sent)
        comm.sendrecv(sent, (comm.rank + 1) % comm.size, received, (comm.rank - 1) % comm.size)
    assert all((tensor == sum(range(comm.size))).all() for tensor in tensors)
    assert (received == (comm.rank - 1) % comm.size).all()
    assert torch.equal(gathered.cpu(), torch.arange(comm.size).repeat_interleave(5).float())


@pytest.mark.parametrize("transport", ["nccl", "staged"])
def test_rows_whose_numbers_the_receiver_does_not_know(mpi_world, transport):
    """Other numbers at each call, of bits that tell the sender; counts travel by way of the host."""
    with opened(mpi_world, transport) as comm:
        for turn in range(5):
            counts = [[(turn + 2 * rank + 3 * to) % 5 for to in range(comm.size)] for rank in range(comm.size)]
            mine = torch.cat(
                [torch.full((count, 3), 10.0 * comm.rank + to) for to, count in enumerate(counts[comm.rank])]
            )
            received = torch.full((5 * comm.size, 3), -1.0, device=comm.device)
            come = comm.exchange_rows(received, mine.to(comm.device), counts[comm.rank])
            assert come == [of[comm.rank] for of in counts]
            parts = [torch.full((count, 3), 10.0 * rank + comm.rank) for rank, count in enumerate(come)]
            assert torch.equal(received[: sum(come)].cpu(), torch.cat(parts)) and (received[sum(come) :] == -1).all()


@pytest.mark.mpi(min_size=2)
def test_messages_on_streams_arrive_in_order(comm):
    """A pipeline's messages: both directions at the same time, and the next ones before the first have arrived."""
    there, back = connected_stream(comm), connected_stream(comm)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    works, found = [], []
    for number in range(6):
        sent = torch.full((1 << 16,), float(10 * comm.rank + number), device=comm.device)
        for stream, to, of in ((there, after, before), (back, before, after)):
            received = torch.full_like(sent, float("nan"))
            works.append(comm.sendrecv(sent, to, received, of, stream=stream))
            found.append((received, 10.0 * of + number))
    for work in works:
        work.wait()
    assert all((received == value).all() for received, value in found)


@pytest.mark.mpi(min_size=2)
def test_split(comm):
    with comm.split(comm.rank % 2) as part:
        tensor = torch.ones(3, device=part.device)
        part.all_reduce(tensor)
        assert (tensor == part.size).all()


def test_trace_times_are_the_hosts_seconds(comm):
    stream = connected_stream(comm)
    tensor = torch.ones(1 << 22, device=comm.device)
    with trace(comm) as log:
        work = comm.all_reduce(tensor, "avg", stream=stream)
        torch.cuda._sleep(SLEEP_CYCLES)
        work.wait()
    (event,) = log.events
    assert event.enqueue - 1e-3 < event.start <= event.end <= event.wait_start + 1e-3
    assert event.hidden_seconds == pytest.approx(event.seconds, abs=1e-4)


def test_synchronize_waits_for_the_device(comm):
    tensor, gathered = torch.ones(1 << 20, device=comm.device), torch.zeros(comm.size << 20, device=comm.device)
    comm.all_gather(gathered, tensor)
    torch.cuda.synchronize(comm.device)
    torch.cuda._sleep(SLEEP_CYCLES)
    comm.all_gather(gathered, tensor)
    event = torch.cuda.current_stream(comm.device).record_event()
    assert not event.query()
    comm._backend.transport.synchronize()
    assert event.query()


def test_a_graphs_capture_is_refused(comm):
    tensor, graph = torch.ones(3, device=comm.device), torch.cuda.CUDAGraph()
    comm.all_reduce(tensor, "avg")
    torch.cuda.synchronize(comm.device)
    with torch.cuda.graph(graph), pytest.raises(CollectiveError, match="cannot be captured into a CUDA graph"):
        comm.all_reduce(tensor, "avg")
    comm.all_reduce(tensor, "avg")
    assert (tensor - 1).abs().max() < 1e-5


def test_an_error_has_nccls_own_words(comm):
    """NCCL refuses a code that is no data type. CuPy alone would say "invalid argument"."""
    tensor = torch.ones(3, device=comm.device)
    with pytest.raises(TransferError, match=r"\(.*99\)"):
        comm._backend.transport.enqueue("allReduce", tensor.data_ptr(), tensor.data_ptr(), 3, 99, 0)


def test_numpy_and_torch_find_the_same_nccl(comm):
    from commengine.device.choice import loaded_nccl

    assert len(loaded_nccl()) == 1
