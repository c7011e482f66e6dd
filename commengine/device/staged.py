"""Device tensors by MPI: through pinned host memory, or as device addresses if the MPI takes them.

`StagedTransport` and the transport of `device_address_transport` work on the host, as `HostTransport` does. `Hosted`
puts their calls in order with the caller's CUDA stream: a call begins after everything that the stream holds, and
returns when its result is complete.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from commengine.host.polling import BlockingCall, WrappedCalls
from commengine.host.transport import HostTransport

from .nccl import Runtime

#: a tensor that goes through host memory is cut into pieces of this many bytes; one piece is copied while another one
#: is on its way
CHUNK_BYTES = 4 << 20


class Hosted:
    """Runs the operations of a transport for device tensors that works on the host, in order with a CUDA stream.

    inner: a `StagedTransport`, or the transport of `device_address_transport`. Its calls run on a stream of their own.
    """

    def __init__(self, inner: Any, runtime: Runtime, device: torch.device) -> None:
        self.inner, self.device = inner, device
        self._runtime = runtime
        self._cuda = runtime.cuda
        self._own = runtime.cuda.Stream(device)

    def ready(self) -> Any:
        """Return a CUDA event that is done when everything that the caller's current stream holds now is done.

        Raises TransferError if that stream is captured into a CUDA graph.
        """
        self._runtime.refuse_capture()
        return self._cuda.current_stream(self.device).record_event()

    def run(self, name: str, args: tuple[Any, ...], ready: Any) -> None:
        """Run the operation ``name`` of the transport after the event ``ready``; the result is complete on return.

        A host stream takes ``ready`` when the collective is enqueued, and its worker calls this later.
        """
        # The device of a new thread is number 0, and leaving the stream sets that one: each rank would make a context
        # there, and fail where a GPU is exclusive to one process.
        with self._cuda.device(self.device):
            self._own.wait_event(ready)
            with self._cuda.stream(self._own):
                getattr(self.inner, name)(*args)
            self._own.synchronize()


class SynchronizedCalls(WrappedCalls):
    """MPI calls that first wait for everything that the current CUDA stream holds, because MPI knows no streams.

    calls: the MPI calls of a `HostTransport`.
    """

    def __init__(self, calls: Any, runtime: Runtime) -> None:
        self._cuda = runtime.cuda
        super().__init__(calls, lambda name: self._synchronized(getattr(calls, name)))
        self.Isend, self.Irecv = self._synchronized(calls.Isend), self._synchronized(calls.Irecv)

    def _synchronized(self, call: BlockingCall) -> BlockingCall:
        def synchronized(*args: Any) -> Any:
            self._cuda.current_stream().synchronize()
            return call(*args)

        return synchronized


def device_address_transport(runtime: Runtime, host: HostTransport, device: torch.device) -> HostTransport:
    """Return the operations of ``host`` for tensors of ``device``, on an MPI that takes device addresses.

    All sizes go by MPI, because the routes through a node's memory are for host tensors.
    """
    return host.by_mpi(
        lambda calls: SynchronizedCalls(calls, runtime), lambda shape, dtype: runtime.empty(shape, dtype, device)
    )


def mpi_takes_device_addresses(maps: str | None = None) -> bool:
    """Whether the loaded MPI says that it is CUDA-aware (MPIX_Query_cuda_support).

    maps: the text of ``/proc/self/maps``; None: read it.
    """
    try:
        text = Path("/proc/self/maps").read_text() if maps is None else maps
    except OSError:
        return False
    for path in sorted(set(re.findall(r"(/\S*/libmpi[\w.-]*\.so[.\d]*)$", text, re.MULTILINE))):
        try:
            query = ctypes.CDLL(path).MPIX_Query_cuda_support
        except (OSError, AttributeError):
            continue
        query.argtypes, query.restype = (), ctypes.c_int
        if query():
            return True
    return False


@dataclass
class _Piece:
    """One piece of a collective: (host, device) copies before, the host's call, and (device, host) copies after."""

    down: list[tuple[Tensor, Tensor]]
    call: Callable[[], None]
    up: list[tuple[Tensor, Tensor]]


class StagedTransport:
    """Collectives on device tensors through host memory, after what the current stream holds. Blocks the host.

    A collective is cut into pieces. While the host sends one piece, the device copies the next one to the host, on the
    current stream, and the last one back, on a stream of the transport: the link to the host carries both at a time.

    host: moves the pieces. chunk: bytes of a piece. pinned: whether the host memory is page-locked. Copies that run
    beside compute need it; it is impossible without a device.
    """

    def __init__(
        self,
        runtime: Runtime,
        host: HostTransport,
        device: torch.device,
        *,
        pinned: bool = True,
        chunk: int = CHUNK_BYTES,
    ) -> None:
        self.host = host
        self.rank, self.size = host.rank, host.size
        self._runtime = runtime
        self._cuda = runtime.cuda
        self._pinned = pinned
        self._chunk = chunk
        self._buffers: dict[tuple[int, str], Tensor] = {}
        self._back = runtime.cuda.Stream(device)  # for the copies to the device

    # Memory and order -----------------------------------------------------------------------------------------

    def _buffer(self, slot: int, use: str, like: Tensor, *shape: int) -> Tensor:
        """Return host memory for one piece, of ``like``'s dtype.

        Two slots alternate, so that one piece is copied while the other one is sent.
        """
        count = 1
        for extent in shape:
            count *= extent
        nbytes = count * like.itemsize
        found = self._buffers.get((slot, use))
        if found is None or found.numel() < nbytes:
            found = self._buffers[slot, use] = torch.empty(
                nbytes, dtype=torch.uint8, device="cpu", pin_memory=self._pinned
            )
        return found[:nbytes].view(like.dtype).view(shape)

    def _run(self, pieces: Sequence[Callable[[int], _Piece]]) -> None:
        """Run the pieces, each made for one of two slots.

        The copies of one piece run while the host works on another one.
        """
        stream, back = self._cuda.current_stream(), self._back
        copied: list[Any] = [None, None]  # per slot: an event that is done when its copies back to the device are done
        made: list[tuple[_Piece, Any]] = []
        for index in range(len(pieces) + 1):
            if index < len(pieces):
                slot = index % 2
                if copied[slot] is not None:
                    copied[slot].synchronize()
                piece = pieces[index](slot)
                for host, device in piece.down:
                    self._runtime.copy(host, device)
                made.append((piece, stream.record_event()))
            if index > 0:
                piece, ready = made[index - 1]
                ready.synchronize()  # now the device, too, is done with what the caller's stream held
                piece.call()
                with self._cuda.stream(back):
                    for device, host in piece.up:
                        self._runtime.copy(device, host)
                copied[(index - 1) % 2] = back.record_event()
        stream.synchronize()
        back.synchronize()

    def _spans(self, count: int, itemsize: int) -> list[tuple[int, int]]:
        """Cut ``count`` elements into pieces, (start, length) each; one empty piece for no elements."""
        step = max(1, self._chunk // itemsize)
        return [(start, min(step, count - start)) for start in range(0, count or 1, step)]

    # Elementwise operations: pieces of the flat tensor ------------------------------------------------------------

    def _elementwise(self, tensor: Tensor, call: Callable[[Tensor], None], down: bool, up: bool) -> None:
        """Run ``call`` on host copies of the pieces. down, up: whether to copy them to the host, and back."""
        flat = _flat(tensor)

        def make(start: int, length: int) -> Callable[[int], _Piece]:
            def made(slot: int) -> _Piece:
                part, buffer = flat[start : start + length], self._buffer(slot, "whole", flat, length)
                return _Piece([(buffer, part)] * down, lambda: call(buffer), [(part, buffer)] * up)

            return made

        self._run([make(*span) for span in self._spans(flat.numel(), flat.itemsize)])

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        self._elementwise(tensor, lambda part: self.host.all_reduce(part, op), True, True)

    def reduce(self, tensor: Tensor, root: int, op: str) -> None:
        self._elementwise(tensor, lambda part: self.host.reduce(part, root, op), True, self.rank == root)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        rooted = self.rank == root
        self._elementwise(tensor, lambda part: self.host.broadcast(part, root), rooted, not rooted)

    # Operations with a row for each rank: pieces are the same columns of all rows -----------------------------------

    def _by_rank(
        self,
        output: Tensor | None,
        input: Tensor | None,
        wide: tuple[bool, bool],
        call: Callable[[Any, Any], None],
    ) -> None:
        """Run ``call`` on host copies of the same columns of ``output`` and ``input``.

        wide: whether (output, input) has a row for each rank. A rank that gives no output or no input passes None.
        """
        size = self.size
        out, into = (
            None if tensor is None else _flat(tensor).view(size if rows else 1, tensor.numel() // (size if rows else 1))
            for tensor, rows in zip((output, input), wide, strict=True)
        )
        one = out if out is not None else into
        assert one is not None

        def make(start: int, length: int) -> Callable[[int], _Piece]:
            def made(slot: int) -> _Piece:
                sent, received = (
                    None if rows is None else self._buffer(slot, use, rows, len(rows), length)
                    for use, rows in (("input", into), ("output", out))
                )
                columns = slice(start, start + length)
                return _Piece(
                    [] if into is None or sent is None else [(sent, into[:, columns])],
                    lambda: call(received, sent),
                    [] if out is None or received is None else [(out[:, columns], received)],
                )

            return made

        self._run([make(*span) for span in self._spans(one.shape[1], one.itemsize * size)])

    def reduce_scatter(self, output: Tensor, input: Tensor, op: str) -> None:
        self._by_rank(output, input, (False, True), lambda out, into: self.host.reduce_scatter(out, into, op))

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        self._by_rank(output, input, (True, False), self.host.all_gather)

    def gather(self, output: Tensor | None, input: Tensor, root: int) -> None:
        self._by_rank(output, input, (True, False), lambda out, into: self.host.gather(out, into, root))

    def scatter(self, output: Tensor, input: Tensor | None, root: int) -> None:
        self._by_rank(output, input, (False, True), lambda out, into: self.host.scatter(out, into, root))

    def all_to_all(self, output: Tensor, input: Tensor) -> None:
        self._by_rank(output, input, (True, True), self.host.all_to_all)

    def barrier(self) -> None:
        self.host.barrier()

    # Point to point: whole messages, because the receiver checks their length ---------------------------------------

    def send(self, tensor: Tensor, dst: int) -> None:
        self.exchange([("send", tensor, dst)])

    def recv(self, tensor: Tensor, src: int) -> None:
        self.exchange([("recv", tensor, src)])

    def sendrecv(self, sent: Tensor, dst: int, received: Tensor, src: int) -> None:
        self.exchange([("send", sent, dst), ("recv", received, src)])

    def exchange(self, transfers: list[tuple[str, Tensor, int]]) -> None:
        """Start all sends and receives, ``(verb, tensor, peer)``, and wait for all. Host tensors are not copied."""
        staged = []
        for verb, tensor, peer in transfers:
            buffer = tensor
            if not tensor.is_cpu:
                buffer = torch.empty(
                    tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=self._pinned and tensor.numel() > 0
                )
                if verb == "send":
                    self._runtime.copy(buffer, tensor)
            staged.append((verb, buffer, peer))
        self._cuda.current_stream().synchronize()
        self.host.exchange(staged)
        for (verb, tensor, _), (_, buffer, _) in zip(transfers, staged, strict=True):
            if verb == "recv" and buffer is not tensor:
                self._runtime.copy(tensor, buffer)
        self._cuda.current_stream().synchronize()


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1)
