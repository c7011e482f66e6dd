"""NCCL's side of every operation, by the real CuPy over a libnccl of ours on host memory."""

import contextlib
import os
import time
from types import SimpleNamespace

import pytest
import torch

from commengine import CollectiveError
from commengine.device import nccl as device_nccl
from commengine.device.backends import NcclBackend
from commengine.device.nccl import LAUNCH_ORDER, connect
from commengine.dtypes import DTYPES, NCCL_REDUCTIONS, REDUCTIONS, reduction_error
from commengine.errors import TransferError
from commengine.operations.all_reduce import ALL_REDUCE
from commengine.operations.messages import RECV, SEND
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
from tests.support.device.nccl.library import cupy_runtime
from tests.support.device.routed import CallsOnNccl

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.every_size]

CUDA = torch.device("cuda", 0)

#: of NCCL: before the order of launches (2.26), and the newest
VERSIONS = (21000, 21700, 22105, 22203, 22304, 22403, 22501, 22602, 22707, 22809, 22907, 23007, 23203)


@contextlib.contextmanager
def connected(mpi_comm, version=23203):
    runtime = cupy_runtime(version=version)
    transport = CallsOnNccl.open(runtime, mpi_comm, CUDA)
    yield transport
    transport.close()


@pytest.fixture
def transport(mpi_world):
    with connected(mpi_world) as transport:
        yield transport


def made(transport):
    """The first NCCL communicator that was made for it, as the library has it."""
    return transport.runtime.library.comms[0]


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


@pytest.mark.parametrize("version", VERSIONS)
def test_calls_of_one_communicator_keep_their_order_on_two_streams(mpi_world, version):
    with connected(mpi_world, version) as transport:
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
    assert (tensor == transport.size).all() and made(transport).outstanding == 0


def test_a_graphs_capture_is_refused(transport):
    """The wait for the communicator's last stream would end it, with an error that names no collective."""
    tensor, cuda = torch.ones(3), transport.runtime.cuda
    before = transport.runtime.library.calls
    cuda.capturing = True
    try:
        with pytest.raises(TransferError, match="cannot be captured into a CUDA graph"):
            transport.all_reduce(tensor, "sum")
    finally:
        cuda.capturing = False
    assert transport.runtime.library.calls == before
    transport.all_reduce(tensor, "sum")
    transport.synchronize()
    assert (tensor == transport.size).all()


def test_a_stream_that_returns_waits_for_the_one_between(transport):
    cuda, tensor = transport.runtime.cuda, torch.ones(3)
    streams = [cuda.Stream(), cuda.Stream()]
    for index in (0, 1, 0, 0, 1, 1):
        with cuda.stream(streams[index]):
            transport.all_reduce(tensor, "avg")
            cuda.kernel(lambda: tensor.mul_(3).add_(1))
    streams[1].synchronize()
    assert (tensor == 3**6 + (3**6 - 1) // 2).all()


def test_a_call_on_the_last_calls_stream_makes_no_object_for_it(transport, monkeypatch):
    tensor = torch.ones(3)
    transport.all_reduce(tensor, "sum")
    monkeypatch.setattr(transport.runtime.cuda, "current_stream", None)
    transport.all_reduce(tensor, "sum")
    monkeypatch.undo()
    transport.synchronize()
    assert (tensor == transport.size**2).all()


@pytest.mark.mpi(min_size=2)
def test_the_first_collective_connects_and_blocks_the_host(mpi_world):
    """As NCCL's does; so whoever measures what runs beside a collective calls one before."""
    with connected(mpi_world) as transport:
        tensor = torch.ones(2)
        mpi_world.Barrier()
        for first in (True, False):
            if transport.rank == 1:
                time.sleep(0.2) if first else mpi_world.recv(source=0)
            began = time.monotonic()
            transport.all_reduce(tensor, "sum")
            if transport.rank == 0:
                # The second time rank 1 waits for this word before its own call: a call that blocked would hang.
                assert time.monotonic() - began > 0.1 if first else mpi_world.send(None, 1) is None
            mpi_world.Barrier()
        transport.synchronize()


@pytest.mark.mpi(min_size=2)
def test_two_communicators_in_flight_are_launched_in_the_hosts_order(mpi_world, monkeypatch):
    """Each rank waits for another one of two communicators first; without an order, they would wait for each other."""
    monkeypatch.setenv(LAUNCH_ORDER, "")
    del os.environ[LAUNCH_ORDER]
    with connected(mpi_world) as first:
        second = CallsOnNccl.open(first.runtime, mpi_world, CUDA, first.runtime.cuda.Stream())
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
        assert transport.runtime.library.ordered == (seen == "1")


def test_barrier_is_the_streams(transport):
    transport.barrier()
    transport.barrier()
    assert made(transport).outstanding == 2
    transport.synchronize()
    assert made(transport).outstanding == 0


@pytest.mark.parametrize("shape", [(3,), (0,), ()], ids=str)
def test_exchanges_around_the_ring(transport, shape):
    size, rank = transport.size, transport.rank
    right, left = (rank + 1) % size, (rank - 1) % size
    for dtype in (torch.float32, torch.int16, torch.bool):
        received, sent = torch.zeros(shape, dtype=dtype), given(dtype, shape, rank)
        transport.sendrecv(sent, received, right, left)
        transport.synchronize()
        assert torch.equal(received, given(dtype, shape, left))

        received.zero_()
        transport.exchange([("recv", received, right), ("send", sent, left)])
        transport.synchronize()
        assert torch.equal(received, given(dtype, shape, right))


@pytest.mark.mpi(min_size=2)
def test_send_and_recv(transport):
    tensor = given(torch.bfloat16, (7,), transport.rank)
    if transport.rank == 0:
        SEND.by_nccl(transport, tensor, 1)
    elif transport.rank == 1:
        RECV.by_nccl(transport, tensor, 0)
    transport.synchronize()
    assert torch.equal(tensor, given(torch.bfloat16, (7,), 0 if transport.rank < 2 else transport.rank))


def test_a_group_is_one_launch(transport):
    library, queue = transport.runtime.library, transport.runtime.cuda.current_stream().queue
    tensors = [torch.full((count,), float(transport.rank)) for count in (1, 5, 300)]
    whole, blocks = torch.empty(2 * transport.size), torch.arange(2.0 * transport.size) + transport.rank
    library.forget_calls()
    with transport.group():
        for tensor in tensors:
            transport.all_reduce(tensor, "sum")
        transport.all_to_all(whole, blocks)
        assert not queue
    assert len(queue) == 1
    assert library.calls[0] == "GroupStart" and library.calls[-1] == "GroupEnd"
    transport.synchronize()
    assert all((tensor == sum(range(transport.size))).all() for tensor in tensors)
    mine = torch.arange(2.0) + 2 * transport.rank
    assert torch.equal(whole, torch.cat([mine + rank for rank in range(transport.size)]))


def test_a_group_that_fails_is_ended(transport):
    library, tensor = transport.runtime.library, torch.ones(1)
    with pytest.raises(ZeroDivisionError), transport.group():
        1 / 0  # noqa: B018
    library.fail("AllReduce", 5)
    with pytest.raises(TransferError, match="NCCL: NCCL_ERROR_INVALID_USAGE"), transport.group():
        transport.all_reduce(tensor, "sum")
    assert library.depth == 0
    transport.all_reduce(tensor, "sum")  # and the next call is no part of it
    transport.synchronize()
    assert tensor.item() == transport.size


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (2, r"NCCL_ERROR_SYSTEM.*: unhandled system error \(a test lets Reduce fail\)"),
        (6, "NCCL_ERROR_REMOTE"),
        (7, r"NCCL error 7 \(in progress"),
        (8, r"NCCL error 8 \(timeout\)"),
    ],
)
def test_every_status_of_nccl_is_an_error_in_words(transport, status, message):
    transport.runtime.library.fail("Reduce", status)
    with pytest.raises(TransferError, match=message):
        transport.reduce(torch.ones(1), 0, "sum")


def test_failure_is_what_nccl_found_later(transport):
    library = transport.runtime.library
    assert transport.failure() is None
    library.fail("CommGetAsyncError", 6)
    assert "NCCL_ERROR_REMOTE" in transport.failure()
    library.fail("CommGetAsyncError", 7)  # in progress: no error
    assert transport.failure() is None


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
def test_arguments_that_nccl_does_not_take_are_an_error(transport, dtype):
    """No product of complex numbers, no 16-bit integers: the library would refuse what the table lets through."""
    tensor = torch.ones(2, dtype=dtype)
    for op in REDUCTIONS:
        if (dtype, op) in NCCL_REDUCTIONS:
            transport.all_reduce(tensor, op)
        else:
            with pytest.raises(KeyError):
                transport.all_reduce(tensor, op)
    transport.synchronize()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_differ_in_a_collective_are_noticed(mpi_world):
    """By the library, not by NCCL: a test in which the ranks disagree must fail."""
    with connected(mpi_world) as transport:
        tensor = torch.ones(2 + transport.rank)
        transport.all_reduce(tensor, "sum")
        with pytest.raises(AssertionError, match="call 0 differs"):
            transport.synchronize()


# Life ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_of_nccl_sums_sends_and_ends(mpi_world, version):
    runtime = cupy_runtime(version=version)
    transport = CallsOnNccl.open(runtime, mpi_world, CUDA)
    assert runtime.library.ordered == (version >= 22600)
    sent, received = torch.tensor([float(transport.rank)]), torch.empty(1)
    total = sent.clone()
    transport.all_reduce(total, "max")
    after, before = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    transport.sendrecv(sent, received, after, before)
    transport.synchronize()
    assert (total.item(), received.item()) == (transport.size - 1, before)
    transport.all_reduce(total, "sum")  # is left: an abort waits for nobody
    transport.abort()
    assert [comm.end for comm in runtime.library.comms] == ["abort"]


@pytest.mark.parametrize("version", VERSIONS)
def test_split(mpi_world, version):
    with connected(mpi_world, version) as whole:
        outstanding = torch.ones(2)
        whole.all_reduce(outstanding, "sum")
        color = None if whole.rank == 3 else whole.rank % 2
        part = mpi_world.Split(-32766 if color is None else color, -whole.rank)
        made = NcclBackend(whole).split(mpi_world, None if color is None else part)
        whole.synchronize()
        assert (outstanding == whole.size).all()
        if color is None:
            assert made is None
            return
        mine = made.transport
        assert (mine.rank, mine.size) == (part.rank, part.size)
        tensor = torch.tensor([float(whole.rank)])
        ALL_REDUCE.by_nccl(mine, tensor, "sum")
        mine.synchronize()
        assert tensor.item() == sum(part.allgather(whole.rank))
        mine.close()


def test_nccl_is_started_on_the_device_it_is_for(mpi_world):
    runtime = cupy_runtime(devices=2)
    transport = CallsOnNccl.open(runtime, mpi_world, torch.device("cuda", 1))
    assert transport._comm.device_id() == 1 and runtime.cuda.current_device == 0
    tensor = torch.ones(2)
    transport.all_reduce(tensor, "avg")  # a kernel on one rank, too, and NCCL does not set the device there
    transport.barrier()
    transport.close()


def test_close_waits_for_what_is_enqueued(mpi_world):
    tensor = torch.ones(3)
    with connected(mpi_world) as transport:
        comm = made(transport)
        transport.all_reduce(tensor, "sum")
    assert (tensor == mpi_world.size).all() and comm.end == "destroy"
    transport.close()
    transport.abort()
    assert transport.failure() is None and comm.end == "destroy"


def test_what_was_not_closed_is_aborted_by_its_end(mpi_world):
    """CuPy's destructor would be a collective call."""
    transport = CallsOnNccl.open(cupy_runtime(), mpi_world, CUDA)
    comm = made(transport)
    del transport
    assert comm.end == "abort"


def test_what_was_not_closed_waits_for_its_calls_in_flight(mpi_world):
    """Every rank has enqueued them: an abort would leave a wrong result, silently."""
    transport, tensor = CallsOnNccl.open(cupy_runtime(), mpi_world, CUDA), torch.ones(3)
    comm = made(transport)
    transport.all_reduce(tensor, "sum")
    del transport
    assert comm.end == "abort" and (tensor == mpi_world.size).all()


@pytest.mark.parametrize("failed", [False, True])
def test_a_drop_waits_only_so_long_and_not_after_a_failure(mpi_world, monkeypatch, failed):
    monkeypatch.setattr(device_nccl, "DROP_SECONDS", 30.0 if failed else 0.02)
    transport, tensor = CallsOnNccl.open(cupy_runtime(), mpi_world, CUDA), torch.full((3,), 7.0)
    library, cuda, comm = transport.runtime.library, transport.runtime.cuda, made(transport)
    transport.all_reduce(tensor, "sum")
    if failed:
        library.fail("CommGetAsyncError", 6)
    began = time.monotonic()
    del transport
    assert time.monotonic() - began < 5 and comm.end == "abort"
    cuda.synchronize()
    assert (tensor == 7).all()  # the stand-in's device does nothing before it is asked more often


@pytest.mark.mpi(min_size=2)
def test_a_split_that_fails_on_one_rank_fails_on_all(mpi_world):
    last = mpi_world.rank == mpi_world.size - 1
    with connected(mpi_world) as whole:
        library = whole.runtime.library
        part = mpi_world.Split(mpi_world.rank, 0)  # each part connects alone
        if last:
            library.fail("GetUniqueId", 3)
        with pytest.raises(CollectiveError, match=rf"^rank {mpi_world.size - 1}: .*NCCL_ERROR_INTERNAL") as error:
            NcclBackend(whole).split(mpi_world, part)
        assert len(set(mpi_world.allgather(str(error.value)))) == 1
        if not last:
            assert [comm.end for comm in library.comms[1:]] == ["abort"]
        part.Free()


@pytest.mark.mpi(min_size=2)
def test_an_open_that_fails_on_one_rank_fails_on_all(mpi_world):
    """The device has no byte left on the last rank, after NCCL has connected."""
    runtime = cupy_runtime()

    def byte(device):
        raise MemoryError("CUDA out of memory")

    if mpi_world.rank == mpi_world.size - 1:
        object.__setattr__(runtime, "byte", byte)
    with pytest.raises(CollectiveError, match=rf"^rank {mpi_world.size - 1}: CUDA out of memory$") as error:
        CallsOnNccl.open(runtime, mpi_world, CUDA)
    assert isinstance(error.value.__cause__, MemoryError) == (mpi_world.rank == mpi_world.size - 1)
    assert [comm.end for comm in runtime.library.comms] == ["abort"]


def test_communicators_that_do_not_block_are_refused_before_nccl_starts(mpi_world, monkeypatch):
    runtime, last = cupy_runtime(), mpi_world.size - 1
    if mpi_world.rank == last:
        monkeypatch.setenv("NCCL_COMM_BLOCKING", "0")
    with pytest.raises(CollectiveError, match=rf"^(rank {last}: )?NCCL_COMM_BLOCKING=0: .* unset it, or set it to 1$"):
        connect(runtime, mpi_world, CUDA)
    assert "CommInitRank" not in runtime.library.calls


def test_a_file_that_asks_for_communicators_that_do_not_block_is_named(mpi_world, monkeypatch):
    """NCCL reads nccl.conf, too, and we do not."""
    runtime = cupy_runtime()
    monkeypatch.setattr(device_nccl, "BLOCKING", "nothing")
    monkeypatch.setenv("NCCL_COMM_BLOCKING", "0")
    with pytest.raises(CollectiveError, match=r"NCCL error 7 \(in progress: .*=0 is set, perhaps in nccl.conf"):
        connect(runtime, mpi_world, CUDA)


@pytest.mark.parametrize("failing", ["GetUniqueId", "CommInitRank"])
def test_no_rank_hangs_when_one_cannot_start(mpi_world, failing, monkeypatch):
    runtime, aborted = cupy_runtime(), []
    if mpi_world.rank == 0:
        runtime.library.fail(failing, 1)
    elif failing == "CommInitRank":  # NCCL would time out by itself
        monkeypatch.setattr(device_nccl, "_joined", lambda *_: SimpleNamespace(abort=lambda: aborted.append(True)))
    with pytest.raises(CollectiveError, match=r"rank|NCCL|no unique id") as error:
        connect(runtime, mpi_world, CUDA)
    assert "NCCL_ERROR_UNHANDLED_CUDA" in str(error.value)
    assert len(set(mpi_world.allgather(str(error.value)))) == 1
    assert aborted or failing == "GetUniqueId" or mpi_world.rank == 0
