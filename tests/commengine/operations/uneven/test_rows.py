"""Operations with numbers of rows: where their tensors lie, what the ranks compare, and copies from anywhere."""

import random
import time

import pytest
import torch

from commengine import CollectiveError, CollectiveMismatch, Communicator, trace

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.sizes(2, 4)]

CASES = 60


@pytest.fixture(scope="module")
def shared(mpi_world):
    """A communicator that has a window, and the window."""
    with Communicator(mpi_world, device="cpu", timeout=60) as comm:
        yield comm, comm.empty((1 << 16,), torch.float32)


def test_windows_carry_rows_from_anywhere_to_anywhere(shared):
    """The inputs of all ranks lie in a window, at other places; some are empty, and some calls have one elsewhere."""
    comm, window = shared
    n, me, draw = comm.size, comm.rank, random.Random(5)
    for case in range(CASES):
        row = draw.choice([(), (3,), (2, 5)])
        counts = [[draw.choice((0, 1, 2, 7, 300)) for _ in range(n)] for _ in range(n)]
        if draw.random() < 0.2:
            counts[draw.randrange(n)] = [0] * n
        starts = [draw.randrange(70) for _ in range(n)]
        private = draw.choice((None, None, draw.randrange(n)))
        inputs = [torch.arange(sum(c)).float().view(-1, *[1] * len(row)).expand(-1, *row) + 4096 * k
                  for k, c in enumerate(counts)]  # fmt: skip
        mine = inputs[me].contiguous()
        if private != me:
            mine = window[starts[me] :][: mine.numel()].view(mine.shape).copy_(mine)
        right = torch.cat([one.split(c)[me] for one, c in zip(inputs, counts, strict=True)])
        received = [c[me] for c in counts]
        output = torch.full((len(right) + 2, *row), -1.0)
        comm.all_to_all_v(output[: len(right)], mine, received, counts[me])
        assert torch.equal(output[: len(right)], right) and output[len(right) :].eq(-1).all(), case
        output.fill_(-1.0)
        assert comm.exchange_rows(output, mine, counts[me]) == received
        assert torch.equal(output[: len(right)], right) and output[len(right) :].eq(-1).all(), case
        mine.fill_(-2.0)  # no rank reads it any more
        comm.barrier()
        assert torch.equal(output[: len(right)], right)


def test_a_window_sends_no_message(shared):
    comm, window = shared
    counts = [5] * comm.size
    x, y = window[: 5 * comm.size], torch.empty(5 * comm.size)
    comm.all_to_all_v(y, x, counts, counts)
    comm.all_gather_v(y, x[:5], counts)
    calls = comm._calls.host.wire.calls
    comm._calls.host.wire.calls = None  # whoever needs MPI fails
    try:
        comm.all_to_all_v(y, x, counts, counts)
        comm.all_gather_v(y, x[:5], counts)
        assert comm.exchange_rows(y, x, counts) == counts
    finally:
        comm._calls.host.wire.calls = calls


def test_rows_that_do_not_fit_are_an_error_on_every_rank(shared):
    """Also on ranks whose own numbers fit; the next call is right. x lies in a window."""
    comm, window = shared
    n, me = comm.size, comm.rank
    x = window[: 2 * n].fill_(me)
    wrong = [3 if me == 1 and rank == 0 else 2 for rank in range(n)]
    y = torch.empty(sum(wrong))
    said = "rank 0 sends 2 rows, and output_rows say 3" if me == 1 else "rank 1 found numbers of rows that do not fit"
    with pytest.raises(CollectiveMismatch, match=said):
        comm.all_to_all_v(y, x, wrong, [2] * n)
    with pytest.raises(CollectiveMismatch, match="rows come" if me == 1 else "rank 1 found"):
        comm.exchange_rows(y[: n if me == 1 else None], x, [2] * n)
    rows = [2] * n
    rows[1 - me % 2] += 1 + me
    with pytest.raises(CollectiveMismatch, match=r"the ranks give \[.*\] rows, and rows say"):
        comm.all_gather_v(torch.empty(sum(rows)), x[: rows[me]], rows)
    comm.all_to_all_v(y[: 2 * n], x, [2] * n, [2] * n)
    assert y[: 2 * n].tolist() == [rank for rank in range(n) for _ in range(2)]


@pytest.fixture(params=["read", "forbidden"])
def large_ways(shared, request, monkeypatch):
    """Large private tensors are read where they lie, or go by MPI where the kernel forbids it."""
    comm, _ = shared
    memory = comm._calls.host.open()
    if memory.peers is None:
        pytest.skip("the kernel does not let a rank read another one's memory")
    if request.param == "forbidden":
        monkeypatch.setattr(memory, "peers", None)
        comm._calls.host._runs.clear(), comm._calls.host.known.clear()
    yield
    comm._calls.host._runs.clear(), comm._calls.host.known.clear()


@pytest.mark.parametrize("each", [2, 400_000])
def test_rows_of_private_tensors_that_do_not_fit_are_an_error_on_their_rank(shared, large_ways, each):
    """The other ranks have the rows, and wait for nobody."""
    comm, _ = shared
    n, me = comm.size, comm.rank
    x = torch.full((each * n,), float(me))
    for rank in range(n):
        wrong = [each + (me == rank and other == 0) for other in range(n)]
        y = torch.zeros(sum(wrong))
        if me == rank:
            with pytest.raises(CollectiveMismatch, match=f"rank 0 sends {each} rows, and output_rows say {each + 1}"):
                comm.all_to_all_v(y, x, wrong, [each] * n)
            assert not y.any()
        else:
            comm.all_to_all_v(y, x, wrong, [each] * n)
            assert torch.equal(y, torch.arange(n).float().repeat_interleave(each))


def test_large_rows_of_private_tensors(shared, large_ways):
    """Some ranks have their inputs in windows, some have small ones, some none; they begin at odd places."""
    comm, window = shared
    n, me, draw = comm.size, comm.rank, random.Random(7)
    for case in range(12):
        counts = [[draw.choice((0, 1, 900, 130_999, 300_000)) for _ in range(n)] for _ in range(n)]
        if case % 3 == 0:  # one rank's input is small, and lies in a window
            counts[case % n] = [draw.randrange(5000) for _ in range(n)]
        starts = [draw.randrange(5) for _ in range(n)]
        inputs = [torch.arange(sum(c)) % 8191 + 10_000.0 * k for k, c in enumerate(counts)]
        mine = torch.empty(len(inputs[me]) + 5)[starts[me] :][: len(inputs[me])].copy_(inputs[me])
        if case % 3 == 0 and me == case % n:
            mine = window[: len(mine)].copy_(mine)
        right = torch.cat([one.split(c)[me] for one, c in zip(inputs, counts, strict=True)])
        output = torch.empty_like(right)
        comm.all_to_all_v(output, mine, [c[me] for c in counts], counts[me])
        mine.fill_(-1)
        assert torch.equal(output, right), case


def test_an_output_that_is_too_small_stops_no_other_rank(mpi_world):
    """Without windows the others get their rows, and that rank an error."""
    with Communicator(mpi_world, device="cpu", timeout=30) as comm:
        n, me = comm.size, comm.rank
        x, y = torch.full((3 * n,), float(me)), torch.zeros(3 * n)
        if me == n - 1:
            with pytest.raises(CollectiveError, match=rf"{3 * n} rows come \(\[3, 3.*\]\), and output is \[2\]"):
                comm.exchange_rows(y[:2], x, [3] * n)
        else:
            assert comm.exchange_rows(y, x, [3] * n) == [3] * n
            assert y.tolist() == [rank for rank in range(n) for _ in range(3)]


def test_checked_communicators_compare_numbers_of_rows(mpi_world):
    with Communicator(mpi_world, device="cpu", checked=True) as comm:
        n, me = comm.size, comm.rank
        rows = [2 + (me == 0)] * n
        with pytest.raises(CollectiveError, match=r"rank 0 sends 3 rows, and output_rows say 2"):
            comm.all_to_all_v(torch.empty(2 * n), torch.zeros(sum(rows)), [2] * n, rows)
        with pytest.raises(CollectiveMismatch, match="all_gather_v"):
            comm.all_gather_v(torch.empty(sum(rows)), torch.zeros(rows[0]), rows)
        dtype = torch.float64 if me else torch.float32
        with pytest.raises(CollectiveMismatch, match="float64"):
            comm.all_to_all_v(torch.empty(n, dtype=dtype), torch.zeros(n, dtype=dtype), [1] * n, [1] * n)
        assert comm.exchange_rows(torch.empty(9 * n), torch.zeros(sum(range(n))), range(n)) == [me] * n


def test_a_trace_has_the_numbers_of_rows(shared):
    comm, window = shared
    n, me = comm.size, comm.rank
    sent, received = [rank + 1 for rank in range(n)], [me + 1] * n
    x, y = window[: 2 * sum(sent)].view(-1, 2), torch.empty(sum(received) + 2 * n, 2)
    with trace(comm) as log:
        comm.exchange_rows(y, x, sent)
        comm.all_to_all_v(y[: sum(received)], x, received, sent)
        comm.all_gather_v(y[: 2 * n], x[:2], [2] * n)
        comm.barrier()
    assert [tuple(map(tuple, event.rows)) for event in log.events] == [
        (tuple(received), tuple(sent)), (tuple(received), tuple(sent)), ((2,) * n,), (),
    ]  # fmt: skip
    assert log.events[1].bytes == x.nbytes and log.events[1].buffers[0] == (8 * sum(received), False)


def test_wrong_arguments(shared):
    comm, _ = shared
    n = comm.size
    one, two = torch.zeros(n), torch.zeros(n, 2)
    even, cases = [1] * n, []
    cases.append((lambda: comm.all_to_all_v(one, two, even, even), "must have rows of one shape"))
    cases.append((lambda: comm.all_to_all_v(one, one, even, even), "share memory"))
    cases.append((lambda: comm.all_to_all_v(one, one.clone(), even, even[1:]), f"must be {n} numbers of rows"))
    cases.append((lambda: comm.all_to_all_v(one, one.clone(), [2] * n, even), rf"adds up to {2 * n} rows, and output"))
    cases.append((lambda: comm.all_to_all_v(one, one.clone(), even, [-1] * n), "0 or more"))
    cases.append((lambda: comm.all_to_all_v(one, one.clone(), even, [0.5] * n), "must be"))
    cases.append((lambda: comm.all_to_all_v(one.double(), one.clone(), even, even), "float64 and torch.float32"))
    cases.append((lambda: comm.all_to_all_v(torch.zeros(()), torch.zeros(()), even, even), "rows of one shape"))
    cases.append((lambda: comm.all_gather_v(one, torch.zeros(2), even), r"input is \[2\], and rows say 1 of this rank"))
    cases.append((lambda: comm.exchange_counts([1]), f"there are 1 counts for {n} ranks"))
    cases.append((lambda: comm.exchange_counts([0.5] * n), "must be integers"))
    cases.append((lambda: comm.all_to_all_v(one, one.clone(), [], even), f"must be {n} numbers of rows"))
    cases.append((lambda: comm.all_to_all_v(one, one.clone(), even, [1.0] * n), "must be"))
    comm.all_to_all_v(one, one.clone(), iter(even), torch.tensor(even))  # now its form is known
    for call, words in cases:
        for _ in range(2):
            with pytest.raises(CollectiveError, match=words):
                call()


def test_counts_of_one_call_are_the_numbers_of_the_next(mpi_world):
    """Without a timeout, where a known form skips the checks; and a number without rows does not enter a call."""
    with Communicator(mpi_world, device="cpu") as comm:
        n = comm.size
        x, y = torch.arange(2.0 * n), torch.zeros(2 * n)
        for _ in range(3):
            counts = comm.exchange_rows(y, x, [2] * n)
            comm.all_to_all_v(y, x, counts, [2] * n)
            assert counts == [2] * n and type(counts) is list
        with pytest.raises(CollectiveError, match="adds up to"):
            comm.all_to_all_v(torch.zeros(4 * n), x, counts, [2] * n)
        for call in (lambda: comm.exchange_rows(torch.tensor(0.0), torch.zeros(0), [0] * n),
                     lambda: comm.all_to_all_v(torch.tensor(0.0), torch.tensor(1.0), [0] * n, [0] * n)):  # fmt: skip
            with pytest.raises(CollectiveError, match="rows of one shape"):
                call()
        with pytest.raises(CollectiveError, match="64 bits"):
            comm.exchange_counts([2**63] * n)
        comm.all_to_all_v(y, x, counts, [2] * n)


def test_a_call_with_an_answer_is_refused_in_a_block(shared):
    comm, _ = shared
    ones = [1] * comm.size
    with comm.coalesce():
        with pytest.raises(CollectiveError, match="inside coalesce"):
            comm.exchange_counts(ones)
        with pytest.raises(CollectiveError, match="inside coalesce"):
            comm.exchange_rows(torch.empty(comm.size), torch.ones(comm.size), ones)
        x, y = torch.full((comm.size,), float(comm.rank)), torch.empty(comm.size)
        comm.all_to_all_v(y, x, ones, ones)
    assert y.tolist() == list(range(comm.size))


def test_ranks_that_come_late_wait_for_nobodys_memory(shared):
    """A rank may write its input as soon as the call has returned, however late another one reads it."""
    comm, window = shared
    n, me = comm.size, comm.rank
    x, y = window[: 4 * n], torch.empty(4 * n)
    for turn in range(5):
        x.fill_(10 * turn + me)
        if me == turn % n:
            time.sleep(0.01)
        comm.all_to_all_v(y, x, [4] * n, [4] * n)
        x.fill_(-1)
        assert y.tolist() == [10 * turn + rank for rank in range(n) for _ in range(4)]
