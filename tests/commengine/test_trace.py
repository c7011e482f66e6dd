"""The trace: what it says of each collective, and that it says nothing else."""

import contextlib
import json
import threading
import time

import numpy as np
import pytest
import torch

import commengine.calls.dispatch
from commengine import CollectiveError, CollectiveEvent, Communicator, Trace, trace
from tests.support.device.routed import replace

mpi = pytest.mark.mpi(min_size=1)


@pytest.fixture
def slow(stream, monkeypatch):
    """A stream whose barrier takes 50 ms and needs nobody else."""
    replace(monkeypatch, stream.transport, barrier=lambda: time.sleep(0.05))
    return stream


def everything(comm, stream=None):
    """(operation, redop, root, dtype, shape, bytes) of one call of each, as the trace must say it."""
    n, r = comm.size, comm.rank
    f32, f16 = torch.float32, torch.float16
    last = n - 1
    right, left = (r + 1) % n, (r - 1) % n

    comm.all_reduce(torch.ones(3, 5), stream=stream)
    yield "all_reduce", "sum", None, "float32", (3, 5), 60
    comm.all_reduce(torch.ones(7, dtype=f16), "avg", stream=stream)
    yield "all_reduce", "avg", None, "float16", (7,), 14
    comm.reduce(torch.ones(2, dtype=torch.int64), last, "max", stream=stream)
    yield "reduce", "max", last, "int64", (2,), 16
    comm.reduce_scatter(torch.ones(2), torch.ones(2 * n), "min", stream=stream)
    yield "reduce_scatter", "min", None, "float32", (2 * n,), 8 * n
    comm.all_gather(torch.ones(2 * n, 3), torch.ones(2, 3), stream=stream)
    yield "all_gather", None, None, "float32", (2 * n, 3), 24 * n
    comm.broadcast(torch.tensor(True), last, stream=stream)
    yield "broadcast", None, last, "bool", (), 1
    comm.gather(torch.ones(2 * n) if r == last else None, torch.ones(2), last, stream=stream)
    yield "gather", None, last, "float32", (2,), 8 * n
    comm.scatter(torch.ones(2), torch.ones(2 * n) if r == 0 else None, stream=stream)
    yield "scatter", None, 0, "float32", (2,), 8 * n
    comm.all_to_all(torch.ones(n, 2), torch.ones(n, 2), stream=stream)
    yield "all_to_all", None, None, "float32", (n, 2), 8 * n
    comm.barrier(stream=stream)
    yield "barrier", None, None, "none", (), 0
    comm.sendrecv(torch.ones(4), right, torch.ones(4), left, stream=stream)
    yield "sendrecv", None, right, "float32", (4,), 16
    comm.all_reduce(torch.ones(0, dtype=f32), stream=stream)
    yield "all_reduce", "sum", None, "float32", (0,), 0


@mpi
@pytest.mark.every_size
@pytest.mark.parametrize("kind", ["direct", "stream"])
def test_fields_of_every_operation(stream, kind):
    comm, lane = stream.comm, stream if kind == "stream" else None
    began = time.perf_counter()
    with trace(comm) as log:
        expected = list(everything(comm, lane))
        stream.synchronize()
    ended = time.perf_counter()
    said = [(e.operation, e.redop, e.root, e.dtype, e.shape, e.bytes) for e in log.events]
    assert said == expected
    for event in log.events:
        assert event.elements == torch.Size(event.shape).numel() * (event.operation != "barrier")
        assert (event.group, event.size) == ("streamed", comm.size)
        assert event.stream == (None if lane is None else stream.name)
        assert began <= event.enqueue <= event.start <= event.end <= ended
        assert event.seconds == event.end - event.start
        if lane is None:
            assert event.wait_start is None and event.wait_end is None and event.hidden_seconds == 0.0
        else:  # synchronize() waited for what was not over by then
            assert event.enqueue <= event.wait_start <= event.wait_end <= ended
            assert event.hidden_seconds == pytest.approx(min(event.seconds, max(0.0, event.wait_start - event.start)))
    ends = [event.end for event in log.events]
    assert ends == sorted(ends)
    assert log.rank == comm.world_rank


@mpi
def test_send_and_recv(world):
    if world.size == 1 or world.rank > 1:
        return
    with trace(world) as log:
        if world.rank == 0:
            world.send(torch.ones(5), 1)
        else:
            world.recv(torch.ones(5), 0)
    (event,) = log.events
    assert (event.operation, event.root, event.bytes) == (("send", 1, 20) if world.rank == 0 else ("recv", 0, 20))
    assert (event.peers, event.buffers) == ((1 - world.rank,), ((20, False),))


@mpi
@pytest.mark.every_size
def test_buffers_and_partners(world):
    """Which tensors the other ranks reach where they lie, and with whom an exchange was."""
    n, r = world.size, world.rank
    window, last = world.empty((n << 13,)).zero_(), n - 1
    with trace(world) as log:
        world.all_reduce(window)
        world.all_reduce(window[:100])
        world.reduce_scatter(torch.zeros(1 << 13), window)
        world.gather(torch.ones(2 * n) if r == last else None, torch.ones(2), last)
        world.sendrecv(torch.ones(4), (r + 1) % n, torch.ones(4), (r - 1) % n)
    shared = n > 1
    assert [event.buffers for event in log.events] == [
        ((n << 15, shared),),
        ((400, False),),  # small ones go as messages
        ((1 << 15, False), (n << 15, shared)),
        ((8 * n if r == last else 0, False), (8, False)),
        ((16, False), (16, False)),
    ]
    assert [event.peers for event in log.events] == [(), (), (), (), ((r + 1) % n, (r - 1) % n)]


@mpi
def test_nothing_outside_the_block_and_nothing_of_others(world):
    with world.split(0, world.rank) as other:
        world.barrier()
        with trace(world) as log:
            world.barrier()
            other.barrier()
        world.barrier()
        assert [event.group for event in log.events] == ["world"]
        with contextlib.suppress(KeyError), trace() as nothing, trace(world, other) as both:
            world.barrier()
            other.barrier()
            raise KeyError
        world.barrier()
        other.barrier()
        assert [event.group for event in both.events] == ["world", "split"]
        assert nothing.events == []
        with trace(world, world) as log:
            world.barrier()
        assert len(log.events) == 1


@mpi
def test_pauses_nest_and_end_with_the_trace(world):
    with trace(world) as log:
        with log.paused():
            with log.paused():
                world.barrier()
            world.barrier()
        world.barrier()
    with log.paused():
        pass
    world.barrier()
    assert len(log.events) == 1


@mpi
def test_traces_nest(world):
    with trace(world) as outer:
        world.all_reduce(torch.ones(1))
        with trace(world) as inner:
            world.barrier()
        world.broadcast(torch.ones(1))
    assert [event.operation for event in outer.events] == ["all_reduce", "barrier", "broadcast"]
    assert [event.operation for event in inner.events] == ["barrier"]


@mpi
def test_traces_may_end_in_another_order_than_they_began(world):
    first, second = trace(world), trace(world)
    a, b = first.__enter__(), second.__enter__()
    world.barrier()
    first.__exit__(None, None, None)
    world.barrier()
    second.__exit__(None, None, None)
    world.barrier()
    assert (len(a.events), len(b.events)) == (1, 2)


@mpi
def test_ranks_may_differ_in_tracing(world):
    tensor = torch.ones(3)
    if world.rank == 0:
        with trace(world) as log:
            world.all_reduce(tensor)
        assert len(log.events) == 1
    else:
        world.all_reduce(tensor)
    assert (tensor == world.size).all()


@mpi
def test_a_call_that_is_refused_is_not_logged(world):
    with trace(world) as log, pytest.raises(CollectiveError):
        world.all_reduce(torch.ones(3), "most")
    assert log.events == []


@mpi
def test_agreement_is_not_logged(mpi_world):
    with Communicator(mpi_world, checked=True) as comm, trace(comm) as log:
        comm.all_reduce(torch.ones(3))
    assert [event.operation for event in log.events] == ["all_reduce"]


@mpi
def test_hidden_seconds(slow):
    comm = slow.comm
    gate = threading.Event()
    with trace(comm) as log:
        slow.enqueue(lambda: gate.wait(10))
        work = comm.barrier(stream=slow)
        threading.Timer(0.1, gate.set).start()
        work.wait()  # from before its start to its end
        work = comm.barrier(stream=slow)
        until_done(work)
        work.wait()  # long after
        until_done(comm.barrier(stream=slow))  # never
        slow.enqueue(lambda: None).wait()  # which is not a wait for what came before
        alone = log.events[2]
        assert alone.wait_start is None and alone.hidden_seconds == alone.seconds
        comm.barrier(stream=slow)
        slow.synchronize()  # for all, from before its start to its end
    waited, hidden, _, together = log.events
    assert all(event.seconds >= 0.05 for event in log.events)
    assert waited.wait_start < waited.start and waited.hidden_seconds < 0.001
    assert hidden.wait_start >= hidden.end and hidden.hidden_seconds == hidden.seconds
    began_late = max(0.0, together.wait_start - together.start)  # another program may run between the two calls
    assert together.hidden_seconds < began_late + 0.001


def until_done(work):
    while not work.done():
        time.sleep(0.001)


def event(**given):
    fields = {
        "operation": "all_reduce", "redop": "sum", "root": None, "dtype": "float32", "shape": (4,), "elements": 4,
        "bytes": 16, "group": "tensor", "size": 2, "stream": "tensor/stream1", "enqueue": 1.0, "start": 2.0, "end": 5.0,
    }  # fmt: skip
    return CollectiveEvent(**{**fields, **given})


@pytest.mark.parametrize(
    "wait, hidden",
    [
        ((None, None), 3.0),
        ((1.0, 5.0), 0.0),  # before the start to the end
        ((1.0, 5.5), 0.0),
        ((3.0, 5.0), 1.0),
        ((5.0, 5.0), 3.0),
        ((7.0, 7.5), 3.0),  # long after
        ((2.0, 5.0), 0.0),
        ((6.0, None), 3.0),  # waiting right now
    ],
)
def test_hidden_seconds_by_hand(wait, hidden):
    assert event(wait_start=wait[0], wait_end=wait[1]).hidden_seconds == pytest.approx(hidden)
    assert event(wait_start=wait[0], wait_end=wait[1], stream=None).hidden_seconds == 0


def test_event_that_is_not_over_has_no_duration():
    assert event(end=0.0).seconds == 0 and event(end=0.0).hidden_seconds == 0


@mpi
def test_events_in_flight_and_after_a_failure_have_no_duration(stream):
    comm = stream.comm
    with trace(comm) as log:
        stream.enqueue(lambda: time.sleep(0.05))
        work = comm.barrier(stream=stream)
        assert [(total.seconds, total.hidden_seconds) for total in log.totals()] == [(0.0, 0.0)]
        work.wait()
        stream.enqueue(lambda: 1 / 0)
        never = comm.barrier(stream=stream)
        with pytest.raises(CollectiveError):
            never.wait()
    ran, skipped = log.events
    assert ran.seconds > 0 and (skipped.seconds, skipped.hidden_seconds) == (0.0, 0.0)


def a_log():
    log = Trace()
    log.rank = 3
    log.events.extend(
        [
            event(),
            event(wait_start=4.0, wait_end=5.0, bytes=24),
            event(group="data", size=4, stream=None, start=1.0, end=11.0, bytes=2_000_000),
            event(operation="broadcast", redop=None, root=1, end=2.5),
        ]
    )
    return log


def rows(log):
    return [(t.group, t.size, t.operation, t.count, t.bytes, t.seconds, t.hidden_seconds) for t in log.totals()]


TOTALS = [
    ("data", 4, "all_reduce", 1, 2_000_000, 10.0, 0.0),
    ("tensor", 2, "all_reduce", 2, 40, 6.0, 5.0),
    ("tensor", 2, "broadcast", 1, 16, 0.5, 0.5),
]


def test_totals_are_sums_per_group_and_operation():
    log = a_log()
    assert rows(log) == TOTALS
    assert rows(log) == TOTALS  # asking changes nothing


def test_settle_folds_events_into_the_totals():
    log = a_log()
    log.settle()
    assert log.events == [] and rows(log) == TOTALS
    log.settle()
    assert rows(log) == TOTALS
    log.events.append(event(bytes=1))
    assert rows(log)[1] == ("tensor", 2, "all_reduce", 3, 41, 9.0, 8.0)
    log.settle()
    assert rows(log)[1] == ("tensor", 2, "all_reduce", 3, 41, 9.0, 8.0)


def test_summary():
    lines = a_log().summary().splitlines()
    assert lines[0].split() == ["group", "operation", "count", "MB", "seconds", "hidden"]
    assert [line.split() for line in lines[1:]] == [
        ["data", "(4)", "all_reduce", "1", "2.000", "10.000", "0%"],
        ["tensor", "(2)", "all_reduce", "2", "0.000", "6.000", "83%"],
        ["tensor", "(2)", "broadcast", "1", "0.000", "0.500", "100%"],
    ]
    assert len({len(line) for line in lines}) == 1, "the columns do not line up"
    assert Trace().summary().splitlines() == lines[:1]


def test_chrome_file(tmp_path):
    path = tmp_path / "trace.json"
    a_log().save_chrome(path)
    entries = json.loads(path.read_text())["traceEvents"]
    spans = [entry for entry in entries if entry["ph"] == "X"]
    assert [(s["name"], s["ts"], s["dur"]) for s in spans] == [
        ("all_reduce tensor", 2e6, 3e6),
        ("all_reduce tensor", 2e6, 3e6),
        ("all_reduce data", 1e6, 10e6),
        ("broadcast tensor", 2e6, 0.5e6),
    ]
    assert {entry["pid"] for entry in entries} == {3}
    lanes = {e["tid"]: e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    assert [lanes[s["tid"]] for s in spans] == ["tensor/stream1", "tensor/stream1", "caller", "tensor/stream1"]
    assert spans[1]["args"]["bytes"] == 24 and spans[1]["args"]["hidden_us"] == pytest.approx(2e6)
    assert spans[3]["args"]["root"] == 1 and spans[3]["args"]["shape"] == [4]


@mpi
def test_chrome_file_of_a_real_trace(stream, tmp_path):
    comm = stream.comm
    with trace(comm) as log:
        list(everything(comm, stream))
        list(everything(comm))
        comm.broadcast(torch.ones(1), np.int64(0))
        stream.synchronize()
    log.save_chrome(tmp_path / "trace.json")
    entries = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [entry for entry in entries if entry["ph"] == "X"]
    assert len(spans) == len(log.events)
    for span, logged in zip(spans, log.events, strict=True):
        assert span["dur"] == pytest.approx((logged.end - logged.start) * 1e6)


@mpi
def test_no_event_is_made_when_nobody_traces(stream, monkeypatch):
    def made(*args, **options):
        raise AssertionError("made an event")

    monkeypatch.setattr(commengine.calls.dispatch, "CollectiveEvent", made)
    comm = stream.comm
    for lane in (None, stream):
        assert len(list(everything(comm, lane))) == 12
        with comm.coalesce(stream=lane):
            comm.barrier()
    stream.synchronize()
