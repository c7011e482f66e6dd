"""The operations of a group on tensors: each checks its arguments, then hands the call to the dispatcher."""

from __future__ import annotations

import contextlib

import torch

from commengine.device.backends import Backend
from commengine.stream import Stream, Work

from .checks import (
    TensorLike,
    call_error,
    check_alike,
    check_disjoint,
    check_rank,
    check_reduction,
    checked_pair,
    checked_tensor,
    root_tensor,
)
from .dispatch import DONE, Dispatcher


class GroupCalls:
    """The collectives and messages of one group: the part of a `Communicator` that programs call in each step.

    rank, size, name: this rank's place in the group. device: where device tensors lie. The communicator sets them.
    """

    rank: int
    size: int
    name: str
    device: torch.device
    no_device: str | None
    _backend: Backend | None
    _calls: Dispatcher

    # Reductions -----------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: TensorLike, op: str = "sum", *, stream: Stream | None = None) -> Work:
        """Reduce ``tensor`` over the group, in place, on every rank. op: "sum", "prod", "min", "max" or "avg"."""
        known = self._calls.known if stream is None else None
        if known is not None and known.single("all_reduce", op, tensor):
            return DONE
        tensor = checked_tensor(self, "all_reduce", tensor)
        if op != "sum" or not tensor.is_cpu:  # the host sums every dtype
            check_reduction(self, "all_reduce", tensor, op)
        if known is not None:
            known.learn_single("all_reduce", op, tensor)
        return self._calls.run("all_reduce", (tensor, op), tensor, stream)

    def reduce(self, tensor: TensorLike, root: int = 0, op: str = "sum", *, stream: Stream | None = None) -> Work:
        """Reduce ``tensor`` over the group into the tensor of rank ``root``; the other ranks' tensors do not change."""
        tensor = checked_tensor(self, "reduce", tensor)
        check_reduction(self, "reduce", tensor, op)
        root = check_rank(self, "reduce", "root", root)
        return self._calls.run("reduce", (tensor, root, op), tensor, stream)

    def reduce_scatter(
        self, output: TensorLike, input: TensorLike, op: str = "sum", *, stream: Stream | None = None
    ) -> Work:
        """Reduce ``input`` [size * d0, ...] over the group.

        Rank r gets rows r*d0 to (r+1)*d0 - 1 in ``output`` [d0, ...]. It works in place if ``output`` is this rank's
        rows of ``input``; on the host, the other rows then stay as they are.
        """
        known = self._calls.known if stream is None else None
        if known is not None and known.pair("reduce_scatter", op, output, input):
            return DONE
        output, input = checked_pair(self, "reduce_scatter", output, input)
        if op != "sum" or not input.is_cpu:
            check_reduction(self, "reduce_scatter", input, op)
        if known is not None:
            known.learn_pair("reduce_scatter", op, output, input)
        return self._calls.run("reduce_scatter", (output, input, op), input, stream)

    # Movement -------------------------------------------------------------------------------------------------

    def all_gather(self, output: TensorLike, input: TensorLike, *, stream: Stream | None = None) -> Work:
        """Concatenate every rank's ``input`` [d0, ...] in rank order into ``output`` [size * d0, ...].

        It works in place if ``input`` is this rank's rows of ``output``.
        """
        known = self._calls.known if stream is None else None
        if known is not None and known.pair("all_gather", None, output, input):
            return DONE
        output, input = checked_pair(self, "all_gather", output, input)
        if known is not None:
            known.learn_pair("all_gather", None, output, input)
        return self._calls.run("all_gather", (output, input), output, stream)

    def broadcast(self, tensor: TensorLike, root: int = 0, *, stream: Stream | None = None) -> Work:
        """Copy the tensor of rank ``root`` into every rank's ``tensor``, of the same shape and dtype."""
        known = self._calls.known if stream is None else None
        if known is not None and type(root) is int and known.single("broadcast", root, tensor):
            return DONE
        tensor = checked_tensor(self, "broadcast", tensor)
        root = check_rank(self, "broadcast", "root", root)
        if known is not None:
            known.learn_single("broadcast", root, tensor)
        return self._calls.run("broadcast", (tensor, root), tensor, stream)

    def gather(
        self, output: TensorLike | None, input: TensorLike, root: int = 0, *, stream: Stream | None = None
    ) -> Work:
        """Concatenate every rank's ``input`` [d0, ...] into ``output`` [size * d0, ...] of rank ``root``.

        output: ignored on the other ranks, and usually None there.
        """
        root = check_rank(self, "gather", "root", root)
        input = checked_tensor(self, "gather", input, "input")
        output = root_tensor(self, "gather", "output", output, input, root)
        return self._calls.run("gather", (output, input, root), input, stream)

    def scatter(
        self, output: TensorLike, input: TensorLike | None, root: int = 0, *, stream: Stream | None = None
    ) -> Work:
        """Give rank r the rows r * d0 ... of rank ``root``'s ``input`` [size * d0, ...] in ``output`` [d0, ...].

        input: ignored on the other ranks, and usually None there.
        """
        root = check_rank(self, "scatter", "root", root)
        output = checked_tensor(self, "scatter", output, "output")
        input = root_tensor(self, "scatter", "input", input, output, root)
        return self._calls.run("scatter", (output, input, root), output, stream)

    def all_to_all(self, output: TensorLike, input: TensorLike, *, stream: Stream | None = None) -> Work:
        """Send block j of ``input`` to rank j, and receive rank j's block in block j of ``output``.

        output, input: both [size * d0, ...]; block j is the rows j * d0 ... of a tensor.
        """
        output = checked_tensor(self, "all_to_all", output, "output")
        input = checked_tensor(self, "all_to_all", input, "input")
        check_alike(self, "all_to_all", output, input)
        if output.shape != input.shape or input.dim() == 0 or input.shape[0] % self.size:
            raise call_error(
                self,
                "all_to_all",
                f"output {list(output.shape)} and input {list(input.shape)} must have one shape whose dim 0 "
                f"the group's size {self.size} divides",
            )
        return self._calls.run("all_to_all", (output, input), input, stream)

    def barrier(self, *, stream: Stream | None = None) -> Work:
        """Wait until every rank is here. On a stream, work enqueued later starts when all ranks have reached it."""
        return self._calls.run("barrier", (), None, stream)

    # Point to point -------------------------------------------------------------------------------------------

    def send(self, tensor: TensorLike, dst: int, *, stream: Stream | None = None) -> Work:
        """Send ``tensor`` to rank ``dst``, which must `recv` a tensor of as many elements and the same dtype.

        It may block until then; `sendrecv` and `coalesce` exchange messages without a deadlock. A message is matched
        within one stream: both ranks give their stream of the same number, or no stream.
        """
        tensor = checked_tensor(self, "send", tensor)
        dst = check_rank(self, "send", "dst", dst)
        return self._calls.run("send", (tensor, dst), tensor, stream)

    def recv(self, tensor: TensorLike, src: int, *, stream: Stream | None = None) -> Work:
        """Fill ``tensor`` with the message from rank ``src``. A message of another length raises CollectiveError."""
        tensor = checked_tensor(self, "recv", tensor)
        src = check_rank(self, "recv", "src", src)
        return self._calls.run("recv", (tensor, src), tensor, stream)

    def sendrecv(
        self, sendtensor: TensorLike, dst: int, recvtensor: TensorLike, src: int, *, stream: Stream | None = None
    ) -> Work:
        """Send to ``dst`` while receiving from ``src``. Exchanges in any pattern do not deadlock."""
        sent = checked_tensor(self, "sendrecv", sendtensor, "sendtensor")
        received = checked_tensor(self, "sendrecv", recvtensor, "recvtensor")
        check_disjoint(self, "sendrecv", sent, received)
        dst = check_rank(self, "sendrecv", "dst", dst)
        src = check_rank(self, "sendrecv", "src", src)
        return self._calls.run("sendrecv", (sent, dst, received, src), sent, stream)

    def coalesce(self, *, stream: Stream | None = None) -> contextlib.AbstractContextManager[None]:
        """Group the calls of a ``with`` block: they start together at its end, so sends and receives cannot deadlock.

        No call of a block may write memory that another call of the block reads or writes. If one does, CollectiveError
        is raised at the end of the block, before anything is sent, on each rank whose own tensors show it. broadcast
        and reduce count as writing their tensor on every rank, a reduce-scatter in place as writing its whole input.
        Only the root sees the whole of a gather or scatter: if that one depends on another call, the root raises, and
        the others wait. The collectives of a block are in the same order on every rank.

        The tensors may be touched when the block has ended, or, with ``stream=``, when the stream has reached the
        block's end; the Work of each call is done when the whole block is. If the block raises an exception, nothing is
        sent.
        """
        return self._calls.coalesce(stream)
