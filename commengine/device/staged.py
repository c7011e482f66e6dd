"""Device tensors by MPI: through pinned host memory, or as device addresses where the MPI takes them.

Both do on the host what `HostTransport` does, between the caller's stream and the host: `Hosted` waits for the one
before and leaves the result complete.
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

from commengine.host.switch_points import NEVER
from commengine.host.transport import HostTransport

from .nccl import Runtime

#: of a tensor that goes through host memory one piece of this many bytes is copied while another is on its way
CHUNK_BYTES = 4 << 20


class Hosted:
    """The methods of ``inner`` on a stream of their own, each begun after the caller's stream and complete on return.

    To take a method from here says "after what the current stream holds now": a host stream's worker calls it later.
    """

    def __init__(self, inner: Any, runtime: Runtime, device: torch.device) -> None:
        self.inner, self.device = inner, device
        self._cuda = runtime.cuda
        self._own = runtime.cuda.Stream(device)

    def __getattr__(self, name: str) -> Callable[..., None]:
        ready = self._cuda.current_stream(self.device).record_event()
        method = getattr(self.inner, name)

        def call(*args: Any) -> None:
            self._own.wait_event(ready)
            with self._cuda.stream(self._own):
                method(*args)
            self._own.synchronize()

        return call


class SynchronizedComm:
    """The calls of an MPI communicator, each after all that the current stream holds: MPI knows no streams."""

    def __init__(self, calls: Any, runtime: Runtime) -> None:
        self._calls, self._cuda = calls, runtime.cuda

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._calls, name)

        def call(*args: Any) -> Any:
            self._cuda.current_stream().synchronize()
            return method(*args)

        return call


class DeviceAddressTransport(HostTransport):
    """What ``host`` does, for device tensors, on an MPI that takes their addresses."""

    def __init__(self, runtime: Runtime, host: HostTransport) -> None:
        vars(self).update(vars(host))
        self._calls = SynchronizedComm(host._calls, runtime)
        self._comm: Any = SynchronizedComm(host._comm, runtime)
        self._large = NEVER  # the ways through the node's memory are for host tensors


def mpi_takes_device_addresses(maps: str | None = None) -> bool:
    """Whether the loaded MPI says of itself that it is CUDA-aware (MPIX_Query_cuda_support)."""
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
    """One piece of a collective: (host, device) copies before, what the host does, (device, host) copies after."""

    down: list[tuple[Tensor, Tensor]]
    call: Callable[[], None]
    up: list[tuple[Tensor, Tensor]]


class StagedTransport:
    """Collectives on device tensors through host memory, on the current stream. Blocks the host.

    Collectives go in pieces: while the host sends one, the device copies the next out and the last one in.

    host: moves the pieces. pinned: whether the host memory is page-locked, which copies beside compute need; not
    where there is no device.
    """

    def __init__(self, runtime: Runtime, host: HostTransport, *, pinned: bool = True, chunk: int = CHUNK_BYTES) -> None:
        self.host = host
        self.rank, self.size = host.rank, host.size
        self._runtime = runtime
        self._cuda = runtime.cuda
        self._pinned = pinned
        self._chunk = chunk
        self._buffers: dict[tuple[int, str], Tensor] = {}

    # Memory and order -----------------------------------------------------------------------------------------

    def _buffer(self, slot: int, use: str, like: Tensor, *shape: int) -> Tensor:
        """Host memory for one piece: two slots alternate, so that one is copied while the other is sent."""
        count = 1
        for extent in shape:
            count *= extent
        nbytes = count * like.itemsize
        found = self._buffers.get((slot, use))
        if found is None or found.numel() < nbytes:
            found = self._buffers[slot, use] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)
        return found[:nbytes].view(like.dtype).view(shape)

    def _run(self, pieces: Sequence[Callable[[int], _Piece]]) -> None:
        """Run the pieces, each made for one of two slots, every copy of one under the host's work on another."""
        stream = self._cuda.current_stream()
        copied: list[Any] = [None, None]  # per slot: its copies back to the device are done
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
                ready.synchronize()
                piece.call()
                for device, host in piece.up:
                    self._runtime.copy(device, host)
                copied[(index - 1) % 2] = stream.record_event()
        stream.synchronize()

    def _spans(self, count: int, itemsize: int) -> list[tuple[int, int]]:
        """``count`` elements as (start, length) of pieces; one, empty, where there are none."""
        step = max(1, self._chunk // itemsize)
        return [(start, min(step, count - start)) for start in range(0, count or 1, step)]

    # Elementwise: pieces of the flat tensor ---------------------------------------------------------------------

    def _elementwise(self, tensor: Tensor, call: Callable[[Tensor], None], down: bool, up: bool) -> None:
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

    # By rank: pieces of the same columns of all ranks' rows -------------------------------------------------------

    def _by_rank(
        self,
        output: Tensor | None,
        input: Tensor | None,
        wide: tuple[bool, bool],
        call: Callable[[Any, Any], None],
    ) -> None:
        """``wide``: whether (output, input) has a row for each rank. The tensor of a rank that has none is None."""
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

    # Point to point: whole messages, whose length the receiver sees -----------------------------------------------

    def send(self, tensor: Tensor, dst: int) -> None:
        self.exchange([("send", tensor, dst)])

    def recv(self, tensor: Tensor, src: int) -> None:
        self.exchange([("recv", tensor, src)])

    def sendrecv(self, sent: Tensor, dst: int, received: Tensor, src: int) -> None:
        self.exchange([("send", sent, dst), ("recv", received, src)])

    def exchange(self, transfers: list[tuple[str, Tensor, int]]) -> None:
        """Post all sends and receives, ``(verb, tensor, peer)``, at once; wait for all. Host tensors go as they are."""
        staged = []
        for verb, tensor, peer in transfers:
            buffer = tensor
            if not tensor.is_cpu:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pinned and tensor.numel() > 0)
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
