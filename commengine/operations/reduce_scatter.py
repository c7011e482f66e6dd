"""reduce_scatter: the tensors of all ranks are reduced, and each rank gets its rows of the result."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commengine.device.nccl import NcclWire, numbers_of
from commengine.dtypes import HALF_TYPES, NCCL_REDUCTIONS, TREE, reduce_in_order, reduce_unseen, unseen
from commengine.host.wire import SMALL_BYTES, MpiWire, divide
from commengine.shared_memory.sequence import SequenceMemory
from commengine.shared_memory.slots import bytes_of, chunks_of, flat_of, parts_of
from commengine.shared_memory.windows import WindowTensor, blocks
from commengine.stream import DONE, Stream, Work

from .checks import Caller, TensorLike, check_reduction, checked_pair
from .in_order import reducing_small
from .operation import Operation, Run


class ReduceScatter(Operation):
    """The row of `reduce_scatter`, and its ways."""

    name = formula = "reduce_scatter"
    arguments, counted, whole = ("output", "input", "op"), "input", "input"
    in_memory, in_place = ("input",), True

    def by_mpi(self, wire: MpiWire, output: Tensor, input: Tensor, op: str) -> Run:
        dtype, nbytes, calls = input.dtype, input.nbytes, wire.calls
        if dtype in wire.in_order and 0 < nbytes <= SMALL_BYTES:
            reduce = reducing_small(wire, calls.Alltoall, output, op)
            return lambda output, input, _: reduce(output, input)
        if dtype in wire.in_order:

            def in_order(output: Tensor, input: Tensor, _: str) -> None:
                parts = torch.empty_like(input)
                calls.Alltoall(wire.moved(input), wire.moved(parts))
                reduce_in_order(parts.view(wire.size, *output.shape), wire.tree + op, output)

            return in_order
        datatype, mpi_op = wire.types.reduce[dtype, op]
        reduce_scatter, address, part = calls.Reduce_scatter_block, wire.address, nbytes // wire.size
        own = part * wire.rank

        def run(output: Tensor, input: Tensor, _: str) -> None:
            start, found, result = input.data_ptr(), output.data_ptr(), output
            if part and found == start + own:  # MPI's own form in place changes the other rows
                result = torch.empty_like(output)
                found = result.data_ptr()
            reduce_scatter((address(start, nbytes), datatype), (address(found, part), datatype), mpi_op)
            if op == "avg":
                divide(result, wire.size)
            if result is not output:
                with torch.inference_mode():  # as in `divide`
                    output.copy_(result)

        return run

    def in_window(self, memory: SequenceMemory, place: WindowTensor, output: Tensor, input: Tensor, op: str) -> None:
        row = slice(*memory.row(input.numel()))
        with unseen(output):
            reduce_row(memory, place, output.data.view(-1), row, op)

    def in_slots(self, memory: SequenceMemory, output: Tensor, input: Tensor, op: str) -> None:
        reduce_rows(memory, flat_of(output), flat_of(input), memory.rows(input.numel()), op)

    def in_two_levels(
        self, memory: SequenceMemory, place: WindowTensor | None, output: Tensor, input: Tensor, op: str
    ) -> None:
        output, flat, table = flat_of(output), flat_of(input), memory.node.table
        numel, half = output.numel(), output.dtype in HALF_TYPES and not op.startswith(TREE)
        with torch.inference_mode():
            # Row n: this node's part of the result of this slice's rank on node n.
            totals = output.new_empty((len(table), numel), dtype=torch.float32 if half else None)
            for total, ranks in zip(totals, table, strict=True):
                rows = [slice(rank * numel, (rank + 1) * numel) for rank in ranks]
                reduce_in_node(memory, place, total, flat, rows, of_a_level(op))
            result = totals.new_empty(numel) if half else output
            memory.across.run(self, (result, totals, of_a_level(op).removeprefix(TREE)))
            if op.endswith("avg"):
                result /= sum(map(len, table))
            if half:
                output.copy_(result)

    def by_nccl(self, wire: NcclWire, output: Tensor, input: Tensor, op: str) -> None:
        code, redop = NCCL_REDUCTIONS[input.dtype, op]
        if count := numbers_of(output):
            wire.enqueue("reduceScatter", input.data_ptr(), output.data_ptr(), count, code, redop)


REDUCE_SCATTER = ReduceScatter()


class ReduceScatterCall:
    """`reduce_scatter`, as programs call it."""

    def reduce_scatter(
        self: Caller, output: TensorLike, input: TensorLike, op: str = "sum", *, stream: Stream | None = None
    ) -> Work:
        """Reduce ``input`` [size * d0, ...] over the group.

        Rank r gets rows r*d0 to (r+1)*d0 - 1 in ``output`` [d0, ...]. It works in place if ``output`` is this rank's
        rows of ``input``; on the host, the other rows then stay as they are. A 0-d output is a row of one number.

        op: as in `all_reduce`, with its dtypes, its errors and its NaN. Raises CollectiveError if the shapes do not
        fit, or the tensors share memory in another way.
        """
        known = self._calls.known if stream is None else None
        if known is not None and known.pair("reduce_scatter", output, input, op):
            return DONE
        output, input = checked_pair(self, REDUCE_SCATTER, output, input)
        check_reduction(self, "reduce_scatter", input, op)
        return self._calls.run(REDUCE_SCATTER, (output, input, op), stream)


# Inside a node ------------------------------------------------------------------------------------------------


def of_a_level(op: str) -> str:
    """Return the reduction of each of two levels. For a mean both levels sum, and the sum is divided once."""
    return op.replace("avg", "sum")


def reduce_in_node(
    memory: SequenceMemory, place: WindowTensor | None, output: Tensor, flat: Tensor, rows: Sequence[slice], op: str
) -> None:
    """Reduce the flat tensors of a node's ranks: its rank r gets row r in its flat ``output``.

    place: where ``flat`` lies in a window; None if it is private. output: it may be the row itself; for a float16 or
    bfloat16 tensor it may be float32, and then it gets the sum before rounding.
    """
    if place is None:
        reduce_rows(memory, output, flat, rows, op)
    else:
        reduce_row(memory, place, output, rows[memory.rank], op)


def reduce_row(memory: SequenceMemory, place: WindowTensor, output: Tensor, row: slice, op: str) -> None:
    """Reduce this rank's row of all tensors in a window."""
    memory.begin("reduce_scatter", place, op)
    for block, *operands in blocks([output, *place.rows(row.start, row.stop)]):
        reduce_unseen(operands, op, block)
    memory.flags.meet()


def reduce_rows(memory: SequenceMemory, output: Tensor, flat: Tensor, rows: Sequence[slice], op: str) -> None:
    """Reduce row r of all private tensors on rank r of the node."""
    slots = memory.slots
    assert slots is not None
    row, item = rows[slots.rank], flat.itemsize
    nbytes = (rows[-1].stop - rows[0].start) * item  # the same number on every rank
    if slots.size == 2:
        other = rows[1 - slots.rank]
        source = bytes_of(flat)[other.start * item : other.stop * item]
        reduce_two(memory, "reduce_scatter", nbytes, source, flat[row], output, op)
        return
    step = slots.step(flat, slots.size - 1)
    count = chunks_of(rows, step)
    parts, totals = parts_of(flat[row], step, count), parts_of(output, step, count)

    def take(chunk: int, slot: int) -> None:
        if chunk < len(parts):
            slots.reduce(totals[chunk], parts[chunk], slot, step, op)

    slots.run("reduce_scatter", nbytes, (flat.dtype, op), output, count, slots.handing_out(flat, rows, step), take)


def reduce_two(
    memory: SequenceMemory, operation: str, nbytes: int, source: range, own: Tensor, output: Tensor, op: str
) -> None:
    """Give the other one of two ranks ``source``, and reduce what it gives with ``own`` into ``output``.

    source: the addresses of bytes (`bytes_of`).

    In an all-reduce both ranks reduce everything: one wait a chunk instead of two, for as many bytes read and written.
    """
    slots = memory.slots
    assert slots is not None
    rank, dtype, stride = slots.rank, own.dtype, slots.slot_bytes
    count = -(-max(len(source), own.nbytes) // stride)
    step = stride // dtype.itemsize
    parts = parts_of(own, step, count)
    totals = parts if output is own else parts_of(output, step, count)

    def fill(chunk: int, slot: int) -> None:
        slots.put(source[chunk * stride : (chunk + 1) * stride] if count > 1 else source, slot)

    def take(chunk: int, slot: int) -> None:
        if chunk < len(parts):
            part = parts[chunk]
            other = slots.view(dtype, slot, 1 - rank, 0, part.numel())
            reduce_unseen((other, part) if rank else (part, other), op, totals[chunk])

    slots.run(operation, nbytes, (dtype, op), output, count, fill, take)
