"""NCCL for device tensors, as the operations use it: its calls are enqueued on a CUDA stream by CuPy's binding.

cupy is imported only when a device communicator is made. (The one other file that imports it is ``kernel.py``, for a
kernel.) Tensors and streams are handed to the binding as addresses.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from commengine.agreement import raise_together
from commengine.dtypes import NCCL_BYTE
from commengine.errors import CollectiveError, SettledError, TransferError
from commengine.job_end import is_child_of_rank
from commengine.mpi import load_mpi
from commengine.torch_private import private

if TYPE_CHECKING:
    from mpi4py import MPI

#: the extra that brings CuPy and NCCL for a torch that is built for this major version of CUDA
EXTRAS = {"12": "gpu", "13": "gpu-cuda13"}

#: what else a program can do
WITHOUT_CUPY = "transport='staged' needs no CuPy, and device='cpu' no GPU"

#: the CUDA version that torch is built for, such as "12.8"; "" if it is built without CUDA
CUDA_OF_TORCH = str(torch.version.cuda or "")

#: the first NCCL with ncclAvg (2.10), as ncclGetVersion writes it
NCCL_LEAST = 21000

UNIQUE_ID_BYTES = 128

#: with this environment variable set to 1, NCCL 2.26 or newer launches the collectives of several communicators of a
#: device in the order in which the host enqueues them. Without that order, communicators in flight may deadlock
LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"

#: with this environment variable set to 0, each call returns before it is done, with a status that CuPy has as an error
BLOCKING = "NCCL_COMM_BLOCKING"

#: seconds that a transport which is dropped without `close` waits for its collectives in flight
DROP_SECONDS = 5.0

_CURRENT = private("_cuda_getCurrentRawStream")

Made = TypeVar("Made")


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

    def pinned(self, like: Tensor) -> Tensor:
        """Return page-locked host memory, which a device copies to and from, of a tensor's shape and dtype."""
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.numel() > 0)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy between host and device on the current stream. Autograd does not see it, as it sees no collective."""
        with torch.inference_mode():
            target.copy_(source, non_blocking=True)

    def current_address(self, device: torch.device) -> int:
        """Return the address of torch's current stream on ``device``, without an object for it: a call needs no more.

        ``torch.cuda.current_stream`` costs 2 microseconds and more, this one a fraction of one.
        """
        return int(_CURRENT(device.index))  # what torch.compile's own kernels ask

    def refuse_capture(self) -> None:
        """Raise SettledError if torch's current stream is captured into a CUDA graph.

        A collective waits for the communicator's last one, perhaps on another stream. Such a wait ends a capture, and
        a replayed graph could not wait again.
        """
        if self.cuda.is_current_stream_capturing():
            raise SettledError("collectives cannot be captured into a CUDA graph: call them outside of the graph")


def to_install(version: str = CUDA_OF_TORCH) -> str:
    """Return the command that installs what NCCL needs. It names a checkout, because the extras are on no index.

    version: the CUDA version that torch is built for; "" if it is built without CUDA.
    """
    extra = EXTRAS.get(version.split(".")[0])
    all_of_them = " or ".join(f"pip install '.[{name}]' (CUDA {cuda})" for cuda, name in EXTRAS.items())
    return "in a checkout of commengine, " + (f"pip install '.[{extra}]'" if extra else all_of_them)


def load_runtime() -> Runtime:
    """Import the binding. Raises CollectiveError, with the command to install it, if it or libnccl is missing."""
    try:
        import cupy
        from cupy.cuda import nccl
    except ImportError as error:
        raise CollectiveError(f"CuPy cannot be imported ({error}): {to_install()}; {WITHOUT_CUPY}") from error
    if not nccl.available:
        raise CollectiveError(f"CuPy finds no libnccl.so.2: {to_install()}; {WITHOUT_CUPY}")
    return Runtime(nccl, torch.cuda, cupy.cuda.runtime.runtimeGetVersion())


# Connecting ---------------------------------------------------------------------------------------------------


def together(comm: MPI.Intracomm, make: Callable[[], Made], said: str = "") -> Made:
    """Return ``make()``. Collective over ``comm``; raises CollectiveError on every rank if it failed on any rank.

    Then the ranks on which it did not fail abort what they made, if that is not None. said: begins a failure's words.
    """
    made: Any = None
    problem, cause = None, None
    try:
        made = make()
    except Exception as error:  # the other ranks wait: they must learn of any error
        problem, cause = said + explain(error), error
    try:
        raise_together(comm, problem)
    except CollectiveError as error:
        if made is not None:
            made.abort()
        raise error from cause
    return made  # type: ignore[no-any-return]


def connect(runtime: Runtime, comm: MPI.Intracomm, device: torch.device) -> Any:
    """Return an NCCL communicator over the ranks of ``comm``, in their order. Collective.

    Raises CollectiveError on every rank or on none. Sets `LAUNCH_ORDER` in this process's environment, unless it is
    set already, because NCCL reads it when it starts.
    """
    os.environ.setdefault(LAUNCH_ORDER, "1")
    blocks = os.environ.get(BLOCKING) != "0"
    raise_together(comm, None if blocks else f"{BLOCKING}=0: NCCL communicators must block: unset it, or set it to 1")

    def drawn() -> bytes | None:
        if comm.rank != 0:
            return None
        return bytes(value & 0xFF for value in runtime.nccl.get_unique_id())  # CuPy 13: a tuple of signed bytes

    unique = bytearray(together(comm, drawn, "no unique id: ") or UNIQUE_ID_BYTES)
    comm.Bcast([unique, load_mpi().BYTE], 0)

    def join() -> Any:
        with runtime.cuda.device(device):  # NCCL takes the thread's current device
            return _joined(runtime.nccl.NcclCommunicator, comm.size, bytes(unique), comm.rank)

    return together(comm, join, "NCCL cannot start: ")


def _joined(kind: Any, size: int, unique: bytes, rank: int) -> Any:
    try:
        return kind(size, unique, rank)
    except TypeError:  # CuPy 13, before it has done anything
        return kind(size, tuple(value - 256 if value > 127 else value for value in unique), rank)


def explain(error: BaseException) -> str:
    """Return an error of the binding in words, with NCCL's own, because CuPy says no more than "unhandled cuda error".

    CuPy's table of codes ends at 6; it raises KeyError for 7 and 8.
    """
    if type(error).__name__ == "NcclError" and (said := last_error()):
        return f"{error} ({said})"
    if isinstance(error, KeyError):
        words = {7: f"in progress: {BLOCKING}=0 is set, perhaps in nccl.conf, and must not be", 8: "timeout"}
        return f"NCCL error {error.args[0]} ({words.get(error.args[0], 'unknown')})"
    return str(error) or type(error).__name__


def last_error() -> str:
    """Return NCCL's words for the last error of this process; "" if it has none, or is older than 2.13."""
    try:
        find = ctypes.CDLL("libnccl.so.2", os.RTLD_NOW | os.RTLD_NOLOAD).ncclGetLastError
    except (OSError, AttributeError):
        return ""
    find.argtypes, find.restype = (ctypes.c_void_p,), ctypes.c_char_p
    return (find(None) or b"").decode(errors="replace").strip()


# Running ------------------------------------------------------------------------------------------------------


class NcclWire:
    """One NCCL communicator for the operations on tensors of one device; the wire owns it.

    comm: the NCCL communicator (see `connect`). stream: the CUDA stream that all calls are enqueued on; None: torch's
    current stream at each call.

    Each call returns when it is enqueued. A call that NCCL refuses raises TransferError.
    """

    def __init__(self, runtime: Runtime, comm: Any, device: torch.device, stream: Any = None) -> None:
        self._comm = comm
        self._life = threading.Lock()  # the watcher's thread may call `failure` while this thread closes
        self._fixed = stream
        self._last = stream  # holds the last call, and waits for all earlier ones
        self._address: int | None = None if stream is None else stream.cuda_stream  # of `_last`
        self.runtime = runtime
        self.device = device
        try:
            self.rank: int = comm.rank_id()
            self.size: int = comm.size()
            #: one byte of device memory
            self.byte = runtime.byte(device)
        except BaseException:  # the traceback would keep the NCCL communicator, and other ranks may wait for its end
            self.abort()
            raise

    @classmethod
    def open(cls, runtime: Runtime, comm: MPI.Intracomm, device: torch.device, stream: Any = None) -> NcclWire:
        """Connect the ranks of ``comm``. Collective. Raises CollectiveError on every rank or on none."""
        return together(comm, lambda: cls(runtime, connect(runtime, comm, device), device, stream))

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

    def __del__(self) -> None:
        # CuPy's destructor waits for the other ranks without an end. A transport that was not closed must not hang when
        # it is dropped, and must not end collectives that every rank has enqueued.
        if getattr(self, "_comm", None) is None:
            return
        if is_child_of_rank():  # the communicator is its parent's
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._comm))  # CuPy's destructor would end it
            return
        with contextlib.suppress(Exception):  # the interpreter may be ending
            self._wait_in_flight(DROP_SECONDS)
        self.abort()

    def _wait_in_flight(self, seconds: float) -> None:
        """Wait until all calls so far are done, NCCL reports a failure, or ``seconds`` have passed."""
        if self._last is None:
            return
        event, deadline = self._last.record_event(), time.monotonic() + seconds
        while not event.query() and self.failure() is None and time.monotonic() < deadline:
            time.sleep(1e-3)

    def _stream(self) -> int:
        """Return the address of the stream for this call. The stream waits for all earlier calls of the group."""
        if self._fixed is None:
            self.runtime.refuse_capture()
            if (address := self.runtime.current_address(self.device)) != self._address:
                stream = self.runtime.cuda.current_stream(self.device)
                if self._last is not None:
                    stream.wait_stream(self._last)
                self._last, self._address = stream, address
        assert self._address is not None
        return self._address

    def _call(self, function: Callable[..., Any], *args: int) -> Any:
        try:
            if self.size > 1:
                return function(*args)
            # NCCL does not set the device itself where a rank is alone, and an average is a kernel there, too.
            with self.runtime.cuda.device(self.device):
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

    def enqueue(self, call: str, *args: int) -> None:
        """Enqueue NCCL's ``call``: a method of CuPy's NcclCommunicator, and its arguments before the stream."""
        self._call(getattr(self._comm, call), *args, self._stream())

    def send(self, address: int, nbytes: int, peer: int) -> None:
        """Enqueue a message to rank ``peer``; nothing if it is empty."""
        if nbytes:
            self.enqueue("send", address, nbytes, NCCL_BYTE, peer)

    def recv(self, address: int, nbytes: int, peer: int) -> None:
        """Enqueue a message from rank ``peer``; nothing if it is empty."""
        if nbytes:
            self.enqueue("recv", address, nbytes, NCCL_BYTE, peer)


def numbers_of(tensor: Tensor) -> int:
    """Return how many numbers NCCL counts in a tensor: a complex number is two of them."""
    return 2 * tensor.numel() if tensor.is_complex() else tensor.numel()
