"""send, recv and sendrecv, from one rank to another; `EXCHANGE`: many of them at once, in no order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

from torch import Tensor

from commengine.device.nccl import NcclWire
from commengine.errors import SettledError
from commengine.host.polling import keep, land
from commengine.host.wire import MpiWire
from commengine.mpi import load_mpi
from commengine.stream import Stream, Work

from .checks import Caller, TensorLike, check_disjoint, check_rank, checked_tensor
from .operation import Call, Operation, Run, Touched

#: "send" or "recv", the tensor, and the other rank
Transfer: TypeAlias = "tuple[str, Tensor, int]"


class MessageOperation(Operation):
    """Operations that are an exchange of one or two messages."""

    formula: ClassVar[str | None] = "p2p"

    def transfers(self, *args: Any) -> list[Transfer]:
        """Return the messages of a call."""
        return [(self.name, *args)]

    def by_mpi(self, wire: MpiWire, *args: Any) -> Run:
        return lambda *args: _exchange(wire, self.transfers(*args))

    def by_nccl(self, wire: NcclWire, *args: Any) -> None:
        transfers = self.transfers(*args)
        with wire.group() if len(transfers) > 1 else contextlib.nullcontext():
            for verb, tensor, peer in transfers:
                (wire.send if verb == "send" else wire.recv)(tensor.data_ptr(), tensor.nbytes, peer)


class Send(MessageOperation):
    """The row of `send`, and its ways."""

    name, arguments, counted = "send", ("tensor", "dst"), "tensor"

    def by_mpi(self, wire: MpiWire, tensor: Tensor, dst: int) -> Run:
        return lambda tensor, _: wire.calls.Send(wire.moved(tensor), dst)


class Recv(MessageOperation):
    """The row of `recv`, and its ways."""

    name, arguments, counted = "recv", ("tensor", "src"), "tensor"


class SendRecv(MessageOperation):
    """The row of `sendrecv`, and its ways."""

    name, arguments, counted = "sendrecv", ("sent", "dst", "received", "src"), "sent"

    def transfers(self, sent: Tensor, dst: int, received: Tensor, src: int) -> list[Transfer]:
        return [("send", sent, dst), ("recv", received, src)]


class MessageExchange(MessageOperation):
    """The messages of a coalesce() block, as one call: no order of them deadlocks."""

    name, arguments, counted, formula = "exchange", ("transfers",), None, None

    def transfers(self, transfers: list[Transfer]) -> list[Transfer]:
        return transfers

    def touched(self, args: tuple[Any, ...]) -> list[Touched]:
        return [Touched(tensor, verb == "send", verb == "recv") for verb, tensor, _ in args[0]]

    def form(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.name,)


SEND, RECV, SENDRECV, EXCHANGE = Send(), Recv(), SendRecv(), MessageExchange()


def exchange_of(calls: list[Call]) -> Call:
    """Return the call that does the messages of all ``calls``, which are sends and receives."""
    transfers = [one for call in calls for one in call.operation.transfers(*call.args)]  # type: ignore[attr-defined]
    peers = tuple(dict.fromkeys(peer for *_, peer in transfers))
    # A device tensor stands for the exchange if there is one: its transport also takes host tensors, the host transport
    # takes no device tensors.
    stands = next((tensor for _, tensor, _ in transfers if not tensor.is_cpu), transfers[0][1])
    nbytes = sum(part.nbytes for _, part, _ in transfers)
    return Call(EXCHANGE, (transfers,), stands, None, None, nbytes, peers)


class Flight:
    """The messages of one call, which MPI has from `start` to `wait`, or to a `test` that returns True.

    Each of the two raises SettledError for a message of another length than its tensor. It may be called once more
    only if it raised nothing and the messages are not over. ``transfers`` must live until then.
    """

    def __init__(self, wire: MpiWire, transfers: list[Transfer]) -> None:
        self._wire = wire
        self._transfers = sorted(transfers, key=lambda transfer: transfer[0])  # receives first
        self._requests: list[Any] = []
        self._statuses: list[Any] = []
        self._too_long: Exception | None = None
        self._most = len(transfers)  # the messages that MPI may have

    def start(self) -> None:
        """Give all messages to MPI."""
        wire = self._wire
        for verb, tensor, peer in self._transfers:
            start = wire.calls.Irecv if verb == "recv" else wire.calls.Isend
            self._requests.append(start(wire.moved(tensor), peer))
            self._statuses.append(wire.status())

    def test(self) -> bool:
        """Whether all messages are over. Never blocks."""
        return self._finish(self._wire.testall)

    def wait(self) -> None:
        """Wait until all messages are over."""
        self._finish(self._wire.waitall)

    def _finish(self, step: Callable[..., bool | None]) -> bool:
        # A signal may have ended an earlier call of this after MPI had let go of the messages: ask only for the others.
        while any(self._requests):
            try:
                if step(self._requests, self._statuses) is False:
                    return False
                break
            except load_mpi().Exception as error:
                left = sum(map(bool, self._requests))
                if not self._is_too_long(error) or left >= self._most:
                    raise
                self._too_long, self._most = error, left  # the others are still on their way
        if self._too_long is not None:
            raise SettledError(str(self._too_long)) from self._too_long
        self._check_lengths()
        return True

    def _is_too_long(self, error: Any) -> bool:
        """Whether nothing failed but that a message was longer than its tensor, and that MPI has let go of it."""
        mpi, found = load_mpi(), error.Get_error_class()
        if found != mpi.ERR_IN_STATUS:
            return bool(found == mpi.ERR_TRUNCATE)
        each = {mpi.Get_error_class(status.Get_error()) for status in self._statuses}
        return each <= {mpi.SUCCESS, mpi.ERR_PENDING, mpi.ERR_TRUNCATE}

    def leave(self) -> None:
        """Wait a moment for the messages, and then keep the tensors that MPI still has."""
        land(lambda: not any(self._requests) or self._wire.testall(self._requests, self._statuses))
        self.keep()

    def keep(self) -> None:
        """Keep the tensors for the life of the process if MPI may read or write them still."""
        if len(self._requests) < len(self._transfers) or any(self._requests):  # MPI may have one that is in no list
            keep(self)

    def _check_lengths(self) -> None:
        for (verb, tensor, peer), status in zip(self._transfers, self._statuses, strict=False):
            if verb == "recv" and (count := status.Get_count(self._wire.types.move[tensor.dtype])) != tensor.numel():
                raise SettledError(
                    f"recv of {tensor.numel()} elements of {tensor.dtype} from rank {peer} got a message of {count}"
                )


def _exchange(wire: MpiWire, transfers: list[Transfer]) -> None:
    flight = Flight(wire, transfers)
    try:
        flight.start()
        flight.wait()
    except BaseException:
        flight.leave()
        raise


class MessageCalls:
    """`send`, `recv` and `sendrecv`, as programs call them."""

    def send(self: Caller, tensor: TensorLike, dst: int, *, stream: Stream | None = None) -> Work:
        """Send ``tensor`` to rank ``dst``, which must `recv` a tensor of as many elements and the same dtype.

        It may block until then; `sendrecv` and `coalesce` exchange messages without a deadlock. A message is matched
        within one stream: both ranks give their stream of the same number, or no stream. It takes every dtype of
        `commengine.dtypes`. Only the two ranks call. Raises CollectiveError if ``dst`` is not a rank of the group.
        """
        tensor = checked_tensor(self, "send", tensor)
        dst = check_rank(self, "send", "dst", dst)
        return self._calls.run(SEND, (tensor, dst), stream)

    def recv(self: Caller, tensor: TensorLike, src: int, *, stream: Stream | None = None) -> Work:
        """Fill ``tensor`` with the message from rank ``src``, which must `send` as many elements of the same dtype.

        It takes every dtype of `commengine.dtypes`. Only the two ranks call. Raises CollectiveError if ``src`` is not a
        rank of the group, and where MPI carries the message, if it has another length. With NCCL nobody compares the
        lengths.
        """
        tensor = checked_tensor(self, "recv", tensor)
        src = check_rank(self, "recv", "src", src)
        return self._calls.run(RECV, (tensor, src), stream)

    def sendrecv(
        self: Caller, sendtensor: TensorLike, dst: int, recvtensor: TensorLike, src: int, *,
        stream: Stream | None = None,
    ) -> Work:  # fmt: skip
        """Send to ``dst`` while receiving from ``src``. Exchanges in any pattern do not deadlock.

        sendtensor, recvtensor: as the tensors of `send` and `recv`; their shapes and dtypes may differ.

        The ranks of the exchange call it; a `send` or `recv` may be its other side. Raises the errors of `send` and
        `recv`, and CollectiveError if the two tensors share memory or lie on two devices.
        """
        sent = checked_tensor(self, "sendrecv", sendtensor, "sendtensor")
        received = checked_tensor(self, "sendrecv", recvtensor, "recvtensor")
        check_disjoint(self, "sendrecv", sent, received)
        dst = check_rank(self, "sendrecv", "dst", dst)
        src = check_rank(self, "sendrecv", "src", src)
        return self._calls.run(SENDRECV, (sent, dst, received, src), stream)
