"""Device tensors through a Communicator, by each transport; the device is host memory.

NCCL is the real CuPy over a libnccl of ours; where these are missing, its tests are skipped.
"""

import contextlib
import gc
import re
import weakref

import pytest
import torch

from commengine import CollectiveError, CollectiveMismatch, communicator, launch, trace
from commengine.device.stream import DeviceStream
from commengine.operations.barrier import BARRIER
from tests.commengine import test_communicator_collectives
from tests.commengine.test_communicator_collectives import given
from tests.support.device import exact_reductions
from tests.support.device.device_stand_in import communicator_stand_in, on_device, opens_stand_ins

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.sizes(1, 2)]


@pytest.fixture(scope="module")
def patches():
    with pytest.MonkeyPatch.context() as patches:
        yield patches


@contextlib.contextmanager
def opened(patches, mpi_comm, *args, **options):
    comm, runtime = communicator_stand_in(patches, mpi_comm, *args, **options)
    comm.cuda, comm.runtime = runtime.cuda, runtime
    with comm:
        yield comm


@pytest.fixture(scope="module")
def comm(patches, mpi_world):
    with opened(patches, mpi_world) as comm:
        yield comm


@pytest.fixture(scope="module", params=["nccl stream", "staged", "staged stream"])
def run(request, patches, mpi_world):
    """``run("all_reduce", ...)``: the operation on device tensors, done on return."""
    with opened(patches, mpi_world, request.param.split()[0]) as comm:
        lane = comm.new_stream() if request.param.endswith("stream") else None

        def run(operation, *args):
            args = [on_device(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
            if "reduce" in operation and args[0].dtype == torch.int16 and comm._backend.refusal(torch.int16, "sum"):
                with pytest.raises(CollectiveError, match=r"NCCL has no torch.int16 to reduce: convert it"):
                    getattr(comm, operation)(*args, stream=lane)
                pytest.skip("NCCL has no 16-bit integers")
            getattr(comm, operation)(*args, stream=lane).wait()
            comm.cuda.current_stream().synchronize()

        run.by_nccl = request.param.startswith("nccl")
        yield run


OPERATIONS = (
    "all_gather", "all_gather_in_place", "all_gather_v", "all_reduce", "all_to_all", "all_to_all_v", "broadcast",
    "gather", "reduce", "reduce_scatter", "scatter",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.bool], ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_are_those_of_the_host(run, mpi_world, operation, dtype):
    """The tests of the host's operations, with the `run` of this file; NCCL's reductions round in their own way."""
    tests = exact_reductions if run.by_nccl and "reduce" in operation else test_communicator_collectives
    getattr(tests, f"test_{operation}")(run, mpi_world, dtype)


# Streams: the stand-in runs everything as late as it may, so a missing wait is a wrong result every time. ---------


def test_stream_waits_for_the_producer_and_the_consumer_for_the_stream(comm):
    stream = comm.new_stream()
    assert isinstance(stream, DeviceStream) and stream.cuda_stream.priority == -1
    tensor, result = on_device(torch.full((6,), float("nan"))), torch.empty(6)
    comm.cuda.kernel(lambda: tensor.fill_(comm.rank + 1))
    work = comm.all_reduce(tensor, stream=stream)
    assert not work.done() and tensor.isnan().all()  # the host did not wait
    work.wait()
    assert not work.done()  # nor here
    comm.cuda.kernel(lambda: result.copy_(tensor))
    comm.cuda.kernel(lambda: tensor.fill_(float("nan")))  # freed and given to somebody else
    comm.cuda.current_stream().synchronize()
    assert (result == sum(range(1, comm.size + 1))).all() and work.done()


def test_without_a_wait_the_consumer_would_see_garbage(comm):
    """That the stand-in tells the difference."""
    stream = comm.new_stream()
    tensor, result = on_device(torch.full((6,), float("nan"))), torch.empty(6)
    comm.cuda.kernel(lambda: tensor.fill_(1.0))
    work = comm.all_reduce(tensor, stream=stream)
    comm.cuda.kernel(lambda: result.copy_(tensor))
    comm.cuda.current_stream().synchronize()
    assert (result == 1).all() or comm.size == 1
    work.wait()
    comm.cuda.synchronize()


def test_work_holds_its_tensors_until_it_is_waited_for(comm):
    stream, memory = comm.new_stream(), torch.ones(4)  # which the stand-in needs, a GPU's allocator does not
    tensor = on_device(memory)
    alive = weakref.ref(tensor)
    work = comm.all_reduce(tensor, stream=stream)
    del tensor
    assert alive() is not None
    work.wait()
    assert alive() is None
    comm.cuda.synchronize()


def test_a_dropped_work_leaves_the_tensors_to_the_stream(comm):
    stream, memory = comm.new_stream(), torch.ones(4)  # which the stand-in needs, a GPU's allocator does not
    tensor = on_device(memory)
    alive = weakref.ref(tensor)
    comm.all_reduce(tensor, stream=stream)
    del tensor
    assert alive() is not None
    comm.barrier(stream=stream)
    assert alive() is not None  # still in flight
    stream.synchronize()
    assert alive() is None


def test_memory_goes_back_to_the_stream_it_came_from(comm):
    """A wait on another stream than the tensors' own: their own must wait too before their memory is used again."""
    stream, cuda = comm.new_stream(), comm.cuda
    tensor, home, elsewhere = on_device(torch.ones(4)), cuda.Stream(), cuda.Stream()
    result = tensor.as_subclass(torch.Tensor)
    with cuda.stream(home):
        work = comm.all_reduce(tensor, stream=stream)
    with cuda.stream(elsewhere):
        work.wait()
    with cuda.stream(home):
        cuda.kernel(lambda: result.fill_(-1.0))
    home.synchronize()
    elsewhere.synchronize()
    stream.synchronize()
    assert (result == -1).all()


def test_event_of_a_stream_stands_for_all_before_it(comm):
    stream = comm.new_stream()
    tensors = [on_device(torch.full((3,), float(number))) for number in range(5)]
    alive = [weakref.ref(tensor) for tensor in tensors]
    for tensor in tensors:
        comm.all_reduce(tensor, stream=stream)
    results = [tensor.as_subclass(torch.Tensor) for tensor in tensors]
    del tensor, tensors
    event = stream.record()
    assert all(ref() is not None for ref in alive)
    event.wait()
    assert not any(ref() is not None for ref in alive)
    comm.cuda.current_stream().synchronize()
    assert event.done()
    assert [result[0].item() for result in results] == [number * comm.size for number in range(5)]


def test_one_stream_waits_for_another_device_or_host(comm):
    first, second, host = comm.new_stream(), comm.new_stream(priority=0), comm.new_stream(device="cpu")
    assert second.cuda_stream.priority == 0 and not isinstance(host, DeviceStream)
    tensor, own = on_device(torch.ones(2)), torch.ones(2)
    comm.all_reduce(tensor, stream=first)
    second.wait_event(first.record())
    comm.all_reduce(tensor, stream=second)
    comm.all_reduce(own, stream=host)
    second.wait_event(host.record())
    assert (own == comm.size).all()
    host.wait_event(second.record())
    host.synchronize()
    assert (tensor == comm.size**2).all()


def test_two_communicators_in_flight(comm):
    """A tensor group's collective on the current stream beside a data group's on another, as in a backward pass."""
    stream = comm.new_stream()
    with comm.split(0) as other:
        here, there = on_device(torch.ones(3)), on_device(torch.ones(3))
        work = comm.all_reduce(there, stream=stream)
        other.all_reduce(here)
        work.wait()
        comm.cuda.current_stream().synchronize()
        assert (here == comm.size).all() and (there == comm.size).all()


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("transport", ["nccl", "staged"])
def test_a_graphs_capture_is_refused_by_every_transport(patches, mpi_world, transport, streamed):
    with opened(patches, mpi_world, transport) as comm:
        stream = comm.new_stream() if streamed else None
        tensor, enqueued = on_device(torch.ones(2)), len(comm.cuda.current_stream().queue)
        for observed in (False, True):
            with trace(comm) if observed else contextlib.nullcontext():
                comm.cuda.capturing = True
                try:
                    with pytest.raises(
                        CollectiveError, match=r"all_reduce: collectives cannot be captured into a CUDA"
                    ):
                        comm.all_reduce(tensor, stream=stream)
                finally:
                    comm.cuda.capturing = False
        assert len(comm.cuda.current_stream().queue) == enqueued
        comm.all_reduce(tensor, stream=stream).wait()
        comm.cuda.synchronize()
        assert (tensor == comm.size).all()


# Places -----------------------------------------------------------------------------------------------------------


def test_each_tensor_goes_its_way(comm):
    host, device = torch.ones(3), on_device(torch.ones(3))
    comm.all_reduce(host)
    comm.all_reduce(device)
    assert (host == comm.size).all()  # done on return
    comm.cuda.synchronize()
    assert (device == comm.size).all() and comm.device == torch.device("cuda", 0)
    comm.barrier()


def test_wrong_places_are_refused(comm):
    stream, host = comm.new_stream(), comm.new_stream(device="cpu")
    other = on_device(torch.ones(2))
    type(other).device, kept = torch.device("cuda", 1), type(other).device
    try:
        with pytest.raises(CollectiveError, match="lies on cuda:1, the communicator's device is cuda:0"):
            comm.all_reduce(other)
    finally:
        type(other).device = kept
    for lane, tensor, message in (
        (stream, torch.ones(2), r"is a device stream, the tensor lies on cpu"),
        (host, on_device(torch.ones(2)), r"is a host stream, the tensor lies on cuda:0"),
    ):
        with pytest.raises(CollectiveError, match=message):
            comm.all_reduce(tensor, stream=lane)
    with pytest.raises(CollectiveError, match="the tensors lie on cpu and cuda:0"):
        comm.all_gather(torch.ones(2 * comm.size), on_device(torch.ones(2)))
    with pytest.raises(CollectiveError, match="device='gpu' is not 'cuda' or 'cpu'"):
        comm.new_stream(device="gpu")


@pytest.mark.parametrize("transport", ["nccl", "staged"])
def test_a_communicator_does_not_change_the_current_device(patches, mpi_world, transport):
    """It may belong to a program that uses another device. Commands ask for it."""
    with opened(patches, mpi_world, transport, device=torch.device("cuda", 1)) as comm:
        if transport == "nccl":
            comm.new_stream()
        assert comm.cuda.current_device == 0
        comm.make_device_current()
        assert comm.cuda.current_device == 1


def test_a_staged_call_leaves_device_0_alone(patches, mpi_world):
    """Another thread's device is number 0, and leaving a block of a stream would make a context there."""
    with opened(patches, mpi_world, "staged", device=torch.device("cuda", 1)) as comm:
        hosted = comm._backend
        hosted.run(BARRIER, (), hosted.ready())
        assert comm.cuda.contexts == {1} and comm.cuda.current_device == 0


def test_a_job_computes_on_its_own_device(monkeypatch, mpi_world):
    """Otherwise all ranks' pinned memory, and their synchronize without an argument, are device 0's."""
    from tests.support.device.nccl.library import cupy_runtime

    runtime, seen = cupy_runtime(devices=8), []
    mine = torch.device("cuda", mpi_world.rank + 1)
    monkeypatch.setattr(communicator, "open_backend", opens_stand_ins(runtime, mine))
    with pytest.raises(SystemExit) as stop:
        launch.run(lambda world: seen.append((world.device, runtime.cuda.current_device)), device="cuda")
    assert not stop.value.code and seen == [(mine, mine.index)]


# Groups -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
def test_coalesce_is_one_launch(comm, streamed):
    stream = comm.new_stream() if streamed else None
    lane = stream.cuda_stream if streamed else comm.cuda.current_stream()
    ring, counted = on_device(torch.zeros(3)), on_device(torch.ones(5))
    mine, gathered = on_device(torch.full((2,), float(comm.rank))), on_device(torch.zeros(2 * comm.size))
    sent, host = on_device(torch.full((3,), float(comm.rank))), torch.ones(2)
    library = comm.runtime.library
    library.forget_calls()
    with comm.coalesce(stream=stream):
        comm.sendrecv(sent, (comm.rank + 1) % comm.size, ring, (comm.rank - 1) % comm.size)
        work = comm.all_reduce(counted)
        comm.all_gather(gathered, mine)
        if not streamed:
            comm.all_reduce(host)
        assert not library.calls and not lane.queue
        with pytest.raises(CollectiveError, match="has not ended"):
            work.wait()
    assert library.calls[0] == "GroupStart" and library.calls[-1] == "GroupEnd"
    work.wait()
    comm.cuda.synchronize()
    assert (ring == (comm.rank - 1) % comm.size).all() and (counted == comm.size).all()
    assert torch.equal(gathered.as_subclass(torch.Tensor), torch.arange(comm.size).repeat_interleave(2).float())
    assert streamed or (host == comm.size).all()


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("transport", ["staged", "nccl"])
def test_coalesce_takes_host_and_device_tensors_each_its_own_way(patches, mpi_world, transport, streamed):
    """Whichever of them comes first: what is sent from the device is what its stream makes of it before."""
    with opened(patches, mpi_world, transport) as comm:
        stream = comm.new_stream() if streamed and transport != "nccl" else None  # NCCL's streams are of one kind
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        for host_first in (True, False):
            wrong = float("nan")
            sent, received = on_device(torch.full((40,), wrong)), on_device(torch.full((40,), wrong))
            reduced, total = on_device(torch.full((3,), wrong)), torch.ones(3)
            mine, theirs = torch.full((5,), 10.0 + comm.rank), torch.zeros(5)
            comm.cuda.kernel(lambda sent=sent, reduced=reduced: (sent.fill_(comm.rank), reduced.fill_(1.0)))
            calls = [
                lambda mine=mine, theirs=theirs: comm.sendrecv(mine, right, theirs, left),
                lambda total=total: comm.all_reduce(total),
                lambda sent=sent: comm.send(sent, right),
                lambda received=received: comm.recv(received, left),
                lambda reduced=reduced: comm.all_reduce(reduced),
            ]
            with comm.coalesce(stream=stream):
                for call in calls if host_first else reversed(calls):
                    call()
            if stream is not None:
                stream.record().wait()
            comm.cuda.synchronize()
            assert (received == left).all() and (theirs == 10 + left).all()
            assert (reduced == comm.size).all() and (total == comm.size).all()


def test_coalesced_calls_that_depend_on_each_other_are_refused(comm):
    whole, other, third = (on_device(torch.ones(count)) for count in (8 * comm.size, 8, 8 * comm.size))

    def group(first, second):
        with comm.coalesce():
            first()
            second()

    reduced, gathered = lambda: comm.all_reduce(other), lambda: comm.all_gather(whole, other)
    with pytest.raises(
        CollectiveError, match=r"calls 1 and 2 of the block, all_reduce.* and all_reduce.*, touch the same memory"
    ):
        group(lambda: comm.all_reduce(whole), lambda: comm.all_reduce(whole[4:8]))
    with pytest.raises(CollectiveError, match="touch the same memory"):
        group(reduced, gathered)
    with pytest.raises(CollectiveError, match="touch the same memory"):
        group(gathered, lambda: comm.all_reduce(whole))
    group(gathered, lambda: comm.gather(third if comm.rank == 0 else None, other))  # both only read it
    comm.cuda.synchronize()


# checked, trace, close ---------------------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
def test_checked_tells_a_device_tensor_from_a_host_tensor(patches, mpi_world):
    with opened(patches, mpi_world, checked=True) as comm:
        tensor = on_device(torch.ones(3))
        comm.all_reduce(tensor)
        with pytest.raises(CollectiveMismatch, match=re.escape("all_reduce(float32 cuda [3], op=sum)")):
            comm.all_reduce(tensor if comm.rank == 0 else torch.ones(3))
        comm.cuda.synchronize()


@pytest.mark.mpi(min_size=2)
def test_checked_compares_a_block_of_one_device_call(patches, mpi_world):
    with opened(patches, mpi_world, checked=True) as comm:
        tensor = on_device(torch.ones(3))
        with pytest.raises(CollectiveMismatch, match="op=max"), comm.coalesce():
            comm.all_reduce(tensor, "sum" if comm.rank == 0 else "max")
        comm.cuda.synchronize()


def test_trace_has_the_devices_times(comm):
    stream, cuda = comm.new_stream(), comm.cuda
    one, two = on_device(torch.ones(2)), on_device(torch.ones(4))
    with trace(comm) as log:
        comm.all_reduce(one)
        work = comm.all_reduce(two, stream=stream)
        for _ in range(5):
            cuda.kernel(lambda: None)  # compute, a millisecond each
        stream.cuda_stream.synchronize()
        work.wait()
        assert log._events[1].end == 0.0  # nothing was waited for so far
        first, second = log.events
    assert (first.bytes, first.stream, second.bytes, second.stream) == (8, None, 16, stream.name)
    assert first.enqueue <= second.enqueue
    assert second.start < second.end <= second.wait_start <= second.wait_end
    assert first.hidden_seconds == 0 and second.hidden_seconds == pytest.approx(second.seconds)
    assert first.seconds == pytest.approx(1e-3, abs=2e-3) and first.seconds > 0
    assert "all_reduce" in log.summary()


def test_watcher_asks_the_device(patches, mpi_world):
    """What is enqueued is not done: the watcher polls it, and asks NCCL what went wrong meanwhile."""
    with opened(patches, mpi_world, timeout=100.0) as comm:
        stream = comm.new_stream()
        watch = comm._watch
        one, two = on_device(torch.ones(2)), on_device(torch.ones(2))
        comm.all_reduce(one)
        work = comm.all_reduce(two, stream=stream)
        here, there = list(watch.entries)[-2:]
        assert (here.operation, here.sequence, there.sequence) == ("all_reduce", "", "stream 1")
        assert here.started and there.started and not here.done() and not there.done()
        work.wait()
        comm.cuda.synchronize()
        assert here.done() and there.done()
        alarms = comm._watched.alarms
        assert len(alarms) == 2 and alarms[1]() is None
        comm.runtime.library.fail("AllReduce", 5)
        with pytest.raises(CollectiveError, match="INVALID_USAGE"):
            comm.all_reduce(one)
        assert watch.entries[-1].ended and id(watch.entries[-1]) not in watch.running


def test_a_closed_communicator_has_no_alarms(patches, mpi_world):
    """However many are split and closed: the watcher asks those that are open, and keeps no other alive."""
    with opened(patches, mpi_world, timeout=100.0) as comm:
        watch, parts = comm._watch, [comm.split(0, name=f"part {number}") for number in range(3)]
        kept = [weakref.ref(part._backend.transport) for part in parts]
        parts[0].new_stream()
        asked = []
        for part in parts:
            part._watched.alarms.append(lambda name=part.name: asked.append(name))
        parts[0].close()
        parts[2].close()
        watch._stop()  # the thread, whose looks are at its own times
        asked.clear()
        watch._look()
        assert asked == ["part 1"]
        parts[1].close()
        del parts, part
        gc.collect()
        assert [one() for one in kept] == [None] * 3


def test_times_of_a_launch_are_counted_once(comm):
    tensors = [on_device(torch.ones(2)) for _ in range(3)]
    with trace(comm) as log:
        with comm.coalesce():
            for tensor in tensors:
                comm.all_reduce(tensor)
        (total,) = log.totals()
    assert (total.count, total.bytes) == (3, 24)
    assert [event.seconds > 0 for event in log.events] == [True, False, False]


def test_a_failing_call_is_a_collective_error_that_names_it(comm):
    comm.runtime.library.fail("AllReduce", 5)
    with pytest.raises(CollectiveError, match=r"all_reduce: NCCL: NCCL_ERROR_INVALID_USAGE"):
        comm.all_reduce(on_device(torch.ones(1)))


def test_close_ends_every_nccl_communicator(patches, mpi_world):
    with opened(patches, mpi_world) as comm:
        comm.new_stream()
        library, tensor = comm.runtime.library, on_device(torch.ones(1))
        comm.all_reduce(tensor)
    assert [made.end for made in library.comms] == ["destroy", "destroy"]
    with pytest.raises(CollectiveError, match="the communicator is closed"):
        comm.all_reduce(tensor)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("what", ["split", "new_stream"])
def test_a_group_that_cannot_be_made_on_one_rank_is_every_ranks_error(patches, mpi_world, what):
    with opened(patches, mpi_world) as comm:
        if comm.rank == 0:
            comm.runtime.library.fail("GetUniqueId", 1)
        with pytest.raises(CollectiveError, match=r"rank 0: .*NCCL_ERROR_UNHANDLED_CUDA"):
            comm.split(0) if what == "split" else comm.new_stream()
        with comm.split(0) as part:  # the next one is made
            tensor = on_device(torch.ones(2))
            part.all_reduce(tensor)
            comm.cuda.synchronize()
            assert (tensor == comm.size).all()


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_staged_tensors_have_the_hosts_result(patches, mpi_world, count):
    """Nothing is sent before it is copied, and nothing is used before it is copied back."""
    with opened(patches, mpi_world, "staged") as comm:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            parts = [given(dtype, (count,), rank) for rank in range(comm.size)]
            device, host = on_device(parts[comm.rank].clone()), parts[comm.rank].clone()
            comm.cuda.kernel(lambda device=device: device.neg_())
            comm.all_reduce(device)
            comm.all_reduce(host.neg_())
            assert torch.equal(device.as_subclass(torch.Tensor), host)


def test_a_known_call_on_a_device_skips_the_checks(patches, mpi_world, monkeypatch):
    with opened(patches, mpi_world) as comm:
        size = comm.size
        tensors = [on_device(torch.full((5,), float(comm.rank + turn))) for turn in range(2)]
        parts = [on_device(torch.full((2,), float(comm.rank + turn))) for turn in range(2)]
        wholes = [on_device(torch.zeros(2 * size)) for _ in range(2)]
        comm.all_reduce(tensors[0])
        comm.all_gather(wholes[0], parts[0])
        version = tensors[1]._version
        with monkeypatch.context() as patched:
            patched.setattr(comm._calls, "run", lambda *_: pytest.fail("this call takes the long way"))
            comm.all_reduce(tensors[1])
            comm.all_gather(wholes[1], parts[1])
        comm.cuda.current_stream().synchronize()
        ranks = torch.arange(size, dtype=torch.float32)
        for turn in range(2):
            assert torch.equal(torch.tensor(tensors[turn].tolist()), torch.full((5,), float((ranks + turn).sum())))
            assert torch.equal(torch.tensor(wholes[turn].tolist()), (ranks + turn).repeat_interleave(2))
        assert tensors[1]._version > version
        with pytest.raises(CollectiveError, match="not contiguous"):
            comm.all_reduce(on_device(torch.ones(10))[::2])
        with pytest.raises(CollectiveError, match=r"share memory|with dim 0 times"):
            comm.all_gather(wholes[0], wholes[0][1:3])
