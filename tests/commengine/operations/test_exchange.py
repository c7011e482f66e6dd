"""Messages that are prepared once: against the values that each rank must get, on every kind of stream."""

import gc
import warnings

import pytest
import torch

from commengine import CollectiveError, Communicator, trace

pytestmark = pytest.mark.mpi(min_size=2)

DTYPES = [torch.float32, torch.complex128, torch.bool, torch.bfloat16, torch.int64]
LARGE = 1 << 18  # floats: 1 MB, which no MPI sends before the receiver is there


@pytest.fixture(params=["direct", "stream", "messages", "timeout"])
def lane(request, mpi_world):
    """A communicator and the stream of an exchange."""
    options = {"timeout": 60.0} if request.param == "timeout" else {}
    with Communicator(mpi_world, device="cpu", **options) as comm:
        made = None
        if request.param in ("stream", "messages"):
            made = comm.new_stream(threaded=request.param == "stream")
        yield comm, made


def drawn(shape, dtype, *seed):
    generator = torch.Generator().manual_seed(hash(seed) % 2**31)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def ring(comm, stream, count=5, shape=(3, 4)):
    """An exchange with both neighbours, of every dtype: how to fill what is sent, the exchange, and its check."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sends = [(torch.empty(shape, dtype=dtype), right) for dtype in DTYPES[:count]]
    receives = [(torch.empty(shape, dtype=dtype), left) for dtype in DTYPES[:count]]
    sends.append((torch.empty(LARGE), left))
    receives.append((torch.empty(LARGE), right))
    made = comm.exchange(sends, receives, stream=stream)

    def fill(turn):
        for number, (tensor, peer) in enumerate(sends):
            tensor.copy_(drawn(tensor.shape, tensor.dtype, comm.rank, peer, number, turn))

    def check(turn):
        for number, (tensor, peer) in enumerate(receives):
            expected = drawn(tensor.shape, tensor.dtype, peer, comm.rank, number, turn)
            assert torch.equal(tensor, expected), (number, turn)

    return fill, made, check


def test_each_start_sends_what_the_tensors_hold_then(lane):
    comm, stream = lane
    fill, made, check = ring(comm, stream)
    other_fill, other, other_check = ring(comm, stream, count=1)
    for turn in range(4):
        fill(turn)
        other_fill(turn + 10)
        works = made.start(), other.start()
        comm.all_reduce(torch.ones(4))  # beside the messages
        for work in works:
            work.wait()
            assert work.done()
        check(turn)
        other_check(turn + 10)


def test_an_exchange_matches_sends_and_receives_of_the_same_stream(lane):
    comm, stream = lane
    peer = comm.size - 1 - comm.rank
    if peer == comm.rank:
        return
    mine, got = torch.full((3,), float(comm.rank)), torch.zeros(3)
    if comm.rank < peer:
        comm.exchange([(mine, peer)], [(got, peer)], stream=stream).start().wait()
    else:
        with comm.coalesce(stream=stream):
            sent = comm.send(mine, peer)
            comm.recv(got, peer)
        sent.wait()
    assert torch.equal(got, torch.full((3,), float(peer)))


def test_an_exchange_in_a_block_starts_with_the_other_messages(mpi_world):
    with Communicator(mpi_world, device="cpu") as comm:
        fill, made, check = ring(comm, None)
        fill(1)
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        more = torch.zeros(1)
        with comm.coalesce():
            comm.send(torch.tensor([comm.rank + 0.5]), right)
            comm.recv(more, left)
            made.start()
        check(1)
        assert more.item() == left + 0.5


def test_without_messages_it_does_nothing(lane):
    comm, stream = lane
    comm.exchange([], [], stream=stream).start().wait()


def test_autograd_sees_what_an_exchange_writes(mpi_world):
    with Communicator(mpi_world, device="cpu") as comm:
        x = torch.ones(3, requires_grad=True)
        got = torch.ones(3)
        y = (x * got).sum()
        comm.exchange([(torch.ones(3), (comm.rank + 1) % comm.size)], [(got, (comm.rank - 1) % comm.size)]).start()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


@pytest.mark.parametrize("sent", [torch.zeros(3), torch.zeros(5), torch.zeros(4, dtype=torch.int32)], ids=str)
def test_a_message_of_another_length_or_dtype_is_an_error_of_its_rank(lane, sent):
    comm, stream = lane
    got, right, left = torch.zeros(4), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    wrong = comm.exchange([(sent if comm.rank == 0 else torch.zeros(4), right)], [(got, left)], stream=stream)
    if comm.rank == 1:
        with pytest.raises(CollectiveError, match=r"exchange: recv of 4 .* from rank 0 got a (longer )?message"):
            wrong.start().wait()
    else:
        wrong.start().wait()
    if stream is None:  # the ranks are in step
        fill, made, check = ring(comm, stream)
        fill(3)
        made.start()
        check(3)


@pytest.mark.parametrize("verb", ["recv", "sendrecv", "coalesce"])
def test_the_dtype_of_every_message_is_compared(mpi_world, verb):
    with Communicator(mpi_world, device="cpu") as comm:
        if comm.rank > 1:
            return
        peer, sent, got = 1 - comm.rank, torch.zeros(4), torch.zeros(4)
        if comm.rank == 0:
            got = got.to(torch.int32)
        for _known in range(2):  # the second call is of a known form
            if verb == "recv":
                if comm.rank == 1:
                    comm.send(sent, peer)
                    continue
                with pytest.raises(
                    CollectiveError, match=r"of torch.int32 from rank 1 got a message of 4 of torch\.float32"
                ):
                    comm.recv(got, peer)
                continue
            with pytest.raises(CollectiveError, match=r"torch\.int32") if comm.rank == 0 else trace():
                if verb == "sendrecv":
                    comm.sendrecv(sent, peer, got, peer)
                else:
                    with comm.coalesce():
                        comm.send(sent, peer)
                        comm.recv(got, peer)


def test_bad_arguments(mpi_world):
    with Communicator(mpi_world, device="cpu") as comm, Communicator(mpi_world, device="cpu") as other:
        one = torch.zeros(8)
        for sends, receives, words in (
            ([(one, comm.size)], [], f"the rank of a message={comm.size} is not a rank"),
            ([(one[::2], 0)], [], "a tensor to send .* is not contiguous"),
            ([(one[:4], 0)], [(one[2:6], 0)], "messages 1 and 2 of the exchange.* touch the same memory"),
            ([], [(one[:4], 0), (one[3:], 0)], "touch the same memory"),
            ([one], [], "sends are pairs of a tensor and a rank"),
            ([], None, "recvs are pairs of a tensor and a rank"),
        ):
            with pytest.raises(CollectiveError, match=words):
                comm.exchange(sends, receives)
        stream = other.new_stream(threaded=False)
        with pytest.raises(CollectiveError, match="was not made by this communicator"):
            comm.exchange([(one, 0)], [], stream=stream)
        fill, made, _ = ring(other, stream)
        fill(0)
        stream.close()
        with pytest.raises(CollectiveError, match="is closed"):
            made.start()


def test_memory_that_moves_is_refused(mpi_world):
    with Communicator(mpi_world, device="cpu") as comm:
        sent, got = torch.zeros(4), torch.zeros(4)
        made = comm.exchange([(sent, (comm.rank + 1) % comm.size)], [(got, (comm.rank - 1) % comm.size)])
        made.start()
        got.set_(torch.zeros(4))
        with pytest.raises(CollectiveError, match="memory of a tensor has moved"):
            made.start()
        comm.barrier()  # nothing was sent


@pytest.mark.parametrize("options", [{}, {"timeout": 60.0}, {"checked": True}], ids=str)
def test_an_exchange_keeps_neither_its_communicator_nor_its_stream(mpi_world, options):
    comm = Communicator(mpi_world, device="cpu", **options)
    fill, made, _ = ring(comm, None)
    stream = comm.new_stream(threaded=False)
    _, other, _ = ring(comm, stream)
    with pytest.warns(ResourceWarning, match="dropped"):
        del stream
    with pytest.raises(CollectiveError, match="the stream of this exchange was dropped"):
        other.start()
    fill(0)
    made.start()
    with warnings.catch_warnings(action="ignore"):
        del comm, fill, _
        gc.collect()
    with pytest.raises(CollectiveError, match="the communicator of this exchange was dropped"):
        made.start()


def test_messages_of_one_way_match_in_their_order(mpi_world):
    with Communicator(mpi_world, device="cpu") as comm:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        got = [torch.zeros(2) for _ in range(5)]
        made = comm.exchange([(torch.full((2,), float(n)), right) for n in range(5)], [(one, left) for one in got])
        for _ in range(3):
            made.start()
            assert [one[0].item() for one in got] == [0, 1, 2, 3, 4]


def test_one_start_at_a_time(mpi_world):
    with Communicator(mpi_world, device="cpu") as comm:
        stream = comm.new_stream(threaded=False)
        fill, made, check = ring(comm, stream)
        fill(0)
        work = made.start()
        with pytest.raises(CollectiveError, match="is under way: wait for it"):
            made.start()
        work.wait()
        check(0)
        fill(1)
        made.start().wait()
        check(1)


def test_what_is_dropped_is_given_back(mpi_world):
    with Communicator(mpi_world, device="cpu") as comm:
        wire = comm._host.wire
        for turn in range(8):
            fill, made, check = ring(comm, None)
            fill(turn)
            made.start()
            check(turn)
            del fill, made, check
            assert len(wire.prepared) == 1
        ring(comm, None)
    assert wire.prepared == {}


def test_a_trace_has_one_event_for_each_start(mpi_world):
    with Communicator(mpi_world, device="cpu") as comm:
        fill, made, check = ring(comm, None)
        fill(0)
        with trace(comm) as events:
            made.start()
            made.start()
        check(0)
        assert [(one.operation, len(one.peers)) for one in events.events] == [("exchange", min(2, comm.size - 1))] * 2
