"""``cupy.cuda.nccl`` without a GPU: it takes addresses of host memory and moves the bytes between ranks, over MPI.

Every call is held against the signatures of the real binding. As NCCL does, it enqueues on a stream, runs nothing of
a group before the group ends, and then in an order of its own; a communicator is made by whoever knows the unique id,
and is not closed or split while calls are outstanding. Ranks connect when they first communicate: the host then waits
for the others. Sums and averages are rounded after each step, in an order that is not the ranks'. An abort ends calls
in flight. Collectives of several communicators run in the order of the host only with NCCL_LAUNCH_ORDER_IMPLICIT=1;
otherwise each rank's waits decide, and ranks may wait for each other in a circle.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

from commengine.device.nccl import Runtime
from tests.support.device.cuda_stand_in import CudaStandIn
from tests.support.device.nccl_signatures import CONSTANTS, SIGNATURES

TYPES = {
    CONSTANTS["NCCL_INT8"]: torch.int8,
    CONSTANTS["NCCL_UINT8"]: torch.uint8,
    CONSTANTS["NCCL_INT32"]: torch.int32,
    CONSTANTS["NCCL_INT64"]: torch.int64,
    CONSTANTS["NCCL_FLOAT16"]: torch.float16,
    CONSTANTS["NCCL_FLOAT32"]: torch.float32,
    CONSTANTS["NCCL_FLOAT64"]: torch.float64,
    CONSTANTS["NCCL_BFLOAT16"]: torch.bfloat16,
}
#: seconds after which ranks that wait for each other are taken to be in a deadlock
DEADLOCK_SECONDS = 8.0
ORDERED = 22600  # the first NCCL that knows NCCL_LAUNCH_ORDER_IMPLICIT
CONNECT_TAG = 7  # of messages between ranks that connect

OPS = {CONSTANTS[f"NCCL_{name.upper()}"]: name for name in ("sum", "prod", "max", "min", "avg")}


class NcclError(RuntimeError):
    """As CuPy's: its table ends at 6."""

    def __init__(self, status: int) -> None:
        table = {
            1: "UNHANDLED_CUDA",
            2: "SYSTEM",
            3: "INTERNAL",
            4: "INVALID_ARGUMENT",
            5: "INVALID_USAGE",
            6: "REMOTE",
        }
        super().__init__(f"NCCL_ERROR_{table[status]}")


def checked(signature: str, arguments: tuple[Any, ...]) -> None:
    """Assert that a call's arguments are what ``signature`` takes."""
    wanted = [part.split() for part in re.search(r"\((.*)\)", signature)[1].split(", ") if part not in ("", "self")]
    optional = [part for part in wanted if "=" in part[-1]]
    assert len(wanted) - len(optional) <= len(arguments) <= len(wanted), f"{signature}: {arguments}"
    for (kind, name), value in zip(wanted, arguments, strict=False):
        if kind in ("bytes", "tuple"):
            if type(value).__name__ != kind:  # what Cython raises
                raise TypeError(f"Argument {name!r} has incorrect type (expected {kind}, got {type(value).__name__})")
            assert len(value) == 128
            assert kind == "bytes" or all(-128 <= byte <= 127 for byte in value)
        elif kind in ("int", "size_t", "intptr_t"):
            assert type(value) is int, f"{signature}: {name}={value!r}"
            assert -(2**31) <= value < 2**31 if kind == "int" else 0 <= value < 2**63, f"{signature}: {name}={value}"


def memory(address: int, nbytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """The memory at ``address``, not a copy."""
    assert address > 0 and nbytes > 0
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8).view(dtype)


def met(requests: list[MPI.Request], what: str) -> None:
    """Wait for the requests. Raises AssertionError if that takes so long that it would never end."""
    deadline = time.monotonic() + DEADLOCK_SECONDS
    while not MPI.Request.Testall(requests):
        assert time.monotonic() < deadline, f"deadlock: {what}"
        time.sleep(1e-5)


class Launch:
    """What NCCL launches at once on one stream."""

    def __init__(self, stream: Any, group: list[Any], before: Launch | None) -> None:
        self.stream, self.group, self.before = stream, group, before

    def reach(self) -> None:
        """Run the stream until the launch is done."""
        if self.group:
            self.stream.run(self)


class NcclStandIn:
    """The module. cupy: which major version of CuPy it is. cuda: whose streams it enqueues on."""

    available = True

    def __init__(self, cuda: CudaStandIn, cupy: int = 14, version: int = 23203) -> None:
        self.cuda, self.cupy, self.version = cuda, cupy, version
        self.calls: list[str] = []  # names, in the order of the calls
        self.fail: dict[str, int] = {}  # name -> the status that its next call returns
        self.group: list[tuple[Any, Callable[[], None], str, Any]] = []
        self.depth = 0
        self.comms: list[Any] = []
        self.ordered: bool | None = None  # whether launches keep the host's order; None: NCCL has not started
        self.last: Launch | None = None
        self.NcclCommunicator = functools.partial(self._new, None)

    def entered(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.calls.append(name.rpartition(".")[2])
        checked(SIGNATURES[self.cupy][name], arguments)
        if (status := self.fail.pop(name.rpartition(".")[2], 0)) != 0:
            raise NcclError(status)

    def get_version(self) -> int:
        return self.version

    def get_unique_id(self) -> Any:
        self.entered("get_unique_id", ())
        self._start()
        unique = os.urandom(128)
        return unique if self.cupy >= 14 else tuple(byte - 256 if byte > 127 else byte for byte in unique)

    def groupStart(self) -> None:
        self.entered("groupStart", ())
        self.depth += 1

    def groupEnd(self) -> None:
        self.depth -= 1
        group = []
        if self.depth == 0:
            group, self.group = self.group, []
        self.entered("groupEnd", ())
        self._launch(group)

    def _start(self) -> None:
        """Read the environment, once, as NCCL does."""
        if self.ordered is None:
            self.ordered = os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") == "1" and self.version >= ORDERED

    def enqueue(self, stream: int, work: Callable[[], None], name: str, transfer: Any, connect: Any) -> None:
        entry = (self.cuda.streams[stream], work, name, transfer, connect)
        if self.depth:
            self.group.append(entry)
        else:
            self._launch([entry])

    def _launch(self, group: list[Any]) -> None:
        met([request for *_, connect in group for request in connect()], "not every rank connects")
        for stream in dict.fromkeys(stream for stream, *_ in group):
            mine = [(work, name, transfer) for one, work, name, transfer, _ in group if one is stream]
            launch = Launch(stream, mine, self.last if self.ordered else None)
            stream.put(functools.partial(self._run_launch, launch), launch)
            self.last = launch

    def _run_launch(self, launch: Launch) -> None:
        if launch.before is not None:
            launch.before.reach()
        group, launch.group, launch.before = launch.group, [], None
        self._run_group(group)

    def _run_group(self, group: list[Any]) -> None:
        requests = []
        for verb in ("recv", "send"):
            requests += [transfer() for _, name, transfer in group if name == verb]
        met([request for request in requests if request is not None], "a send or recv without its counterpart")
        for work, _, transfer in reversed(group):  # not the caller's order: nobody may rely on it
            if transfer is None:
                work()
        for work, _, transfer in group:
            if transfer is not None:
                work()

    def _new(self, comm: Any, *arguments: Any) -> Any:
        if comm is None:
            self.entered("NcclCommunicator", arguments)
            self._start()
            comm = rendezvous(*arguments)
        made = NcclCommunicatorStandIn(self, comm)
        self.comms.append(made)
        return made


def rendezvous(size: int, unique: Any, rank: int) -> MPI.Intracomm:
    """Find the others who know ``unique``, and nobody else."""
    name = bytes(byte & 0xFF for byte in unique)
    folder = Path(tempfile.gettempdir(), f"nccl-stand-in-{name[:16].hex()}")
    folder.mkdir(exist_ok=True)
    mine = folder / f"{rank}.new"
    mine.write_text(str(MPI.COMM_WORLD.rank))
    mine.rename(folder / str(rank))
    deadline = time.monotonic() + 20
    while not all((folder / str(peer)).exists() for peer in range(size)):
        assert time.monotonic() < deadline, "not every rank came"
        time.sleep(1e-4)
    members = [int((folder / str(peer)).read_text()) for peer in range(size)]
    group = MPI.COMM_WORLD.Get_group().Incl(members)
    comm = MPI.COMM_WORLD.Create_group(group, zlib.crc32(name) % 30000)
    comm.Barrier()
    (folder / str(rank)).unlink()
    comm.Barrier()
    if rank == 0:
        folder.rmdir()
    return comm


class NcclCommunicatorStandIn:
    """An NCCL communicator of this rank."""

    def __init__(self, nccl: NcclStandIn, comm: MPI.Intracomm) -> None:
        self.nccl, self.mpi = nccl, comm
        self.device = nccl.cuda.current_device
        self.outstanding = 0
        self.end = ""
        self.connected: set[tuple[str, int]] = set()  # (verb, peer); the collectives are ("", -1)

    def __getattribute__(self, name: str) -> Any:
        if name == "commSplit" and self.nccl.cupy < 14:
            raise AttributeError(name)
        return super().__getattribute__(name)

    def _enter(self, name: str, *arguments: Any) -> None:
        self.nccl.entered(f"NcclCommunicator.{name}", arguments)
        assert not self.end, f"{name} after {self.end}"

    def _put(self, stream: int, work: Callable[[], None], name: str = "", peer: int = -1, transfer: Any = None) -> None:
        self.outstanding += 1
        if self.mpi.size == 1:  # NCCL sets the device where it has others to speak to
            assert self.nccl.cuda.current_device == self.device, "invalid resource handle"

        def run() -> None:
            self.outstanding -= 1
            if self.end != "abort":
                work()

        moved = None if transfer is None else lambda: None if self.end == "abort" else transfer()
        self.nccl.enqueue(stream, run, name, moved, functools.partial(self._connect, name, peer))

    def _connect(self, name: str, peer: int) -> list[MPI.Request]:
        """Begin to connect with ``peer``, or with all ranks for a collective, unless this was done before."""
        if (name, peer) in self.connected:
            return []
        self.connected.add((name, peer))
        nothing = bytearray(0)
        if name == "":
            return [self.mpi.Ibarrier()]
        return [(self.mpi.Issend if name == "send" else self.mpi.Irecv)(nothing, peer, CONNECT_TAG)]

    def size(self) -> int:
        return self.mpi.size

    def rank_id(self) -> int:
        return self.mpi.rank

    def check_async_error(self) -> None:
        self._enter("check_async_error")

    def commSplit(self, color: int, key: int) -> Any:
        status = self.nccl.fail.pop("commSplit", 0)
        self._enter("commSplit", color, key)
        assert not self.outstanding, "split while calls are outstanding"
        part = self.mpi.Split(MPI.UNDEFINED if color == -1 else color, key)
        if status:  # after the exchange: the other ranks' calls succeed
            raise NcclError(status)
        return None if part == MPI.COMM_NULL else self.nccl._new(part)

    def destroy(self) -> None:
        self._enter("destroy")
        assert not self.outstanding, "destroyed while calls are outstanding"
        self.end = "destroy"
        self.mpi.Free()  # as with NCCL: every rank, or none returns

    def abort(self) -> None:
        self._enter("abort")
        self.end = "abort"

    # Collectives ----------------------------------------------------------------------------------------------

    def _everybody(self, address: int, nbytes: int) -> torch.Tensor:
        parts = torch.empty((self.mpi.size, nbytes), dtype=torch.uint8)
        met([self.mpi.Ibarrier()], "the ranks run the collectives of two communicators in different orders")
        self.mpi.Allgather(memory(address, nbytes).numpy(), parts.numpy())
        return parts

    def _reduced(self, address: int, count: int, datatype: int, op: int) -> torch.Tensor:
        dtype = TYPES[datatype]
        parts = self._everybody(address, count * dtype.itemsize).view(dtype)
        name = OPS[op]
        assert name != "avg" or dtype.is_floating_point
        if name == "avg":
            parts = parts * torch.tensor(1 / self.mpi.size, dtype=dtype)
        step = {"prod": torch.mul, "max": torch.maximum, "min": torch.minimum}.get(name, torch.add)
        return functools.reduce(step, parts.flip(0))

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        self._enter("allReduce", sendbuf, recvbuf, count, datatype, op, stream)
        dtype = TYPES[datatype]

        def work() -> None:
            memory(recvbuf, count * dtype.itemsize, dtype).copy_(self._reduced(sendbuf, count, datatype, op))

        self._put(stream, work)

    def reduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int) -> None:
        self._enter("reduce", sendbuf, recvbuf, count, datatype, op, root, stream)
        dtype = TYPES[datatype]
        assert bool(recvbuf) == (self.mpi.rank == root), "NCCL may write there"

        def work() -> None:
            total = self._reduced(sendbuf, count, datatype, op)
            if recvbuf:
                memory(recvbuf, count * dtype.itemsize, dtype).copy_(total)

        self._put(stream, work)

    def reduceScatter(self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int) -> None:
        self._enter("reduceScatter", sendbuf, recvbuf, recvcount, datatype, op, stream)
        dtype = TYPES[datatype]

        def work() -> None:
            total = self._reduced(sendbuf, recvcount * self.mpi.size, datatype, op)
            mine = total[recvcount * self.mpi.rank :][:recvcount]
            memory(recvbuf, recvcount * dtype.itemsize, dtype).copy_(mine)

        self._put(stream, work)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        self._enter("allGather", sendbuf, recvbuf, count, datatype, stream)
        nbytes = count * TYPES[datatype].itemsize

        def work() -> None:
            memory(recvbuf, nbytes * self.mpi.size).copy_(self._everybody(sendbuf, nbytes).flatten())

        self._put(stream, work)

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        self._enter("broadcast", sendbuff, recvbuff, count, datatype, root, stream)
        nbytes = count * TYPES[datatype].itemsize

        def work() -> None:
            if self.mpi.rank == root and sendbuff != recvbuff:
                memory(recvbuff, nbytes).copy_(memory(sendbuff, nbytes))
            met([self.mpi.Ibarrier()], "the ranks run the collectives of two communicators in different orders")
            self.mpi.Bcast(memory(recvbuff, nbytes).numpy(), root)

        self._put(stream, work)

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._enter("send", sendbuf, count, datatype, peer, stream)
        nbytes = count * TYPES[datatype].itemsize
        self._put(stream, _nothing, "send", peer, lambda: self.mpi.Issend(memory(sendbuf, nbytes).numpy(), peer))

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._enter("recv", recvbuf, count, datatype, peer, stream)
        nbytes = count * TYPES[datatype].itemsize
        self._put(stream, _nothing, "recv", peer, lambda: self.mpi.Irecv(memory(recvbuf, nbytes).numpy(), peer))


def _nothing() -> None:
    pass


class RuntimeStandIn(Runtime):
    """A `Runtime` whose device memory is the host's."""

    def byte(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target, source = target.detach(), source.detach()
        self.cuda.kernel(lambda: target.copy_(source))


def runtime_stand_in(cupy: int = 14, devices: int = 1, version: int = 23203) -> RuntimeStandIn:
    cuda = CudaStandIn(devices)
    return RuntimeStandIn(NcclStandIn(cuda, cupy, version), cuda, 12090)
