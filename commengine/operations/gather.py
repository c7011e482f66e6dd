"""gather: one rank gets the tensors of all ranks, in rank order."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from commengine.device.nccl import NcclWire
from commengine.host.wire import MpiWire
from commengine.stream import Stream, Work

from .checks import Caller, TensorLike, check_rank, checked_tensor, root_tensor
from .operation import Operation, Run


class Gather(Operation):
    """The row of `gather`. Its ways are those of `scatter`, too, where the root sends and the others receive."""

    name = "gather"
    arguments, counted, whole, counts_part = ("output", "input", "root"), "input", "output", True

    def by_mpi(self, wire: MpiWire, *args: Any) -> Run:
        collective, moved = getattr(wire.calls, self.name.capitalize()), wire.moved

        def run(output: Tensor | None, input: Tensor | None, root: int) -> None:
            collective(None if input is None else moved(input), None if output is None else moved(output), root)

        return run

    def by_nccl(self, wire: NcclWire, output: Any, input: Any, root: int) -> None:
        gathers = self.whole == "output"
        whole, part = (output, input) if gathers else (input, output)
        with_root, on_root = (wire.send, wire.recv) if gathers else (wire.recv, wire.send)
        with wire.group():
            with_root(part.data_ptr(), part.nbytes, root)
            if whole is not None:
                for peer in range(wire.size):
                    on_root(whole.data_ptr() + peer * part.nbytes, part.nbytes, peer)


GATHER = Gather()


class GatherCall:
    """`gather`, as programs call it."""

    def gather(
        self: Caller, output: TensorLike | None, input: TensorLike, root: int = 0, *, stream: Stream | None = None
    ) -> Work:
        """Concatenate every rank's ``input`` [d0, ...] into ``output`` [size * d0, ...] of rank ``root``.

        output: ignored on the other ranks, and usually None there.
        input: of one shape and any one dtype of `commengine.dtypes` on all ranks; a 0-d one is a row of one number.

        Every rank calls it. Raises CollectiveError if ``root`` is not a rank of the group, and on the root if
        ``output`` is None, has another shape, dtype or device, or shares memory with ``input``.
        """
        root = check_rank(self, "gather", "root", root)
        input = checked_tensor(self, "gather", input, "input")
        output = root_tensor(self, "gather", "output", output, input, root)
        return self._calls.run(GATHER, (output, input, root), stream)
