"""``checked=True``: ranks that ask for different collectives all learn who asked for what, and go on."""

import pytest
import torch

from commengine import CollectiveError, CollectiveMismatch, Communicator

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.every_size]

ONES = torch.ones


@pytest.fixture(scope="module")
def comm(mpi_world):
    with Communicator(mpi_world, checked=True) as comm:
        streams = [comm.new_stream(), comm.new_stream()]  # a stream that is dropped takes no more calls
        yield comm
        comm.close()
        del streams


def coalesced(comm, *calls):
    with comm.coalesce():
        for name, *args in calls:
            getattr(comm, name)(*args)


# id: what the last rank does, what all others do, and what each side is said to have asked for
MISMATCHES = {
    "operation": (
        lambda c: c.broadcast(ONES(4), 0),
        lambda c: c.all_reduce(ONES(4)),
        "broadcast(float32 [4], root=0)",
        "all_reduce(float32 [4], op=sum)",
    ),
    "barrier": (
        lambda c: c.barrier(),
        lambda c: c.all_gather(ONES(2 * c.size), ONES(2)),
        "barrier()",
        "all_gather(float32 [SIZE*2])",
    ),
    "shape": (
        lambda c: c.all_reduce(ONES(2, 3)),
        lambda c: c.all_reduce(ONES(3, 2)),
        "all_reduce(float32 [2, 3], op=sum)",
        "all_reduce(float32 [3, 2], op=sum)",
    ),
    "empty": (
        lambda c: c.broadcast(ONES(0)),
        lambda c: c.broadcast(ONES(())),
        "broadcast(float32 [0], root=0)",
        "broadcast(float32 [], root=0)",
    ),
    "rows": (
        lambda c: c.reduce_scatter(ONES(3), ONES(3 * c.size)),
        lambda c: c.reduce_scatter(ONES(2), ONES(2 * c.size)),
        "reduce_scatter(float32 [SIZE*3], op=sum)",
        "reduce_scatter(float32 [SIZE*2], op=sum)",
    ),
    "dtype": (
        lambda c: c.all_reduce(ONES(4, dtype=torch.bfloat16)),
        lambda c: c.all_reduce(ONES(4, dtype=torch.float16)),
        "all_reduce(bfloat16 [4], op=sum)",
        "all_reduce(float16 [4], op=sum)",
    ),
    "op": (
        lambda c: c.all_reduce(ONES(4), "max"),
        lambda c: c.all_reduce(ONES(4), "min"),
        "all_reduce(float32 [4], op=max)",
        "all_reduce(float32 [4], op=min)",
    ),
    "root": (
        lambda c: c.reduce(ONES(4), 1, "prod"),
        lambda c: c.reduce(ONES(4), 0, "prod"),
        "reduce(float32 [4], op=prod, root=1)",
        "reduce(float32 [4], op=prod, root=0)",
    ),
    "gather root": (
        lambda c: c.gather(ONES(2 * c.size), ONES(2), c.size - 1),
        lambda c: c.gather(ONES(2 * c.size), ONES(2), 0),
        "gather(float32 [2], root=LAST)",
        "gather(float32 [2], root=0)",
    ),
    "stream": (
        lambda c: c.all_reduce(ONES(4), stream=c._streams[0]),
        lambda c: c.all_reduce(ONES(4), stream=c._streams[1]),
        "all_reduce(float32 [4], op=sum, stream 1)",
        "all_reduce(float32 [4], op=sum, stream 2)",
    ),
    "no stream": (
        lambda c: c.barrier(),
        lambda c: c.barrier(stream=c._streams[0]),
        "barrier()",
        "barrier(stream 1)",
    ),
    "coalesced op": (
        lambda c: coalesced(c, ("all_reduce", ONES(4), "max")),
        lambda c: coalesced(c, ("all_reduce", ONES(4), "min")),
        "all_reduce(float32 [4], op=max)",
        "all_reduce(float32 [4], op=min)",
    ),
    "coalesced order": (
        lambda c: coalesced(c, ("barrier",), ("broadcast", ONES(3), 1)),
        lambda c: coalesced(c, ("broadcast", ONES(3), 1), ("barrier",)),
        "barrier()",
        "broadcast(float32 [3], root=1)",
    ),
}


def ranks(numbers):
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


@pytest.mark.parametrize("case", MISMATCHES)
def test_every_rank_is_told_who_asked_for_what(comm, case):
    last, others, by_last, by_others = MISMATCHES[case]
    with pytest.raises(CollectiveMismatch) as caught:
        (last if comm.rank == comm.size - 1 else others)(comm)
    for number in (2, 3):
        by_last = by_last.replace(f"SIZE*{number}", str(number * comm.size))
        by_others = by_others.replace(f"SIZE*{number}", str(number * comm.size))
    by_last = by_last.replace("LAST", str(comm.size - 1))
    assert str(caught.value) == (
        f"rank {comm.rank} of group 'world' (size {comm.size}): the ranks disagree: "
        f"{ranks(range(comm.size - 1))} asked for {by_others}; {ranks([comm.size - 1])} asked for {by_last}"
    )
    assert isinstance(caught.value, CollectiveError)
    assert_works(comm)


def assert_works(comm):
    for stream in (None, *comm._streams):
        tensor = torch.tensor([comm.rank, 1])
        comm.all_reduce(tensor, stream=stream).wait()
        assert tensor.tolist() == [sum(range(comm.size)), comm.size]


def test_each_rank_something_else(comm):
    with pytest.raises(CollectiveMismatch) as caught:
        comm.all_reduce(ONES(comm.rank + 1))
    for rank in range(comm.size):
        assert f"rank {rank} asked for all_reduce(float32 [{rank + 1}], op=sum)" in str(caught.value)
    assert_works(comm)


def test_agreeing_calls_pass(comm):
    n = comm.size
    whole, part = torch.arange(2.0 * n), torch.zeros(2)
    for stream in (None, comm._streams[0]):
        comm.scatter(part, whole if comm.rank == 0 else None, 0, stream=stream).wait()
        assert part.tolist() == [2 * comm.rank, 2 * comm.rank + 1]
        gathered = torch.zeros(2 * n) if comm.rank == n - 1 else None
        comm.gather(gathered, part, n - 1, stream=stream).wait()
        assert gathered is None or torch.equal(gathered, whole)
        with comm.coalesce(stream=stream):  # the root alone has an output: no mismatch
            comm.gather(gathered, part, n - 1)
            comm.reduce(ONES(2), n - 1, "max")
            comm.barrier()
        if stream is not None:
            stream.synchronize()
        assert gathered is None or torch.equal(gathered, whole)


def test_messages_need_no_agreement(comm):
    """They are between two ranks: the others do not take part."""
    tensor = torch.tensor([float(comm.rank)])
    if comm.rank == 0:
        comm.send(tensor, 1)
    elif comm.rank == 1:
        comm.recv(tensor, 0)
        assert tensor.item() == 0
    assert_works(comm)


def test_split_groups_are_checked_too_and_by_themselves(comm):
    """The two halves disagree about everything, and only one of them has a mismatch inside."""
    half = comm.rank * 2 // comm.size
    with comm.split(half, name=f"half {half}") as part:
        assert part.checked
        part.all_reduce(ONES(half + 1))
        if half == 0 and part.size > 1:
            with pytest.raises(CollectiveMismatch, match=rf"rank {part.rank} of group 'half 0' \(size {part.size}\)"):
                part.all_reduce(ONES(part.rank + 1))
        part.barrier()
    assert_works(comm)
    with comm.split(0) as everybody:
        with pytest.raises(CollectiveMismatch, match="the ranks disagree"):
            everybody.broadcast(ONES(2), 1 if everybody.rank == 0 else 0)
        assert_works(everybody)


def test_stream_goes_on_after_a_mismatch(comm):
    """Nothing was enqueued: the stream did not fail."""
    stream = comm._streams[0]
    tensor = torch.ones(3)
    work = comm.all_reduce(tensor, stream=stream)
    with pytest.raises(CollectiveMismatch):
        comm.all_reduce(ONES(comm.rank + 1), stream=stream)
    work.wait()
    assert (tensor == comm.size).all()
    stream.synchronize()
    assert_works(comm)


def test_unchecked_communicator_sends_nothing_extra(mpi_world, monkeypatch):
    import commengine.calls.dispatch

    def agree(*args):
        raise AssertionError("asked for agreement")

    monkeypatch.setattr(commengine.calls.dispatch, "agree", agree)
    with Communicator(mpi_world) as plain:
        plain.all_reduce(ONES(2))
        with plain.coalesce():
            plain.barrier()


@pytest.mark.mpi(min_size=2)
def test_description_longer_than_its_record(mpi_world):
    with Communicator(mpi_world, checked=True) as comm:
        tensor = torch.ones([1] * 60 + [2] + [1] * 60)
        with pytest.raises(CollectiveMismatch):
            comm.all_reduce(tensor, "sum" if comm.rank == 0 else "max")
        comm.all_reduce(tensor)


@pytest.mark.parametrize("checked", [False, True])
def test_numbers_of_all_ranks(mpi_world, checked):
    drawn = [
        [int(n) for n in torch.randint(-(2**62), 2**62, (5,), generator=torch.Generator().manual_seed(rank))]
        for rank in range(mpi_world.size)
    ]
    with Communicator(mpi_world, checked=checked) as comm:
        columns = list(zip(*drawn, strict=True))
        assert comm.extremes(drawn[comm.rank]) == ([*map(min, columns)], [*map(max, columns)])
        assert comm.extremes([]) == ([], [])
        for wrong in (2**63, -(2**63), 1.5, None):
            with pytest.raises(CollectiveError, match=r"(extremes|each_number).* must be integers below 2\^63 in size"):
                comm.extremes([1, wrong]) if wrong == 2**63 else comm.each_number(wrong)
        assert comm.each_number(drawn[comm.rank][0]) == list(columns[0])
    with pytest.raises(CollectiveError, match="closed"):
        comm.extremes([1])
