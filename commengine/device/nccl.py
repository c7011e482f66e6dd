"""The NCCL transport for device tensors: each operation of a Communicator, enqueued on a CUDA stream by CuPy's binding.

This is the only file that imports cupy, and it does so only when a device communicator is made. The transport checks no
arguments, because `Communicator` has checked them. Tensors and streams are handed to the binding as addresses.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from commengine.agreement import raise_together
from commengine.dtypes import NCCL_BYTE, NCCL_REDUCTIONS
from commengine.errors import CollectiveError, TransferError
from commengine.mpi import load_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

EXTRAS = "pip install 'commengine[gpu]' (CUDA 12) or 'commengine[gpu-cuda13]' (CUDA 13)"

#: the first NCCL with ncclAvg (2.10) and with ncclCommSplit (2.18), as ncclGetVersion writes them
NCCL_LEAST = 21000
NCCL_SPLIT = 21800

UNIQUE_ID_BYTES = 128


@dataclass(frozen=True)
class Runtime:
    """The libraries that a device communicator runs on. Tests put stand-ins in their place.

    nccl: the binding, ``cupy.cuda.nccl``. cuda: streams and events, ``torch.cuda``. cuda_version: CuPy's CUDA version,
    as cudaRuntimeGetVersion writes it (12090).
    """

    nccl: Any
    cuda: Any
    cuda_version: int

    def byte(self, device: torch.device) -> Tensor:
        """Return one byte of device memory."""
        return torch.zeros(1, dtype=torch.uint8, device=device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy between host and device on the current stream. Autograd does not see it, as it sees no collective."""
        with torch.inference_mode():
            target.copy_(source, non_blocking=True)


def load_runtime() -> Runtime:
    """Import the binding. Raises CollectiveError, with the package to install, if it or libnccl is missing."""
    try:
        import cupy
        from cupy.cuda import nccl
    except ImportError as error:
        raise CollectiveError(f"CuPy cannot be imported ({error}): {EXTRAS}, or use device='cpu'") from error
    if not nccl.available:
        raise CollectiveError(f"CuPy finds no libnccl.so.2: {EXTRAS}, or use device='cpu'")
    return Runtime(nccl, torch.cuda, cupy.cuda.runtime.runtimeGetVersion())


# Connecting ---------------------------------------------------------------------------------------------------


def connect(runtime: Runtime, comm: MPI.Intracomm, device: torch.device) -> Any:
    """Return an NCCL communicator over the ranks of ``comm``, in their order. Collective.

    Raises CollectiveError on every rank or on none.
    """
    unique, problem = bytearray(UNIQUE_ID_BYTES), None
    if comm.rank == 0:
        try:
            # CuPy 13 returns a tuple of signed bytes.
            unique[:] = bytes(value & 0xFF for value in runtime.nccl.get_unique_id())
        except Exception as error:  # the other ranks wait: they must learn of any error
            problem = f"no unique id: {explain(error)}"
    raise_together(comm, problem)
    comm.Bcast([unique, load_mpi().BYTE], 0)
    with _on(runtime, device):
        try:
            made = _joined(runtime.nccl.NcclCommunicator, comm.size, bytes(unique), comm.rank)
        except Exception as error:
            made, problem = None, f"NCCL cannot start: {explain(error)}"
    try:
        raise_together(comm, problem)
    except CollectiveError:
        if made is not None:
            made.abort()
        raise
    return made


def _joined(kind: Any, size: int, unique: bytes, rank: int) -> Any:
    try:
        return kind(size, unique, rank)
    except TypeError:  # CuPy 13, before it has done anything
        return kind(size, tuple(value - 256 if value > 127 else value for value in unique), rank)


@contextlib.contextmanager
def _on(runtime: Runtime, device: torch.device) -> Iterator[None]:
    """Make ``device`` the thread's current device inside the block, because NCCL takes that one."""
    with runtime.cuda.device(device):
        yield


def explain(error: BaseException) -> str:
    """Return an error of the binding in words. CuPy's table of codes ends at 6; it raises KeyError for 7 and 8."""
    if isinstance(error, KeyError):
        return f"NCCL error {error.args[0]} ({ {7: 'in progress', 8: 'timeout'}.get(error.args[0], 'unknown') })"
    return str(error) or type(error).__name__


# Running ------------------------------------------------------------------------------------------------------


class DeviceTransport:
    """Collectives on contiguous tensors of one device, over one NCCL communicator, which the transport owns.

    comm: the NCCL communicator (see `connect`). stream: the CUDA stream that all calls are enqueued on; None: torch's
    current stream at each call.

    Each call returns when it is enqueued. A call that NCCL refuses raises TransferError.
    """

    def __init__(self, runtime: Runtime, comm: Any, device: torch.device, stream: Any = None) -> None:
        self.rank: int = comm.rank_id()
        self.size: int = comm.size()
        self.device = device
        self.runtime = runtime
        self._comm = comm
        self._life = threading.Lock()  # the watcher's thread may call `failure` while this thread closes
        self._fixed = stream
        self._last = stream
        self._byte = runtime.byte(device)

    @classmethod
    def open(cls, runtime: Runtime, comm: MPI.Intracomm, device: torch.device) -> DeviceTransport:
        """Connect the ranks of ``comm``. Collective."""
        return cls(runtime, connect(runtime, comm, device), device)

    def split(self, part: MPI.Intracomm | None, color: int | None, key: int, stream: Any = None) -> Any:
        """Return the transport of this rank's part of the group; None if it has no part. Collective over the group.

        part: the result of splitting the MPI communicator by the same color and key.
        """
        nccl = self.runtime.nccl
        if hasattr(self._comm, "commSplit") and nccl.get_version() >= NCCL_SPLIT:
            self.synchronize()  # NCCL asks that nothing be outstanding
            with _on(self.runtime, self.device):
                comm = self._call(self._comm.commSplit, -1 if color is None else color, key)
        else:
            comm = None if part is None else connect(self.runtime, part, self.device)
        return None if comm is None else type(self)(self.runtime, comm, self.device, stream)

    def synchronize(self) -> None:
        """Block until all calls so far are done."""
        if self._last is not None:
            self._last.synchronize()

    def failure(self) -> str | None:
        """Return an error that came after a call was enqueued (another rank ended, a link broke), or None.

        Never blocks.
        """
        with self._life:
            if self._comm is None:
                return None
            try:
                self._comm.check_async_error()
            except (RuntimeError, KeyError) as error:
                return None if error.args == (7,) else explain(error)
            return None

    def close(self) -> None:
        """Finish all calls and end the NCCL communicator. Collective; idempotent."""
        if self._comm is not None:
            self.synchronize()
            self._taken().destroy()

    def abort(self) -> None:
        """End the NCCL communicator and the calls under way, without waiting for the other ranks."""
        if getattr(self, "_comm", None) is not None:
            self._taken().abort()

    def _taken(self) -> Any:
        with self._life:
            comm, self._comm = self._comm, None
            return comm

    # CuPy's destructor waits for the other ranks. A transport that was not closed must not hang when it is dropped.
    __del__ = abort

    def _stream(self) -> int:
        """Return the address of the stream for this call. The stream waits for all earlier calls of the group."""
        stream = self._fixed
        if stream is None:
            stream = self.runtime.cuda.current_stream(self.device)
            if stream != self._last:
                if self._last is not None:
                    stream.wait_stream(self._last)
                self._last = stream
        address: int = stream.cuda_stream
        return address

    def _call(self, function: Callable[..., Any], *args: int) -> Any:
        try:
            return function(*args)
        except (RuntimeError, KeyError) as error:
            raise TransferError(f"NCCL: {explain(error)}") from error

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Launch all calls of the block at once, in no order: no call may touch memory that another one writes."""
        self._call(self.runtime.nccl.groupStart)
        try:
            yield
        except BaseException:
            with contextlib.suppress(TransferError):  # the first error says more
                self._call(self.runtime.nccl.groupEnd)
            raise
        self._call(self.runtime.nccl.groupEnd)

    # Reductions -----------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        if count := tensor.numel():
            code, redop = NCCL_REDUCTIONS[tensor.dtype, op]
            data = tensor.data_ptr()
            self._call(self._comm.allReduce, data, data, count, code, redop, self._stream())

    def reduce(self, tensor: Tensor, root: int, op: str) -> None:
        if count := tensor.numel():
            code, redop = NCCL_REDUCTIONS[tensor.dtype, op]
            data = tensor.data_ptr()
            target = data if self.rank == root else 0  # NCCL writes on the root only
            self._call(self._comm.reduce, data, target, count, code, redop, root, self._stream())

    def reduce_scatter(self, output: Tensor, input: Tensor, op: str) -> None:
        if count := output.numel():
            code, redop = NCCL_REDUCTIONS[input.dtype, op]
            source, target = input.data_ptr(), output.data_ptr()
            self._call(self._comm.reduceScatter, source, target, count, code, redop, self._stream())

    # Movement -------------------------------------------------------------------------------------------------

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        if nbytes := input.nbytes:
            source, target = input.data_ptr(), output.data_ptr()
            self._call(self._comm.allGather, source, target, nbytes, NCCL_BYTE, self._stream())

    def broadcast(self, tensor: Tensor, root: int) -> None:
        if nbytes := tensor.nbytes:
            data = tensor.data_ptr()
            self._call(self._comm.broadcast, data, data, nbytes, NCCL_BYTE, root, self._stream())

    def gather(self, output: Tensor | None, input: Tensor, root: int) -> None:
        with self.group():
            self._send(input.data_ptr(), input.nbytes, root)
            if output is not None:
                for peer in range(self.size):
                    self._recv(output.data_ptr() + peer * input.nbytes, input.nbytes, peer)

    def scatter(self, output: Tensor, input: Tensor | None, root: int) -> None:
        with self.group():
            if input is not None:
                for peer in range(self.size):
                    self._send(input.data_ptr() + peer * output.nbytes, output.nbytes, peer)
            self._recv(output.data_ptr(), output.nbytes, root)

    def all_to_all(self, output: Tensor, input: Tensor) -> None:
        nbytes = input.nbytes // self.size
        with self.group():
            for peer in range(self.size):
                self._send(input.data_ptr() + peer * nbytes, nbytes, peer)
                self._recv(output.data_ptr() + peer * nbytes, nbytes, peer)

    def barrier(self) -> None:
        """Let later work on the stream start only when every rank's stream has reached this point. The host goes on."""
        self.all_reduce(self._byte, "max")

    # Point to point -------------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, dst: int) -> None:
        self._send(tensor.data_ptr(), tensor.nbytes, dst)

    def recv(self, tensor: Tensor, src: int) -> None:
        self._recv(tensor.data_ptr(), tensor.nbytes, src)

    def sendrecv(self, sent: Tensor, dst: int, received: Tensor, src: int) -> None:
        self.exchange([("send", sent, dst), ("recv", received, src)])

    def exchange(self, transfers: list[tuple[str, Tensor, int]]) -> None:
        """Launch all sends and receives, ``(verb, tensor, peer)``, at once. No order of them deadlocks."""
        with self.group():
            for verb, tensor, peer in transfers:
                (self._send if verb == "send" else self._recv)(tensor.data_ptr(), tensor.nbytes, peer)

    def _send(self, address: int, nbytes: int, peer: int) -> None:
        if nbytes:
            self._call(self._comm.send, address, nbytes, NCCL_BYTE, peer, self._stream())

    def _recv(self, address: int, nbytes: int, peer: int) -> None:
        if nbytes:
            self._call(self._comm.recv, address, nbytes, NCCL_BYTE, peer, self._stream())
