"""NCCL's side of every operation, against a stand-in that holds the calls against the real binding's signatures."""

import contextlib
import os
import time

import pytest
import torch

from commengine import CollectiveError
from commengine.device import nccl as device_nccl
from commengine.device.nccl import LAUNCH_ORDER, DeviceTransport, connect
from commengine.dtypes import DTYPES, NCCL_REDUCTIONS, REDUCTIONS, reduction_error
from commengine.errors import TransferError
from tests.commengine.test_communicator_collectives import (  # noqa: F401  run here with the `run` of this file
    given,
    test_all_gather,
    test_all_gather_in_place,
    test_all_to_all,
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
from tests.support.device.nccl_stand_in import NcclError, runtime_stand_in

pytestmark = pytest.mark.mpi(min_size=1)

CUDA = torch.device("cuda", 0)


@contextlib.contextmanager
def connected(mpi_comm, cupy=14, version=23203):
    runtime = runtime_stand_in(cupy, version=version)
    transport = DeviceTransport.open(runtime, mpi_comm, CUDA)
    yield transport
    transport.close()


@pytest.fixture(scope="module", params=[13, 14], ids=["cupy13", "cupy14"])
def transport(request, mpi_world):
    with connected(mpi_world, request.param) as transport:
        yield transport


@pytest.fixture(scope="module")
def run(mpi_world):
    """``run("all_reduce", ...)``: the operation, and all that is enqueued done."""
    with connected(mpi_world) as transport:

        def run(operation, *args):
            reduced = args[-1] in REDUCTIONS if isinstance(args[-1], str) else False
            if reduced and (args[0].dtype, args[-1]) not in NCCL_REDUCTIONS:
                assert args[0].dtype == torch.int16
                pytest.skip("NCCL has no 16-bit integers")
            getattr(transport, operation)(*args)
            transport.synchronize()

        yield run


def test_tensors_that_share_memory_share_it_on_the_device():
    whole = torch.arange(12.0).view(4, 3)
    alone, empty = torch.ones(2), torch.empty(0, 3)
    moved = moved_together([whole, whole[1:3], alone, whole[:, 1], empty], "cpu")
    for here, there in zip([whole, whole[1:3], alone, whole[:, 1], empty], moved, strict=True):
        assert torch.equal(here, there) and here.stride() == there.stride()
    moved[1].zero_()
    assert (moved[0][1:3] == 0).all() and moved[3].tolist() == [1, 0, 0, 10] and whole.sum() == 66


def test_table_of_reductions_has_all_but_int16_and_complex_products():
    every = {(d, op) for d in DTYPES for op in REDUCTIONS if reduction_error(d, op) is None}
    assert every >= {(d, op) for d in DTYPES for op in ("sum", "prod")}
    products = {(torch.complex64, "prod"), (torch.complex128, "prod")}
    assert every - NCCL_REDUCTIONS.keys() == {(torch.int16, op) for op in REDUCTIONS if op != "avg"} | products


def test_nothing_is_done_on_return(transport):
    tensor = torch.ones(4)
    transport.all_reduce(tensor, "sum")
    assert (tensor == 1).all()
    transport.synchronize()
    assert (tensor == transport.size).all()


def test_a_call_runs_after_what_is_on_the_current_stream(transport):
    cuda, side = transport.runtime.cuda, transport.runtime.cuda.Stream()
    tensor, copy = torch.full((5,), float("nan")), torch.empty(5)
    with cuda.stream(side):
        cuda.kernel(lambda: tensor.fill_(transport.rank))
        transport.all_reduce(tensor, "sum")
        cuda.kernel(lambda: copy.copy_(tensor))
    side.synchronize()
    assert (copy == sum(range(transport.size))).all()


def test_calls_of_one_communicator_keep_their_order_on_two_streams(transport):
    cuda, first, second = transport.runtime.cuda, transport.runtime.cuda.Stream(), transport.runtime.cuda.Stream()
    tensor = torch.full((3,), float("nan"))
    with cuda.stream(first):
        cuda.kernel(lambda: tensor.fill_(1.0))
        transport.all_reduce(tensor, "sum")
    with cuda.stream(second):
        transport.all_reduce(tensor, "sum")
    second.synchronize()
    assert (tensor == transport.size**2).all()


def test_synchronize_waits_for_calls_on_the_callers_stream(transport):
    """Although torch's streams differ from None no more than they equal it."""
    stream = transport.runtime.cuda.Stream()
    assert not stream != None and not stream == None  # noqa: E711, SIM201, SIM202
    tensor = torch.ones(3)
    with transport.runtime.cuda.stream(stream):
        transport.all_reduce(tensor, "sum")
    transport.synchronize()
    assert (tensor == transport.size).all() and transport._comm.outstanding == 0


def test_a_graphs_capture_is_refused(transport):
    """The wait for the communicator's last stream would end it, with an error that names no collective."""
    tensor, cuda = torch.ones(3), transport.runtime.cuda
    before = len(transport.runtime.nccl.calls)
    cuda.capturing = True
    try:
        with pytest.raises(TransferError, match="cannot be captured into a CUDA graph"):
            transport.all_reduce(tensor, "sum")
    finally:
        cuda.capturing = False
    assert len(transport.runtime.nccl.calls) == before
    transport.all_reduce(tensor, "sum")
    transport.synchronize()
    assert (tensor == transport.size).all()


@pytest.mark.mpi(min_size=2)
def test_the_first_collective_connects_and_blocks_the_host(mpi_world):
    """As NCCL's does; so whoever measures what runs beside a collective calls one before."""
    with connected(mpi_world) as transport:
        tensor = torch.ones(2)
        mpi_world.Barrier()
        for first in (True, False):
            if transport.rank == 1:
                time.sleep(0.2)
            began = time.monotonic()
            transport.all_reduce(tensor, "sum")
            seconds = time.monotonic() - began
            if transport.rank == 0:
                assert seconds > 0.1 if first else seconds < 0.1
            mpi_world.Barrier()
        transport.synchronize()


@pytest.mark.mpi(min_size=2)
def test_two_communicators_in_flight_are_launched_in_the_hosts_order(mpi_world, monkeypatch):
    """Each rank waits for another one of two communicators first; without an order, they would wait for each other."""
    monkeypatch.setenv(LAUNCH_ORDER, "")
    del os.environ[LAUNCH_ORDER]
    with connected(mpi_world) as first:
        second = first.split(mpi_world, mpi_world, 0, mpi_world.rank, first.runtime.cuda.Stream())
        one, two = torch.ones(3), torch.ones(3)
        first.all_reduce(one, "sum")
        second.all_reduce(two, "sum")
        for transport in (first, second) if mpi_world.rank == 0 else (second, first):
            transport.synchronize()
        assert (one == mpi_world.size).all() and (two == mpi_world.size).all()
        second.close()


@pytest.mark.parametrize(("users", "seen"), [(None, "1"), ("0", "0")])
def test_the_order_of_launches_is_set_before_nccl_starts_unless_the_user_set_it(mpi_world, monkeypatch, users, seen):
    monkeypatch.setenv(LAUNCH_ORDER, users or "")
    if users is None:
        del os.environ[LAUNCH_ORDER]
    with connected(mpi_world) as transport:
        assert os.environ[LAUNCH_ORDER] == seen
        assert transport.runtime.nccl.ordered == (seen == "1")


def test_barrier_is_the_streams(transport):
    transport.barrier()
    transport.barrier()
    assert transport._comm.outstanding == 2
    transport.synchronize()
    assert transport._comm.outstanding == 0


@pytest.mark.every_size
@pytest.mark.parametrize("shape", [(3,), (0,), ()], ids=str)
def test_exchanges_around_the_ring(transport, shape):
    size, rank = transport.size, transport.rank
    right, left = (rank + 1) % size, (rank - 1) % size
    for dtype in (torch.float32, torch.int16, torch.bool):
        received, sent = torch.zeros(shape, dtype=dtype), given(dtype, shape, rank)
        transport.sendrecv(sent, right, received, left)
        transport.synchronize()
        assert torch.equal(received, given(dtype, shape, left))

        received.zero_()
        transport.exchange([("recv", received, right), ("send", sent, left)])
        transport.synchronize()
        assert torch.equal(received, given(dtype, shape, right))


@pytest.mark.mpi(min_size=2)
@pytest.mark.every_size
def test_send_and_recv(transport):
    tensor = given(torch.bfloat16, (7,), transport.rank)
    if transport.rank == 0:
        transport.send(tensor, 1)
    elif transport.rank == 1:
        transport.recv(tensor, 0)
    transport.synchronize()
    assert torch.equal(tensor, given(torch.bfloat16, (7,), 0 if transport.rank < 2 else transport.rank))


@pytest.mark.every_size
def test_a_group_is_one_launch(transport):
    nccl, queue = transport.runtime.nccl, transport.runtime.cuda.current_stream().queue
    tensors = [torch.full((count,), float(transport.rank)) for count in (1, 5, 300)]
    whole, blocks = torch.empty(2 * transport.size), torch.arange(2.0 * transport.size) + transport.rank
    nccl.calls.clear()
    with transport.group():
        for tensor in tensors:
            transport.all_reduce(tensor, "sum")
        transport.all_to_all(whole, blocks)
        assert not queue
    assert len(queue) == 1
    assert nccl.calls[0] == "groupStart" and nccl.calls[-1] == "groupEnd"
    transport.synchronize()
    assert all((tensor == sum(range(transport.size))).all() for tensor in tensors)
    mine = torch.arange(2.0) + 2 * transport.rank
    assert torch.equal(whole, torch.cat([mine + rank for rank in range(transport.size)]))


def test_a_group_that_fails_is_ended(transport):
    nccl = transport.runtime.nccl
    with pytest.raises(ZeroDivisionError), transport.group():
        1 / 0  # noqa: B018
    nccl.fail["allReduce"] = 5
    with pytest.raises(TransferError, match="NCCL: NCCL_ERROR_INVALID_USAGE"), transport.group():
        transport.all_reduce(torch.ones(1), "sum")
    assert nccl.depth == 0


@pytest.mark.parametrize(
    ("status", "message"),
    [(2, "NCCL_ERROR_SYSTEM"), (7, r"NCCL error 7 \(in progress\)"), (8, r"NCCL error 8 \(timeout\)")],
)
def test_every_status_of_nccl_is_an_error_in_words(transport, status, message):
    with pytest.raises((NcclError, KeyError)):
        raise NcclError(status)
    transport.runtime.nccl.fail["reduce"] = status
    with pytest.raises(TransferError, match=message):
        transport.reduce(torch.ones(1), 0, "sum")


def test_failure_is_what_nccl_found_later(transport):
    nccl = transport.runtime.nccl
    assert transport.failure() is None
    nccl.fail["check_async_error"] = 6
    assert transport.failure() == "NCCL_ERROR_REMOTE"
    nccl.fail["check_async_error"] = 7  # in progress: no error
    assert transport.failure() is None


# Life ---------------------------------------------------------------------------------------------------------


@pytest.mark.every_size
@pytest.mark.parametrize(("cupy", "version"), [(13, 23203), (14, 23203), (14, 21700)])
def test_split(mpi_world, cupy, version):
    with connected(mpi_world, cupy, version) as whole:
        outstanding = torch.ones(2)
        whole.all_reduce(outstanding, "sum")
        color = None if whole.rank == 3 else whole.rank % 2
        part = mpi_world.Split(-32766 if color is None else color, -whole.rank)
        mine = whole.split(mpi_world, None if color is None else part, color, -whole.rank)
        assert ("commSplit" in whole.runtime.nccl.calls) == (cupy == 14 and version > 21800)
        whole.synchronize()
        assert (outstanding == whole.size).all()
        if color is None:
            assert mine is None
            return
        assert (mine.rank, mine.size) == (part.rank, part.size)
        tensor = torch.tensor([float(whole.rank)])
        mine.all_reduce(tensor, "sum")
        mine.synchronize()
        assert tensor.item() == sum(part.allgather(whole.rank))
        mine.close()


@pytest.mark.every_size
def test_nccl_is_started_on_the_device_it_is_for(mpi_world):
    runtime = runtime_stand_in(devices=2)
    transport = DeviceTransport.open(runtime, mpi_world, torch.device("cuda", 1))
    assert transport._comm.device == 1 and runtime.cuda.current_device == 0
    tensor = torch.ones(2)
    transport.all_reduce(tensor, "avg")  # a kernel on one rank, too, and NCCL does not set the device there
    transport.barrier()
    transport.close()


def test_close_waits_for_what_is_enqueued(mpi_world):
    tensor = torch.ones(3)
    with connected(mpi_world) as transport:
        comm = transport._comm
        transport.all_reduce(tensor, "sum")
    assert (tensor == mpi_world.size).all() and comm.end == "destroy"
    transport.close()
    transport.abort()
    assert transport.failure() is None and comm.end == "destroy"


def test_what_was_not_closed_is_aborted_by_its_end(mpi_world):
    """CuPy's destructor would be a collective call."""
    transport = DeviceTransport.open(runtime_stand_in(), mpi_world, CUDA)
    comm = transport._comm
    del transport
    assert comm.end == "abort"


def test_what_was_not_closed_waits_for_its_calls_in_flight(mpi_world):
    """Every rank has enqueued them: an abort would leave a wrong result, silently."""
    transport, tensor = DeviceTransport.open(runtime_stand_in(), mpi_world, CUDA), torch.ones(3)
    comm = transport._comm
    transport.all_reduce(tensor, "sum")
    del transport
    assert comm.end == "abort" and (tensor == mpi_world.size).all()


@pytest.mark.parametrize("failed", [False, True])
def test_a_drop_waits_only_so_long_and_not_after_a_failure(mpi_world, monkeypatch, failed):
    monkeypatch.setattr(device_nccl, "DROP_SECONDS", 30.0 if failed else 0.02)
    transport, tensor = DeviceTransport.open(runtime_stand_in(), mpi_world, CUDA), torch.full((3,), 7.0)
    nccl, comm = transport.runtime.nccl, transport._comm
    transport.all_reduce(tensor, "sum")
    if failed:
        nccl.fail["check_async_error"] = 6
    began = time.monotonic()
    del transport
    assert time.monotonic() - began < 5 and comm.end == "abort"
    nccl.cuda.synchronize()
    assert (tensor == 7).all()  # the stand-in's device does nothing before it is asked more often


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("cupy", [13, 14])
def test_a_split_that_fails_on_one_rank_fails_on_all(mpi_world, cupy):
    last = mpi_world.rank == mpi_world.size - 1
    with connected(mpi_world, cupy) as whole:
        nccl = whole.runtime.nccl
        part = mpi_world.Split(mpi_world.rank, 0)  # with CuPy 13 each part connects alone
        if last:
            nccl.fail["commSplit" if cupy == 14 else "get_unique_id"] = 3
        with pytest.raises(CollectiveError, match=rf"^rank {mpi_world.size - 1}: .*NCCL_ERROR_INTERNAL") as error:
            whole.split(mpi_world, part, mpi_world.rank, 0)
        assert len(set(mpi_world.allgather(str(error.value)))) == 1
        assert [made.end for made in nccl.comms[1:]] == ([] if last else ["abort"])
        part.Free()


@pytest.mark.mpi(min_size=2)
def test_an_open_that_fails_on_one_rank_fails_on_all(mpi_world):
    """The device has no byte left on the last rank, after NCCL has connected."""
    runtime = runtime_stand_in()

    def byte(device):
        raise MemoryError("CUDA out of memory")

    if mpi_world.rank == mpi_world.size - 1:
        object.__setattr__(runtime, "byte", byte)
    with pytest.raises(CollectiveError, match=rf"^rank {mpi_world.size - 1}: CUDA out of memory$") as error:
        DeviceTransport.open(runtime, mpi_world, CUDA)
    assert isinstance(error.value.__cause__, MemoryError) == (mpi_world.rank == mpi_world.size - 1)
    assert [made.end for made in runtime.nccl.comms] == ["abort"]


@pytest.mark.every_size
@pytest.mark.parametrize("failing", ["get_unique_id", "NcclCommunicator"])
def test_no_rank_hangs_when_one_cannot_start(mpi_world, failing):
    runtime = runtime_stand_in()
    if mpi_world.rank == 0 or (failing == "NcclCommunicator" and mpi_world.size == 1):
        runtime.nccl.fail[failing] = 1
    elif failing == "NcclCommunicator":
        runtime.nccl.NcclCommunicator = lambda *_: _Lonely(runtime.nccl)  # NCCL would time out by itself
    with pytest.raises(CollectiveError, match=r"rank|NCCL|no unique id") as error:
        connect(runtime, mpi_world, CUDA)
    assert "NCCL_ERROR_UNHANDLED_CUDA" in str(error.value)
    assert len(set(mpi_world.allgather(str(error.value)))) == 1
    assert "abort" in runtime.nccl.calls or failing == "get_unique_id" or mpi_world.rank == 0


class _Lonely:
    def __init__(self, nccl):
        self.nccl = nccl

    def abort(self):
        self.nccl.calls.append("abort")
