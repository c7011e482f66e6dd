"""NCCL through CuPy's binding, for device tensors: each operation of a Communicator, enqueued on a CUDA stream.

The only file that imports cupy, and only when a device communicator is made. Nothing here checks its arguments:
`Communicator` has. Tensors and streams go to the binding as addresses.
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
from commengine.errors import CollectiveError
from commengine.host.transport import TransferError
from commengine.mpi import load_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

EXTRAS = "pip install 'commengine[gpu]' (CUDA 12) or 'commengine[gpu-cuda13]' (CUDA 13)"

#: ncclAvg came with 2.10, ncclCommSplit with 2.18 (ncclGetVersion's numbers)
NCCL_LEAST = 21000
NCCL_SPLIT = 21800

UNIQUE_ID_BYTES = 128


@dataclass(frozen=True)
class Runtime:
    """What a device communicator runs on: its own or, in a test, what stands in for it.

    nccl: the binding, ``cupy.cuda.nccl``. cuda: streams and events, ``torch.cuda``. cuda_version: of CuPy, as
    cudaRuntimeGetVersion writes it (12090).
    """

    nccl: Any
    cuda: Any
    cuda_version: int

    def byte(self, device: torch.device) -> Tensor:
        """One byte of device memory."""
        return torch.zeros(1, dtype=torch.uint8, device=device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy between host and device, on the current stream and behind autograd's back, as a collective does."""
        with torch.inference_mode():
            target.copy_(source, non_blocking=True)


def load_runtime() -> Runtime:
    """Import the binding. Raises CollectiveError, naming what to install, where it or libnccl is missing."""
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
    """An NCCL communicator over the ranks of ``comm``, in their order. Collective; raises on every rank or on none."""
    unique, problem = bytearray(UNIQUE_ID_BYTES), None
    if comm.rank == 0:
        try:
            # CuPy 13's is a tuple of signed bytes.
            unique[:] = bytes(value & 0xFF for value in runtime.nccl.get_unique_id())
        except Exception as error:  # the others wait: whatever it is, they must learn of it
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
    """NCCL takes the calling thread's current device; it is the caller's again afterwards."""
    with runtime.cuda.device(device):
        yield


def explain(error: BaseException) -> str:
    """What an error of the binding means. CuPy's own table ends at code 6: of 7 and 8 it knows the number only."""
    if isinstance(error, KeyError):
        return f"NCCL error {error.args[0]} ({ {7: 'in progress', 8: 'timeout'}.get(error.args[0], 'unknown') })"
    return str(error) or type(error).__name__


# Running ------------------------------------------------------------------------------------------------------


class DeviceTransport:
    """Collectives on contiguous tensors of one device, over one NCCL communicator, which it owns.

    comm: the NCCL communicator (see `connect`). stream: the CUDA stream that all calls are enqueued on; None: torch's
    current one at each call.

    Each call returns when it is enqueued. Raises TransferError where NCCL refuses one.
    """

    def __init__(self, runtime: Runtime, comm: Any, device: torch.device, stream: Any = None) -> None:
        self.rank: int = comm.rank_id()
        self.size: int = comm.size()
        self.device = device
        self.runtime = runtime
        self._comm = comm
        self._life = threading.Lock()  # a watcher's thread asks `failure` while this one closes
        self._fixed = stream
        self._last = stream
        self._byte = runtime.byte(device)

    @classmethod
    def open(cls, runtime: Runtime, comm: MPI.Intracomm, device: torch.device) -> DeviceTransport:
        """Connect the ranks of ``comm``. Collective."""
        return cls(runtime, connect(runtime, comm, device), device)

    def split(self, part: MPI.Intracomm | None, color: int | None, key: int, stream: Any = None) -> Any:
        """The transport of this rank's ``part`` of the group, None where it has none. Collective over the group.

        part: what splitting the MPI communicator by the same color and key gave.
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
        """An error that came after a call was enqueued (another rank's end, a broken link); never blocks."""
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
        """End the NCCL communicator and the calls that are under way, whatever the other ranks do."""
        if getattr(self, "_comm", None) is not None:
            self._taken().abort()

    def _taken(self) -> Any:
        with self._life:
            comm, self._comm = self._comm, None
            return comm

    # CuPy's destructor destroys, which waits for the other ranks; what was not closed must not hang at its end.
    __del__ = abort

    def _stream(self) -> int:
        """The address of the stream that this call goes to, after all calls on this communicator before it."""
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
        """One launch for all calls of the block, in any order: none may touch what another one writes."""
        self._call(self.runtime.nccl.groupStart)
        try:
            yield
        except BaseException:
            with contextlib.suppress(TransferError):  # the error that is under way says more
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
            target = data if self.rank == root else 0  # elsewhere NCCL has nothing to write to
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
        """What is enqueued on the stream later starts when every rank's stream got here; the host goes on."""
        self.all_reduce(self._byte, "max")

    # Point to point -------------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, dst: int) -> None:
        self._send(tensor.data_ptr(), tensor.nbytes, dst)

    def recv(self, tensor: Tensor, src: int) -> None:
        self._recv(tensor.data_ptr(), tensor.nbytes, src)

    def sendrecv(self, sent: Tensor, dst: int, received: Tensor, src: int) -> None:
        self.exchange([("send", sent, dst), ("recv", received, src)])

    def exchange(self, transfers: list[tuple[str, Tensor, int]]) -> None:
        """All sends and receives, ``(verb, tensor, peer)``, in one launch: no order deadlocks."""
        with self.group():
            for verb, tensor, peer in transfers:
                (self._send if verb == "send" else self._recv)(tensor.data_ptr(), tensor.nbytes, peer)

    def _send(self, address: int, nbytes: int, peer: int) -> None:
        if nbytes:
            self._call(self._comm.send, address, nbytes, NCCL_BYTE, peer, self._stream())

    def _recv(self, address: int, nbytes: int, peer: int) -> None:
        if nbytes:
            self._call(self._comm.recv, address, nbytes, NCCL_BYTE, peer, self._stream())
