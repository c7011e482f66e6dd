"""reduce: one rank gets the reduction of all ranks' tensors."""

from __future__ import annotations

from torch import Tensor

from commengine.device.nccl import NcclWire, numbers_of
from commengine.dtypes import NCCL_REDUCTIONS
from commengine.host.wire import MpiWire, divide
from commengine.stream import Stream, Work

from .checks import Caller, TensorLike, check_rank, check_reduction, checked_tensor
from .in_order import reduce_chunks
from .operation import Operation, Run


class Reduce(Operation):
    """The row of `reduce`, and its ways."""

    name = formula = "reduce"
    arguments, counted = ("tensor", "root", "op"), "tensor"

    def by_mpi(self, wire: MpiWire, tensor: Tensor, root: int, op: str) -> Run:
        calls, here = wire.calls, wire.rank == root
        if tensor.dtype in wire.in_order:

            def in_order(tensor: Tensor, _: int, __: str) -> None:
                chunk, everywhere = reduce_chunks(wire, tensor, op)
                calls.Gatherv(wire.moved(chunk), everywhere if here else None, root)

            return in_order
        datatype, mpi_op = wire.types.reduce[tensor.dtype, op]

        def run(tensor: Tensor, _: int, __: str) -> None:
            for piece in wire.pieces(tensor):
                data = (piece, datatype)
                calls.Reduce(wire.in_place if here else data, data if here else None, mpi_op, root)
            if op == "avg" and here:
                divide(tensor, wire.size)

        return run

    def by_nccl(self, wire: NcclWire, tensor: Tensor, root: int, op: str) -> None:
        code, redop = NCCL_REDUCTIONS[tensor.dtype, op]
        if count := numbers_of(tensor):
            data = tensor.data_ptr()
            target = data if wire.rank == root else 0  # NCCL writes on the root only
            wire.enqueue("reduce", data, target, count, code, redop, root)


REDUCE = Reduce()


class ReduceCall:
    """`reduce`, as programs call it."""

    def reduce(
        self: Caller, tensor: TensorLike, root: int = 0, op: str = "sum", *, stream: Stream | None = None
    ) -> Work:
        """Reduce ``tensor`` over the group into the tensor of rank ``root``; the other ranks' tensors do not change.

        op: as in `all_reduce`, with its dtypes, its errors and its NaN. Raises CollectiveError if ``root`` is not a
        rank of the group.
        """
        tensor = checked_tensor(self, "reduce", tensor)
        check_reduction(self, "reduce", tensor, op)
        root = check_rank(self, "reduce", "root", root)
        return self._calls.run(REDUCE, (tensor, root, op), stream)
