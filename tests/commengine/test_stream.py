"""Streams: order, events, overlap, errors, and how long tensors live."""

import gc
import random
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from commengine import CollectiveError, Communicator, Event, trace
from commengine.operations import all_reduce
from tests.support import mpirun
from tests.support.device.routed import replace
from tests.support.exact import ALWAYS

mpi = pytest.mark.mpi(min_size=1)


def soon(condition, seconds=5.0):
    """Whether ``condition()`` comes true: a worker lets go of a tensor just after it said that it is done."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    return condition()


@mpi
def test_collectives_run_in_the_order_they_were_enqueued(stream):
    comm, n = stream.comm, stream.comm.size
    tensor, expected = torch.ones(3, dtype=torch.int64), 1
    for i in range(10):
        if i % 3 == comm.rank % 3:
            stream.enqueue(lambda: time.sleep(0.003))  # the ranks are never in step
        comm.all_reduce(tensor, stream=stream)
        stream.enqueue(lambda: tensor.add_(1).remainder_(1009))
        expected = (expected * n + 1) % 1009
    stream.synchronize()
    assert tensor.tolist() == [expected] * 3


@mpi
def test_enqueue_returns_at_once_and_done_does_not_block(stream):
    comm, gate = stream.comm, threading.Event()
    stream.enqueue(lambda: gate.wait(10))
    tensor = torch.ones(2)
    before = stream.record()
    work = comm.all_reduce(tensor, stream=stream)
    event = stream.record()
    assert not before.done() and not work.done() and not event.done()
    assert (tensor == 1).all()
    gate.set()
    event.wait()
    assert before.done() and work.done() and event.done()
    assert (tensor == comm.size).all()
    work.wait()
    work.wait()


@mpi
def test_without_a_stream_the_work_is_done(world):
    work = world.all_reduce(torch.ones(2))
    assert work.done()
    work.wait()


@mpi
def test_wait_event_orders_two_streams(stream):
    comm = stream.comm
    producer, consumer = stream, comm.new_stream()
    for _ in range(5):
        made = torch.zeros(4)
        gathered = torch.full((4 * comm.size,), -1.0)
        producer.enqueue(lambda: time.sleep(0.01))
        producer.enqueue(lambda made=made: made.fill_(comm.rank + 1))
        consumer.wait_event(producer.record())
        work = comm.all_gather(gathered, made, stream=consumer)
        later = comm.all_reduce(torch.ones(1), stream=producer)  # after the event: not waited for
        work.wait()
        assert torch.equal(gathered, torch.arange(1.0, comm.size + 1).repeat_interleave(4))
        later.wait()


@mpi
def test_wait_event_holds_back_only_what_comes_later(stream):
    """A Work is an event too, and an event may come from the same stream or be over."""
    comm, gate, log = stream.comm, threading.Event(), []
    other = comm.new_stream()
    blocked = stream.enqueue(lambda: (gate.wait(10), log.append("stream")))
    first = other.enqueue(lambda: log.append("before"))
    other.wait_event(blocked)
    second = other.enqueue(lambda: log.append("after"))
    first.wait()
    assert log == ["before"] and not second.done()
    gate.set()
    second.wait()
    assert log == ["before", "stream", "after"]
    over = stream.record()
    over.wait()
    for lane in (stream, other):
        lane.wait_event(over)
        lane.wait_event(lane.record())
        lane.synchronize()


@mpi
def test_waiting_on_a_stream_for_a_work_is_not_the_callers_wait(stream):
    """The tensors live on, and the trace knows when the caller waited, not when the other stream did."""
    comm = stream.comm
    other = comm.new_stream()
    tensor = torch.ones(100)
    alive = weakref.ref(tensor)
    with trace(comm) as log:
        work = comm.all_reduce(tensor, stream=stream)
    del tensor
    other.wait_event(work)
    other.synchronize()
    assert alive() is not None
    assert log.events[0].wait_start is None
    work.wait()
    assert log.events[0].wait_start is not None
    assert soon(lambda: alive() is None)


@pytest.mark.sizes(2)
@mpi
def test_two_streams_and_the_main_thread_at_once(mpi_world):
    """Three communicators in flight, every rank with delays of its own, 60 rounds of four operations."""
    n, delays = mpi_world.size, random.Random(mpi_world.rank)

    def rounds(comm, lane, seed, failures):
        generator = random.Random(seed)  # the same on all ranks
        for i in range(60):
            count, root = generator.randrange(1, 3000), generator.randrange(n)
            dtype = generator.choice([torch.float32, torch.bfloat16, torch.int32])
            nap = delays.random() * 2e-3 if delays.random() < 0.3 else 0
            if lane is None:
                time.sleep(nap)
            else:
                lane.enqueue(lambda nap=nap: time.sleep(nap))
            kind = generator.choice(["all_reduce", "all_gather", "broadcast", "sendrecv"])
            mine = torch.full((count,), comm.rank + i, dtype=dtype)
            if kind == "all_reduce":
                out, expected = mine, torch.full((count,), sum(range(n)) + n * i, dtype=dtype)
                work = comm.all_reduce(out, stream=lane)
            elif kind == "all_gather":
                out = torch.zeros(n * count, dtype=dtype)
                expected = torch.arange(i, i + n).to(dtype).repeat_interleave(count)
                work = comm.all_gather(out, mine, stream=lane)
            elif kind == "broadcast":
                out, expected = mine, torch.full((count,), root + i, dtype=dtype)
                work = comm.broadcast(out, root, stream=lane)
            else:
                out, expected = torch.zeros_like(mine), torch.full((count,), (comm.rank - 1) % n + i, dtype=dtype)
                work = comm.sendrecv(mine, (comm.rank + 1) % n, out, (comm.rank - 1) % n, stream=lane)
            del mine
            if generator.random() < 0.5:
                work.wait()
                if not torch.equal(out, expected):
                    failures.append((seed, i, kind))
            else:
                pending.setdefault(seed, []).append((work, out, expected, i, kind))

    pending, failures = {}, []
    with Communicator(mpi_world, name="a") as a, a.split(0, a.rank, name="b") as b:
        lanes = [(a, a.new_stream(), 1), (b, b.new_stream(), 2), (a, a.new_stream(), 3)]
        with ThreadPoolExecutor() as pool:
            others = [pool.submit(rounds, *lane, failures) for lane in lanes]
            rounds(b, None, 4, failures)
        for other in others:
            other.result()
        for seed, works in pending.items():
            for work, out, expected, i, kind in works:
                work.wait()
                if not torch.equal(out, expected):
                    failures.append((seed, i, kind))
    assert failures == []


@mpi
@pytest.mark.every_size
def test_every_operation_on_a_stream_with_none_where_it_is_due(stream):
    comm, n = stream.comm, stream.comm.size
    whole = torch.arange(2.0 * n)
    for root in range(n):
        part = torch.zeros(2)
        comm.scatter(part, whole if comm.rank == root else None, root, stream=stream)
        gathered = torch.zeros(2 * n) if comm.rank == root else None
        comm.gather(gathered, part, root, stream=stream).wait()
        assert gathered is None or torch.equal(gathered, whole)
        assert part.tolist() == [2 * comm.rank, 2 * comm.rank + 1]


# Errors


class Broken(Exception):
    pass


@mpi
def test_work_raises_what_failed_and_the_stream_stops_there(stream, monkeypatch):
    comm = stream.comm
    other = comm.new_stream()
    ran = []

    def fails(*args):
        raise Broken("cable cut")

    replace(monkeypatch, stream.transport, all_reduce=fails, broadcast=lambda *args: ran.append(args))
    early = comm.barrier(stream=stream)
    work = comm.all_reduce(torch.ones(2), stream=stream)
    late = comm.broadcast(torch.ones(2), stream=stream)
    event = stream.record()
    other.wait_event(event)
    dependent = other.enqueue(lambda: ran.append("dependent"))
    early.wait()
    for _ in range(2):
        with pytest.raises(Broken, match="cable cut"):
            work.wait()
    assert work.done()
    stopped = f"stream {stream.name} stopped at an earlier failure: cable cut"
    for wait in (late.wait, event.wait, stream.synchronize, comm.barrier(stream=stream).wait):
        with pytest.raises(CollectiveError, match=stopped):
            wait()
    with pytest.raises(CollectiveError, match="stopped at an earlier failure"):
        dependent.wait()
    assert ran == []
    tensor = torch.ones(2)  # the communicator itself, and a new stream, still work
    comm.all_reduce(tensor)
    comm.all_reduce(tensor, stream=comm.new_stream()).wait()
    assert (tensor == comm.size**2).all()
    comm.close()


@mpi
def test_failure_nobody_waits_for_is_told_by_close(stream, monkeypatch):
    comm = stream.comm

    def fails(*args):
        raise Broken

    replace(monkeypatch, stream.transport, all_reduce=fails)
    for _ in range(3):
        comm.all_reduce(torch.ones(2), stream=stream)
    with pytest.raises(CollectiveError, match="close: a collective failed on a stream, and nobody waited"):
        comm.close()
    comm.close()


@mpi
def test_any_number_of_threads_may_wait_for_one_work(stream):
    comm, gate, seen = stream.comm, threading.Event(), []
    stream.enqueue(lambda: gate.wait(10))
    tensor = torch.ones(2)
    work = comm.all_reduce(tensor, stream=stream)
    threads = [threading.Thread(target=lambda: (work.wait(), seen.append(tensor[0].item()))) for _ in range(8)]
    for thread in threads:
        thread.start()
    gate.set()
    for thread in threads:
        thread.join(10)
    assert seen == [comm.size] * 8


# How long tensors live


@mpi
@pytest.mark.parametrize("kind", ["tensor", "array"])
@pytest.mark.parametrize("keep", [True, False], ids=["work kept", "work dropped"])
def test_tensor_in_flight_is_kept_alive_and_then_freed(stream, kind, keep):
    comm, gate = stream.comm, threading.Event()
    stream.enqueue(lambda: gate.wait(10))
    owner = torch.ones(1000) if kind == "tensor" else np.ones(1000, np.float32)
    alive = weakref.ref(owner)
    work = comm.all_reduce(owner, stream=stream)
    del owner
    if not keep:
        del work
    gc.collect()
    assert alive() is not None
    gate.set()
    if keep:
        stream.synchronize()
        time.sleep(0.02)
        assert alive() is not None, "freed before wait()"
        work.wait()
    else:
        stream.synchronize()
    assert soon(lambda: alive() is None), "kept alive for ever"


@mpi
def test_memory_in_flight_is_not_given_to_others(stream):
    """Drop the only reference, then write into every block the allocator hands out: the sum must not notice."""
    comm, gate = stream.comm, threading.Event()
    count = 40_000
    result = torch.zeros(count)
    stream.enqueue(lambda: gate.wait(10))
    tensor = torch.ones(count)
    comm.all_reduce(tensor, stream=stream)
    last = stream.enqueue(lambda tensor=tensor: result.copy_(tensor))
    group_input = torch.full((count,), float(comm.rank))
    output = torch.zeros(comm.size * count)
    comm.all_gather(output, group_input, stream=stream)
    with comm.coalesce(stream=stream):
        theirs = torch.zeros(count)
        comm.send(torch.full((count,), 5.0 + comm.rank), (comm.rank + 1) % comm.size)
        comm.recv(theirs, (comm.rank - 1) % comm.size)
    del tensor, group_input
    poison = [torch.full((count,), float("nan")) for _ in range(50)]
    gate.set()
    last.wait()
    stream.synchronize()
    assert (result == comm.size).all()
    assert torch.equal(output, torch.arange(float(comm.size)).repeat_interleave(count))
    assert (theirs == 5 + (comm.rank - 1) % comm.size).all()
    assert len(poison) == 50


@mpi
def test_an_idle_stream_keeps_nothing(stream):
    comm = stream.comm
    tensor = torch.ones(10)
    alive = weakref.ref(tensor)
    comm.all_reduce(tensor, stream=stream).wait()
    del tensor
    assert soon(lambda: alive() is None)


# The end


@mpi
def test_close_finishes_what_is_in_flight(mpi_world):
    comm = Communicator(mpi_world)
    streams = [comm.new_stream(), comm.new_stream()]
    tensors = [torch.ones(5000) for _ in range(20)]
    for stream in streams:
        stream.enqueue(lambda: time.sleep(0.02 * (comm.rank + 1)))
    works = [comm.all_reduce(tensor, stream=streams[i % 2]) for i, tensor in enumerate(tensors)]
    comm.close()
    assert all(work.done() for work in works)
    assert all((tensor == comm.size).all() for tensor in tensors)
    works[0].wait()
    comm.close()
    for stream in streams:
        for call in (stream.record, stream.synchronize, lambda s=stream: s.enqueue(lambda: None)):
            with pytest.raises(CollectiveError, match=r"stream world/stream[12] is closed"):
                call()
        with pytest.raises(CollectiveError, match="closed"):
            stream.wait_event(Event())
        stream.close()
    with pytest.raises(CollectiveError, match="all_reduce: the communicator is closed"):
        comm.all_reduce(torch.ones(1), stream=streams[0])


@mpi
def test_no_thread_without_a_stream_and_none_after_close(mpi_world):
    before = set(threading.enumerate())  # some of which an earlier test left, and may end meanwhile
    comm = Communicator(mpi_world)
    comm.all_reduce(torch.ones(2))
    assert not set(threading.enumerate()) - before
    stream = comm.new_stream()
    assert stream.threaded and len(set(threading.enumerate()) - before) == 1
    comm.close()
    assert not set(threading.enumerate()) - before


# Without THREAD_MULTIPLE: the same program, the same results, on the caller's thread.

PROGRAM = """
import sys, threading
import mpi4py
mpi4py.rc.thread_level = sys.argv[1]
from mpi4py import MPI
import torch
from commengine import CollectiveError, Communicator, trace

def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")  # in one piece
    sys.stdout.flush()

comm = Communicator(MPI.COMM_WORLD)
one, two = comm.new_stream(), comm.new_stream()
n, rank = comm.size, comm.rank
say("threaded", one.threaded, threading.active_count())
with trace(comm) as log:
    tensor, half = torch.arange(6.0) + rank, torch.full((20000,), 0.1 * (rank + 1), dtype=torch.bfloat16)
    works = [comm.all_reduce(tensor, stream=one), comm.all_reduce(half, "avg", stream=one)]
    two.wait_event(one.record())
    gathered = torch.zeros(n * 6)
    works.append(comm.all_gather(gathered, tensor, stream=two))
    theirs = torch.zeros(2)
    with comm.coalesce(stream=two):
        comm.send(torch.full((2,), float(rank)), (rank + 1) % n)
        comm.recv(theirs, (rank - 1) % n)
    for work in works:
        work.wait()
    two.synchronize()
results = [tensor.tolist(), half.unique().tolist(), gathered.tolist(), theirs.tolist()]
if rank == 0:
    say("results", results)
    say("hidden", [event.hidden_seconds for event in log.events] == [0.0] * 4)
one.enqueue(lambda: 1 / 0)
for wait in (one.synchronize, comm.barrier(stream=one).wait):
    try:
        wait()
    except CollectiveError as error:
        say("stopped" if "division by zero" in str(error) else error)
comm.close()
try:
    comm.barrier(stream=one)
except CollectiveError as error:
    say("closed" if "is closed" in str(error) else error)
"""


@pytest.mark.slow
def test_inline_streams_give_the_same_results():
    said = {}
    for level in ("serialized", "multiple"):
        done = mpirun.run(2, "-c", PROGRAM, level)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        said[level] = next(line for line in lines if line.startswith("results"))
        threaded = "threaded True 3" if level == "multiple" else "threaded False 1"
        assert lines.count(threaded) == 2, lines
        assert lines.count("stopped") == 4 and lines.count("closed") == 2, lines
        assert lines.count("hidden True") == (level == "serialized"), lines
    assert said["serialized"] == said["multiple"]


@pytest.mark.mpi(min_size=2)
def test_an_error_while_a_failure_is_told_loses_neither_the_failure_nor_the_worker(mpi_world, monkeypatch):
    with Communicator(mpi_world, device="cpu", switch_points=ALWAYS) as comm:
        stream, x = comm.new_stream(), torch.ones(5000)
        comm.all_reduce(x, stream=stream).wait()
        comm.barrier()
        if comm.rank == 0:
            stop, calls = stream.transport.stop, []

            def fails_once(reason):
                calls.append(reason)
                if len(calls) == 1:
                    raise MemoryError
                stop(reason)

            monkeypatch.setattr(stream.transport, "stop", fails_once)
            monkeypatch.setattr(all_reduce, "reduce_two" if comm.size == 2 else "_reduce_rows", lambda *_: 1 / 0)
        works = [comm.all_reduce(x, stream=stream) for _ in range(3)]
        for number, work in enumerate(works):
            if number or comm.rank == 0:
                with pytest.raises(CollectiveError if number or comm.rank else ZeroDivisionError):
                    work.wait()
