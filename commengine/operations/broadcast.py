"""broadcast: every rank gets the tensor of one rank."""

from __future__ import annotations

from torch import Tensor

from commengine.device.nccl import NcclWire
from commengine.dtypes import NCCL_BYTE
from commengine.host.wire import MpiWire
from commengine.shared_memory.sequence import SequenceMemory
from commengine.shared_memory.slots import bytes_of
from commengine.shared_memory.windows import WindowTensor
from commengine.stream import DONE, Stream, Work

from .checks import Caller, TensorLike, check_rank, checked_tensor
from .operation import Operation, Run


class Broadcast(Operation):
    """The row of `broadcast`, and its ways."""

    name = formula = "broadcast"
    arguments, counted, in_memory = ("tensor", "root"), "tensor", ("tensor",)

    def by_mpi(self, wire: MpiWire, tensor: Tensor, root: int) -> Run:
        broadcast, address = wire.calls.Bcast, wire.address
        nbytes, datatype = tensor.nbytes, wire.types.move[tensor.dtype]

        def run(tensor: Tensor, _: int) -> None:
            broadcast((address(tensor.data_ptr(), nbytes), datatype), root)

        return run

    def in_window(self, memory: SequenceMemory, place: WindowTensor, tensor: Tensor, root: int) -> None:
        memory.begin("broadcast", place, root)
        if memory.rank != root:
            parts = place.parts()
            parts[memory.rank].copy_(parts[root])
        memory.flags.meet()

    def in_slots(self, memory: SequenceMemory, tensor: Tensor, root: int) -> None:
        slots = memory.slots
        assert slots is not None
        here, stride, target = slots.rank == root, slots.slot_bytes, bytes_of(tensor)

        def fill(chunk: int, slot: int) -> None:
            if here:
                slots.put(target[chunk * stride : (chunk + 1) * stride], slot)

        def take(chunk: int, slot: int) -> None:
            if not here:
                slots.get(target[chunk * stride : (chunk + 1) * stride], root, slot)

        count = -(-len(target) // stride)
        slots.run("broadcast", len(target), (tensor.dtype, root), tensor, count, fill, take)

    def by_nccl(self, wire: NcclWire, tensor: Tensor, root: int) -> None:
        if nbytes := tensor.nbytes:
            wire.enqueue("broadcast", tensor.data_ptr(), tensor.data_ptr(), nbytes, NCCL_BYTE, root)


BROADCAST = Broadcast()


class BroadcastCall:
    """`broadcast`, as programs call it."""

    def broadcast(self: Caller, tensor: TensorLike, root: int = 0, *, stream: Stream | None = None) -> Work:
        """Copy the tensor of rank ``root`` into every rank's ``tensor``, of the same shape and dtype.

        It takes every dtype of `commengine.dtypes`. Raises CollectiveError if ``root`` is not a rank of the group.
        """
        known = self._calls.known if stream is None else None
        if known is not None and type(root) is int and known.single("broadcast", tensor, root):
            return DONE
        tensor = checked_tensor(self, "broadcast", tensor)
        root = check_rank(self, "broadcast", "root", root)
        return self._calls.run(BROADCAST, (tensor, root), stream)
