"""all_to_all: each rank sends another block to each rank."""

from __future__ import annotations

from torch import Tensor

from commengine.device.nccl import NcclWire
from commengine.errors import call_error
from commengine.host.wire import MpiWire
from commengine.stream import DONE, Stream, Work

from .checks import Caller, TensorLike, check_alike, checked_tensor
from .operation import Operation, Run


class AllToAll(Operation):
    """The row of `all_to_all`, and its ways."""

    name = formula = "all_to_all"
    arguments, counted = ("output", "input"), "input"

    def by_mpi(self, wire: MpiWire, output: Tensor, input: Tensor) -> Run:
        all_to_all, address = wire.calls.Alltoall, wire.address
        nbytes, datatype = input.nbytes, wire.types.move[input.dtype]

        def run(output: Tensor, input: Tensor) -> None:
            all_to_all((address(input.data_ptr(), nbytes), datatype), (address(output.data_ptr(), nbytes), datatype))

        return run

    def by_nccl(self, wire: NcclWire, output: Tensor, input: Tensor) -> None:
        nbytes = input.nbytes // wire.size
        with wire.group():
            for peer in range(wire.size):
                wire.send(input.data_ptr() + peer * nbytes, nbytes, peer)
                wire.recv(output.data_ptr() + peer * nbytes, nbytes, peer)


ALL_TO_ALL = AllToAll()


class AllToAllCall:
    """`all_to_all`, as programs call it."""

    def all_to_all(self: Caller, output: TensorLike, input: TensorLike, *, stream: Stream | None = None) -> Work:
        """Send block j of ``input`` to rank j, and receive rank j's block in block j of ``output``.

        output, input: both [size * d0, ...]; block j is the rows j * d0 ... of a tensor. It takes every dtype of
            `commengine.dtypes`.

        Raises CollectiveError if the shapes differ, are 0-d, or have a dim 0 that the group's size does not divide, and
        if the tensors share memory.
        """
        known = self._calls.known if stream is None else None
        if known is not None and known.pair("all_to_all", output, input):
            return DONE
        output = checked_tensor(self, "all_to_all", output, "output")
        input = checked_tensor(self, "all_to_all", input, "input")
        check_alike(self, "all_to_all", output, input)
        if output.shape != input.shape or input.dim() == 0 or input.shape[0] % self.size:
            problem = (
                f"output {list(output.shape)} and input {list(input.shape)} must have one shape whose dim 0 "
                f"the group's size {self.size} divides"
            )
            raise call_error(self, "all_to_all", problem)
        return self._calls.run(ALL_TO_ALL, (output, input), stream)
