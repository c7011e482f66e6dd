"""send, recv and sendrecv, from one rank to another. `commengine.operations.exchange` has many messages at once."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from commengine.host.wire import MpiWire
from commengine.mpi import load_mpi
from commengine.stream import DONE, Stream, Work

from .checks import Caller, TensorLike, check_disjoint, check_rank, checked_tensor
from .exchange import MessageOperation, Transfer, check_message, is_too_long, longer
from .operation import Run


class Send(MessageOperation):
    """The row of `send`, and its ways."""

    name, arguments, counted = "send", ("tensor", "dst"), "tensor"

    def by_mpi(self, wire: MpiWire, tensor: Tensor, dst: int) -> Run:
        send, address, nbytes = wire.calls.Send, wire.address, tensor.nbytes
        kind, tag = wire.types.move[tensor.dtype], wire.types.tag[tensor.dtype]
        return lambda tensor, _: send((address(tensor.data_ptr(), nbytes), kind), dst, tag)


class Recv(MessageOperation):
    """The row of `recv`, and its ways."""

    name, arguments, counted = "recv", ("tensor", "src"), "tensor"

    def by_mpi(self, wire: MpiWire, tensor: Tensor, src: int) -> Run:
        if wire.polls:
            return super().by_mpi(wire)
        receive, address, nbytes, kind = wire.comm.Recv, wire.address, tensor.nbytes, wire.types.move[tensor.dtype]
        any_tag, status, tag, count = load_mpi().ANY_TAG, wire.status(), wire.types.tag[tensor.dtype], tensor.numel()
        failures = load_mpi().Exception

        def run(tensor: Tensor, _: int) -> None:
            try:
                receive((address(tensor.data_ptr(), nbytes), kind), src, any_tag, status)
            except failures as error:
                raise _settled(error, tensor, src) from error
            if status.tag != tag or status.Get_count(kind) != count:
                check_message(wire, tensor, src, status)

        return run


class SendRecv(MessageOperation):
    """The row of `sendrecv`, and its ways."""

    name, arguments, counted = "sendrecv", ("sent", "received", "dst", "src"), "sent"

    def transfers(self, sent: Tensor, received: Tensor, dst: int, src: int) -> list[Transfer]:
        return [("send", sent, dst), ("recv", received, src)]

    def by_mpi(self, wire: MpiWire, sent: Tensor, received: Tensor, dst: int, src: int) -> Run:
        if wire.polls:
            return super().by_mpi(wire)
        exchange, address, types, any_tag = wire.comm.Sendrecv, wire.address, wire.types, load_mpi().ANY_TAG
        out, out_kind, out_tag = sent.nbytes, types.move[sent.dtype], types.tag[sent.dtype]
        into, into_kind, into_tag, count = (
            received.nbytes, types.move[received.dtype], types.tag[received.dtype], received.numel()
        )  # fmt: skip
        status, failures = wire.status(), load_mpi().Exception

        def run(sent: Tensor, received: Tensor, _: int, __: int) -> None:
            going, coming = (address(sent.data_ptr(), out), out_kind), (address(received.data_ptr(), into), into_kind)
            try:
                exchange(going, dst, out_tag, coming, src, any_tag, status)
            except failures as error:
                raise _settled(error, received, src) from error
            if status.tag != into_tag or status.Get_count(into_kind) != count:
                check_message(wire, received, src, status)

        return run


def _settled(error: Any, tensor: Tensor, src: int) -> Exception:
    """The error of a blocking call: the ranks are in step if a message was too long, because MPI took it."""
    return longer(tensor, src, error) if is_too_long(error) else error


SEND, RECV, SENDRECV = Send(), Recv(), SendRecv()


class MessageCalls:
    """`send`, `recv` and `sendrecv`, as programs call them."""

    def send(self: Caller, tensor: TensorLike, dst: int, *, stream: Stream | None = None) -> Work:
        """Send ``tensor`` to rank ``dst``, which must `recv` a tensor of as many elements and the same dtype.

        It may block until then; `sendrecv` and `coalesce` exchange messages without a deadlock. A message is matched
        within one stream: both ranks give their stream of the same number, or no stream. It takes every dtype of
        `commengine.dtypes`. Only the two ranks call. Raises CollectiveError if ``dst`` is not a rank of the group.
        """
        known = self._calls.known if stream is None else None
        if known is not None and type(dst) is int and known.single("send", tensor, dst):
            return DONE
        tensor = checked_tensor(self, "send", tensor)
        dst = check_rank(self, "send", "dst", dst)
        return self._calls.run(SEND, (tensor, dst), stream)

    def recv(self: Caller, tensor: TensorLike, src: int, *, stream: Stream | None = None) -> Work:
        """Fill ``tensor`` with the message from rank ``src``, which must `send` as many elements of the same dtype.

        It takes every dtype of `commengine.dtypes`. Only the two ranks call. Raises CollectiveError if ``src`` is not a
        rank of the group, and where MPI carries the message, if it has another length. With NCCL nobody compares the
        lengths.
        """
        known = self._calls.known if stream is None else None
        if known is not None and type(src) is int and known.single("recv", tensor, src):
            return DONE
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
        known = self._calls.known if stream is None else None
        if (
            known is not None
            and type(dst) is type(src) is int
            and known.pair("sendrecv", sendtensor, recvtensor, dst, src)
        ):
            return DONE
        sent = checked_tensor(self, "sendrecv", sendtensor, "sendtensor")
        received = checked_tensor(self, "sendrecv", recvtensor, "recvtensor")
        check_disjoint(self, "sendrecv", sent, received)
        dst = check_rank(self, "sendrecv", "dst", dst)
        src = check_rank(self, "sendrecv", "src", src)
        return self._calls.run(SENDRECV, (sent, received, dst, src), stream)
