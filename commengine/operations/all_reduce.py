"""all_reduce: every rank gets the reduction of all ranks' tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, float32, inference_mode

from commengine.device.nccl import NcclWire, numbers_of
from commengine.dtypes import HALF_TYPES, NCCL_REDUCTIONS, TREE, reduce_unseen
from commengine.host.wire import LONG_BYTES, SMALL_BYTES, MpiWire, divide
from commengine.shared_memory.flags import REDUCED
from commengine.shared_memory.sequence import SequenceMemory
from commengine.shared_memory.slots import bytes_of, chunks_of, flat_of
from commengine.shared_memory.windows import WindowTensor, blocks
from commengine.stream import DONE, Stream, Work

from .all_gather import ALL_GATHER, gather_row, gather_rows
from .checks import Caller, TensorLike, check_reduction, checked_tensor
from .in_order import reduce_chunks, reducing_small
from .operation import Operation, Run
from .reduce_scatter import REDUCE_SCATTER, of_a_level, reduce_in_node, reduce_two


class AllReduce(Operation):
    """The row of `all_reduce`, and its ways."""

    name = formula = "all_reduce"
    arguments, counted, in_memory = ("tensor", "op"), "tensor", ("tensor",)

    def by_mpi(self, wire: MpiWire, tensor: Tensor, op: str) -> Run:
        dtype, nbytes, calls = tensor.dtype, tensor.nbytes, wire.calls
        if dtype in wire.in_order:
            return self._in_order(wire, tensor, op)
        datatype, mpi_op = wire.types.reduce[dtype, op]
        all_reduce, address, in_place = calls.Allreduce, wire.address, wire.in_place

        def at_once(tensor: Tensor, _: str) -> None:
            all_reduce(in_place, (address(tensor.data_ptr(), nbytes), datatype), mpi_op)

        def in_pieces(tensor: Tensor, _: str) -> None:
            for piece in wire.pieces(tensor):
                all_reduce(in_place, (piece, datatype), mpi_op)
            if op == "avg":
                divide(tensor, wire.size)

        return at_once if nbytes <= LONG_BYTES and op != "avg" else in_pieces

    @staticmethod
    def _in_order(wire: MpiWire, like: Tensor, op: str) -> Run:
        if wire.size == 1:
            return lambda tensor, _: None
        if like.nbytes <= SMALL_BYTES:
            reduce = reducing_small(wire, wire.calls.Allgather, like, op)
            return lambda tensor, _: reduce(tensor, tensor)

        def run(tensor: Tensor, _: str) -> None:
            chunk, everywhere = reduce_chunks(wire, tensor, op)
            wire.calls.Allgatherv(wire.moved(chunk), everywhere)

        return run

    def in_window(self, memory: SequenceMemory, place: WindowTensor, tensor: Tensor, op: str) -> None:
        memory.begin("all_reduce", place, op)
        for operands in blocks(place.rows(*memory.row(tensor.numel()))):
            result = reduce_unseen(operands, op, operands[0])
            for other in operands[1:]:
                other.copy_(result)
        memory.flags.meet()

    def in_slots(self, memory: SequenceMemory, tensor: Tensor, op: str) -> None:
        flat, slots = flat_of(tensor), memory.slots
        assert slots is not None
        if slots.size == 2:
            source = bytes_of(flat)
            reduce_two(memory, "all_reduce", len(source), source, flat, flat, op)
        else:
            _reduce_rows(memory, flat, memory.rows(flat.numel()), op)

    def in_two_levels(self, memory: SequenceMemory, place: WindowTensor | None, tensor: Tensor, op: str) -> None:
        """Cut the tensor into a slice for each rank of a node: rank i reduces slice i over its node, then over nodes.

        So all slices travel at once, and a node sends the bytes of one tensor instead of one for each of its ranks
        (hierarchical all-reduce). float16 and bfloat16 are summed in float32 and rounded once; in a tree they are
        rounded at every pair.
        """
        flat, step = flat_of(tensor), of_a_level(op)
        rows, nodes = memory.rows(flat.numel()), len(memory.node.table)
        own = flat[rows[memory.rank]]
        with inference_mode():
            if own.dtype not in HALF_TYPES or op.startswith(TREE):
                reduce_in_node(memory, place, own, flat, rows, step)
                memory.across.run(self, (own, step.removeprefix(TREE)))
                if op.endswith("avg"):
                    own /= nodes * memory.size
            else:
                # The length is a multiple of the number of nodes; nobody reads the elements beyond the row.
                total = own.new_empty(-(-own.numel() // nodes) * nodes, dtype=float32)
                reduce_in_node(memory, place, total[: own.numel()], flat, rows, step)
                part = total.new_empty(total.numel() // nodes)
                memory.across.run(REDUCE_SCATTER, (part, total, step))
                if op == "avg":
                    part /= nodes * memory.size
                gathered = own.new_empty(total.numel())
                memory.across.run(ALL_GATHER, (gathered, part.to(own.dtype)))
                own.copy_(gathered[: own.numel()])
        if place is None:
            gather_rows(memory, flat, own, [0, *(row.stop * flat.itemsize for row in rows)])
        else:
            gather_row(memory, place, rows[memory.rank], own)

    def by_nccl(self, wire: NcclWire, tensor: Tensor, op: str) -> None:
        code, redop = NCCL_REDUCTIONS[tensor.dtype, op]
        if count := numbers_of(tensor):
            wire.enqueue("allReduce", tensor.data_ptr(), tensor.data_ptr(), count, code, redop)


ALL_REDUCE = AllReduce()


class AllReduceCall:
    """`all_reduce`, as programs call it."""

    def all_reduce(self: Caller, tensor: TensorLike, op: str = "sum", *, stream: Stream | None = None) -> Work:
        """Reduce ``tensor`` over the group, in place, on every rank. op: "sum", "prod", "min", "max" or "avg".

        "max" and "min" of float32 and float64 may lose the NaN of a rank, because MPI leaves open what wins. A sum
        keeps it. A sum of bool is *or*, a product *and*.

        Raises CollectiveError if ``op`` cannot reduce the dtype (`commengine.dtypes`): "avg" of integers and bool,
        "min" and "max" of complex numbers, and with NCCL every reduction of int16 and "prod" of complex numbers.
        """
        known = self._calls.known if stream is None else None
        if known is not None and known.single("all_reduce", tensor, op):
            return DONE
        tensor = checked_tensor(self, "all_reduce", tensor)
        check_reduction(self, "all_reduce", tensor, op)
        return self._calls.run(ALL_REDUCE, (tensor, op), stream)


def _reduce_rows(memory: SequenceMemory, flat: Tensor, rows: Sequence[slice], op: str) -> None:
    """Let rank r of a node reduce row r of the private tensors, then copy the results to all of them."""
    slots = memory.slots
    assert slots is not None
    rank, size, item, step = slots.rank, slots.size, flat.itemsize, slots.step(flat, slots.size)
    target, stride, count = bytes_of(flat), step * item, chunks_of(rows, step)
    own, last = flat[rows[rank]], (size - 1) * step  # the results lie after the rows that were handed out

    def take(chunk: int, slot: int) -> None:
        part = own[chunk * step :][:step]
        if part.numel():
            total = slots.view(flat.dtype, slot, rank, last, part.numel())
            slots.reduce(total, part, slot, step, op)
            part.copy_(total)
        number = slots.chunks + chunk + 1
        slots.flags.post(REDUCED, number)
        slots.flags.wait_for(REDUCED, number)
        for other, row in enumerate(rows):
            if other != rank:
                start = row.start * item + chunk * stride
                slots.get(target[start : min(start + stride, row.stop * item)], other, slot, last * item)

    slots.run("all_reduce", flat.nbytes, (flat.dtype, op), flat, count, slots.handing_out(flat, rows, step), take)
