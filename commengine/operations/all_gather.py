"""all_gather: every rank gets the tensors of all ranks, in rank order."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from commengine.device.nccl import NcclWire
from commengine.dtypes import NCCL_BYTE, unseen
from commengine.host.wire import MpiWire
from commengine.shared_memory.copying import copy_bytes
from commengine.shared_memory.sequence import SequenceMemory
from commengine.shared_memory.slots import bytes_of
from commengine.shared_memory.windows import WindowTensor
from commengine.stream import DONE, Stream, Work

from .checks import Caller, TensorLike, checked_pair
from .operation import Operation, Run


class AllGather(Operation):
    """The row of `all_gather`, and its ways."""

    name = formula = "all_gather"
    arguments, counted, whole = ("output", "input"), "output", "output"
    in_memory, in_place = ("output", "input"), True

    def by_mpi(self, wire: MpiWire, output: Tensor, input: Tensor) -> Run:
        all_gather, address, in_place, datatype = wire.calls.Allgather, wire.address, wire.in_place, wire.types.move
        kind, nbytes, part = datatype[output.dtype], output.nbytes, output.nbytes // wire.size
        own = part * wire.rank if part else None

        def run(output: Tensor, input: Tensor) -> None:
            target, source = output.data_ptr(), input.data_ptr()
            sent = in_place if source - target == own else (address(source, part), kind)
            all_gather(sent, (address(target, nbytes), kind))

        return run

    def in_window(self, memory: SequenceMemory, place: WindowTensor, output: Tensor, input: Tensor, _: str) -> None:
        if place.nbytes == output.nbytes:  # the output lies there
            gather_row(memory, place, slice(*memory.row(output.numel())), input.data.view(-1))
            return
        memory.begin("all_gather", place)
        with unseen(output):
            rows = output.data.view(memory.size, -1).unbind()
            for row, part in zip(rows, place.parts(), strict=True):
                if row.data_ptr() != part.data_ptr():
                    row.copy_(part)
        memory.flags.meet()

    def in_slots(self, memory: SequenceMemory, output: Tensor, input: Tensor, _: str) -> None:
        nbytes = output.nbytes
        gather_rows(memory, output, input, range(0, nbytes + 1, nbytes // memory.size))

    def by_nccl(self, wire: NcclWire, output: Tensor, input: Tensor) -> None:
        if nbytes := input.nbytes:
            wire.enqueue("allGather", input.data_ptr(), output.data_ptr(), nbytes, NCCL_BYTE)


ALL_GATHER = AllGather()


class AllGatherCall:
    """`all_gather`, as programs call it."""

    def all_gather(self: Caller, output: TensorLike, input: TensorLike, *, stream: Stream | None = None) -> Work:
        """Concatenate every rank's ``input`` [d0, ...] in rank order into ``output`` [size * d0, ...].

        It works in place if ``input`` is this rank's rows of ``output``. A 0-d input is a row of one number. It takes
        every dtype of `commengine.dtypes`. Raises CollectiveError if the shapes do not fit, or the tensors share memory
        in another way.
        """
        known = self._calls.known if stream is None else None
        if known is not None and known.pair("all_gather", output, input):
            return DONE
        output, input = checked_pair(self, ALL_GATHER, output, input)
        return self._calls.run(ALL_GATHER, (output, input), stream)


# Inside a node ------------------------------------------------------------------------------------------------


def gather_row(memory: SequenceMemory, place: WindowTensor, row: slice, flat: Tensor) -> None:
    """Copy this rank's ``flat`` into its row of all ranks' tensors in a window."""
    memory.begin("gather_into", place)
    for part in place.rows(row.start, row.stop):
        if part.data_ptr() != flat.data_ptr():
            part.copy_(flat)
    memory.flags.meet()


def gather_rows(memory: SequenceMemory, output: Tensor, input: Tensor, bounds: Sequence[int]) -> None:
    """Copy ``input`` of rank r of the node into row r of the private ``output`` of all ranks.

    bounds: row r is the bytes from bounds[r] to bounds[r + 1]; no row is longer than the last. ``input`` may be this
    rank's row itself.
    """
    slots = memory.slots
    assert slots is not None
    rank, stride = slots.rank, slots.slot_bytes
    source, target, low = bytes_of(input), bytes_of(output), bounds[rank]
    in_place = input.data_ptr() == output.data_ptr() + low
    others = [other for other in range(slots.size) if other != rank]

    def fill(chunk: int, slot: int) -> None:
        slots.put(source[chunk * stride : (chunk + 1) * stride], slot)

    def take(chunk: int, slot: int) -> None:
        start = chunk * stride
        if not in_place:
            part = source[start : start + stride]
            copy_bytes(target.start + low + start, part.start, len(part))
        for other in others:
            slots.get(
                target[bounds[other] + start : min(bounds[other] + start + stride, bounds[other + 1])], other, slot
            )

    longest = bounds[-1] - bounds[-2]
    slots.run("all_gather", len(target), (output.dtype, ""), output, -(-longest // stride), fill, take)
