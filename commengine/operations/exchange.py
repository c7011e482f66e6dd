"""Messages that start together, in no order: those of a coalesce() block, and a set that is prepared once."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias

from torch import Tensor

from commengine.device.nccl import NcclWire
from commengine.errors import SettledError, call_error
from commengine.host.polling import keep, land
from commengine.host.wire import MpiWire
from commengine.mpi import load_mpi
from commengine.stream import DONE, Stream, Work

from .checks import Caller, TensorLike, check_rank, checked_tensor
from .operation import Call, Operation, Run, Touched

#: "send" or "recv", the tensor, and the other rank
Transfer: TypeAlias = "tuple[str, Tensor, int]"


class Flight:
    """The messages of one call, which MPI has from `start` to `wait`, or to a `test` that returns True.

    Each of the two raises SettledError for a message of another dtype or length than its tensor. It may be called once
    more only if it raised nothing and the messages are not over. ``transfers`` must live until then.
    """

    def __init__(self, wire: MpiWire, transfers: list[Transfer]) -> None:
        self._wire = wire
        self._transfers = sorted(transfers, key=lambda transfer: transfer[0])  # receives first
        self._requests: list[Any] = []
        self._statuses = [wire.status() for _ in transfers]
        self._too_long: SettledError | None = None
        self._most = len(transfers)  # the messages that MPI may have

    def start(self) -> None:
        """Give all messages to MPI."""
        wire, tags = self._wire, self._wire.types.tag
        for verb, tensor, peer in self._transfers:
            if verb == "recv":
                self._requests.append(wire.calls.Irecv(wire.moved(tensor), peer))
            else:
                self._requests.append(wire.calls.Isend(wire.moved(tensor), peer, tags[tensor.dtype]))

    def test(self) -> bool:
        """Whether all messages are over. Never blocks."""
        return self._finish(self._wire.testall)

    def wait(self) -> None:
        """Wait until all messages are over."""
        self._finish(self._wire.waitall)

    def run(self) -> None:
        """Start the messages, and wait until they are over."""
        try:
            self.start()
            self.wait()
        except BaseException:
            self.leave()
            raise

    def _finish(self, step: Callable[..., bool | None]) -> bool:
        # A signal may have ended an earlier call of this after MPI had let go of the messages: ask only for the others.
        while self._left():
            try:
                if step(self._requests, self._statuses) is False:
                    return False
                break
            except load_mpi().Exception as error:
                self._note(error)
        if self._too_long is not None:
            raise self._too_long
        for (verb, tensor, peer), status in zip(self._transfers, self._statuses, strict=True):
            if verb == "recv":
                check_message(self._wire, tensor, peer, status)
        return True

    def _note(self, error: Any) -> None:
        """Note that a message was too long: the others are still on their way. Raises any other error."""
        left = self._left(failed=True)
        if not is_too_long(error, self._statuses) or left >= self._most:
            raise error
        self._most, mpi = left, load_mpi()
        receives = [one for one in zip(self._transfers, self._statuses, strict=True) if one[0][0] == "recv"]
        cut = (one for one, status in receives if mpi.Get_error_class(status.Get_error()) == mpi.ERR_TRUNCATE)
        _, tensor, peer = next(cut, receives[0][0])
        self._too_long = longer(tensor, peer, error)

    def _left(self, *, failed: bool = False) -> int:
        """The messages that MPI still has. failed: MPI has just raised."""
        return sum(map(bool, self._requests))

    def leave(self) -> None:
        """Wait a moment for the messages, and then keep the tensors that MPI still has."""
        land(lambda: not self._left() or self._wire.testall(self._requests, self._statuses))
        self.keep()

    def keep(self) -> None:
        """Keep the tensors for the life of the process if MPI may read or write them still."""
        if len(self._requests) < len(self._transfers) or self._left():  # MPI may have one that is in no list
            keep(self)


class PreparedFlight(Flight):
    """The same messages again and again, by persistent requests: MPI looks at the arguments once.

    One start at a time may be under way. The tensors must stay where they are.
    """

    def __init__(self, wire: MpiWire, transfers: list[Transfer]) -> None:
        super().__init__(wire, transfers)
        self._under_way = False
        self._places = [(tensor, tensor.data_ptr()) for _, tensor, _ in self._transfers]
        wire.prepared[id(self._requests)] = self._requests
        weakref.finalize(self, wire.retired.append, self._requests).atexit = False
        comm, tags = wire.comm, wire.types.tag
        for verb, tensor, peer in self._transfers:
            if verb == "recv":
                self._requests.append(comm.Recv_init(wire.moved(tensor), peer))
            else:
                self._requests.append(comm.Send_init(wire.moved(tensor), peer, tags[tensor.dtype]))
        ways = {(verb, peer) for verb, _, peer in transfers}
        # MPI may start the requests of one call in any order, and messages of one way match in their order.
        self._start = load_mpi().Prequest.Startall if len(ways) == len(transfers) else _start_each
        kinds = wire.types.move
        self._received = [
            (status, tensor, peer, kinds[tensor.dtype], tensor.numel(), tags[tensor.dtype])
            for (verb, tensor, peer), status in zip(self._transfers, self._statuses, strict=True)
            if verb == "recv"
        ]
        self._failures = load_mpi().Exception

    def start(self) -> None:
        """Give all messages to MPI. Raises SettledError if they are under way, or the memory of a tensor has moved."""
        if self._under_way:
            raise SettledError("is under way: wait for it before it starts again")
        for tensor, place in self._places:
            if tensor.data_ptr() != place:
                raise SettledError("the memory of a tensor has moved since the exchange was made: make another one")
        self._too_long, self._most, self._under_way = None, len(self._transfers), True
        self._start(self._requests)

    def run(self) -> None:
        """Start the messages, and wait until they are over: what `start` and `wait` do, in fewer steps."""
        try:
            self.start()
            try:
                self._wire.waitall(self._requests, self._statuses)
            except self._failures as error:
                self._note(error)
                self.wait()
            self._under_way = False
            for status, tensor, peer, kind, count, tag in self._received:
                if status.tag != tag or status.Get_count(kind) != count:
                    check_message(self._wire, tensor, peer, status)
        except BaseException:
            self.leave()
            raise

    def _finish(self, step: Callable[..., bool | None]) -> bool:
        try:
            over = super()._finish(step)
        except SettledError:
            self._under_way = False
            raise
        self._under_way = not over
        return over

    def _left(self, *, failed: bool = False) -> int:
        if not failed:
            return len(self._requests) if self._under_way else 0
        pending = load_mpi().ERR_PENDING
        return sum(status.Get_error() == pending for status in self._statuses)

    def leave(self) -> None:
        """Wait a moment for the messages; those that MPI still has can never start again."""
        land(lambda: not self._under_way or self._over())
        self.keep()

    def _over(self) -> bool:
        self._under_way = not self._wire.testall(self._requests, self._statuses)
        return not self._under_way


def _start_each(requests: list[Any]) -> None:
    for request in requests:
        request.Start()


def is_too_long(error: Any, statuses: Sequence[Any] = ()) -> bool:
    """Whether nothing failed but that a message was longer than its tensor, and that MPI has let go of it."""
    mpi, found = load_mpi(), error.Get_error_class()
    if found != mpi.ERR_IN_STATUS:
        return bool(found == mpi.ERR_TRUNCATE)
    each = {mpi.Get_error_class(status.Get_error()) for status in statuses}
    return each <= {mpi.SUCCESS, mpi.ERR_PENDING, mpi.ERR_TRUNCATE}


def longer(tensor: Tensor, peer: int, error: Exception) -> SettledError:
    """Return the error of a message that is longer than ``tensor``, which it was for."""
    return SettledError(
        f"recv of {tensor.numel()} elements of {tensor.dtype} from rank {peer} got a longer message ({error})"
    )


def check_message(wire: MpiWire, tensor: Tensor, peer: int, status: Any) -> None:
    """Raise SettledError if the message that ``tensor`` got from ``peer`` has another dtype or another length."""
    dtype = tensor.dtype
    tag, count = status.Get_tag(), status.Get_count(wire.types.move[dtype])
    # MPI gives no status of a message twice: a signal came between its end and this.
    if (count != tensor.numel() or tag != wire.types.tag[dtype]) and tag != load_mpi().ANY_TAG:
        sent = wire.types.of_tag(tag)
        if sent is None:  # see `commengine.calls.meeting`
            got = f"no message: rank {peer} makes a call that is the first with its arguments, and compares it"
        else:
            got = f"a message of {status.Get_count(wire.types.move[sent])} of {sent}"
        raise SettledError(f"recv of {tensor.numel()} elements of {dtype} from rank {peer} got {got}")


class MessageOperation(Operation):
    """Operations that are an exchange of one or several messages."""

    formula: ClassVar[str | None] = "p2p"

    def transfers(self, *args: Any) -> list[Transfer]:
        """Return the messages of a call."""
        return [(self.name, *args)]

    def flight(self, wire: MpiWire, *args: Any) -> Flight:
        """Return the messages of a call, for MPI."""
        return Flight(wire, self.transfers(*args))

    def by_mpi(self, wire: MpiWire, *args: Any) -> Run:
        return lambda *args: self.flight(wire, *args).run()

    def by_nccl(self, wire: NcclWire, *args: Any) -> None:
        transfers = self.transfers(*args)
        with wire.group() if len(transfers) > 1 else contextlib.nullcontext():
            for verb, tensor, peer in transfers:
                (wire.send if verb == "send" else wire.recv)(tensor.data_ptr(), tensor.nbytes, peer)


class Transfers(list[Transfer]):
    """The messages of an exchange. flight: what MPI has prepared for them."""

    flight: PreparedFlight | None = None


class MessageExchange(MessageOperation):
    """Many messages as one call: no order of them deadlocks."""

    name, arguments, counted, formula, pairwise = "exchange", ("transfers",), None, None, True

    def transfers(self, transfers: list[Transfer]) -> list[Transfer]:
        return transfers

    def flight(self, wire: MpiWire, transfers: list[Transfer]) -> Flight:
        prepared = transfers.flight if isinstance(transfers, Transfers) else None
        return prepared or Flight(wire, transfers)

    def touched(self, args: tuple[Any, ...]) -> list[Touched]:
        return [Touched(tensor, verb == "send", verb == "recv") for verb, tensor, _ in args[0]]

    def standing(self, args: tuple[Any, ...]) -> Tensor | None:
        # A device tensor if there is one: its transport also takes host tensors, the host transport takes no device
        # tensors.
        tensors = [tensor for _, tensor, _ in args[0]]
        return next((one for one in tensors if not one.is_cpu), tensors[0] if tensors else None)

    def called(self, args: tuple[Any, ...], ranks: int) -> Call:
        nbytes = sum(tensor.nbytes for _, tensor, _ in args[0])
        peers = tuple(dict.fromkeys(peer for *_, peer in args[0]))
        return Call(self, args, self.standing(args), None, None, nbytes, peers)

    def form(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.name,)


EXCHANGE = MessageExchange()


def exchange_of(calls: list[Call]) -> Call:
    """Return the call that does the messages of all ``calls``, which are sends, receives and exchanges."""
    transfers = [one for call in calls for one in call.operation.transfers(*call.args)]  # type: ignore[attr-defined]
    return EXCHANGE.called((transfers,), 0)


class Exchange:
    """A fixed set of messages, which `Communicator.exchange` has prepared. It holds the tensors.

    Not collective. The messages match those of other calls in the order in which they start, as if each were a `send`
    or a `recv` of its own.
    """

    def __init__(
        self, comm: Any, calls: Any, transfers: list[Transfer], stream: Stream | None, wire: MpiWire | None
    ) -> None:
        # Neither is kept alive: a communicator, and a stream, may keep exchanges.
        self._comm, self._calls = weakref.ref(comm), calls
        self._stream = None if stream is None else weakref.ref(stream)
        self._flight: PreparedFlight | None = None
        self._transfers = transfers
        if wire is not None:
            self._transfers = prepared = Transfers(transfers)
            prepared.flight = self._flight = PreparedFlight(wire, transfers)
        self._written = tuple(tensor for verb, tensor, _ in transfers if verb == "recv")

    def start(self) -> Work:
        """Start all messages: without a stream they are over on return, with one the Work says when.

        Raises CollectiveError if they are under way already, if the memory of a tensor has moved, if a message has
        another dtype or length than the tensor for it, or if the program has dropped the communicator or the stream.
        """
        stream, known = self._stream and self._stream(), self._calls.known
        if self._comm() is None or (self._stream is not None and stream is None):
            gone = "the communicator" if self._comm() is None else "the stream"
            raise call_error(self._calls, "exchange", f"{gone} of this exchange was dropped: keep it")
        if known is None or stream is not None or self._flight is None:
            work: Work = self._calls.run(EXCHANGE, (self._transfers,), stream)
            return work
        known.perform("exchange", self._flight.run, self._written)
        return DONE


class ExchangeCall:
    """`exchange`, as programs call it."""

    def exchange(
        self: Caller, sends: Sequence[tuple[TensorLike, int]], receives: Sequence[tuple[TensorLike, int]], *,
        stream: Stream | None = None,
    ) -> Exchange:  # fmt: skip
        """Prepare messages that start together: ``exchange(...).start()`` runs them, as often as it is called.

        sends, receives: tensors, and the ranks that they go to or come from, in any number and of any dtypes. No
        received tensor may share memory with another tensor of the exchange. stream: where they start; the caller
        keeps it, and closes it after the last start. Exchanges in any pattern do not deadlock.

        The tensors belong to the program between two starts, and must stay where they are. Not collective. Raises
        CollectiveError if an argument is wrong.
        """
        transfers: list[Transfer] = []
        for verb, given in (("send", sends), ("recv", receives)):
            try:
                pairs = [(value, peer) for value, peer in given]
            except (TypeError, ValueError) as error:
                raise call_error(self, "exchange", f"{verb}s are pairs of a tensor and a rank: {error}") from error
            for value, peer in pairs:
                tensor = checked_tensor(self, "exchange", value, f"a tensor to {verb}")
                transfers.append((verb, tensor, check_rank(self, "exchange", "the rank of a message", peer)))
        made: Exchange = self._calls.prepare_exchange(self, transfers, stream)
        return made
