"""all_gather_v: every rank gets the tensors of all ranks, which may have different numbers of rows."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from commengine.device.nccl import NcclWire
from commengine.errors import call_error
from commengine.host.wire import MpiWire
from commengine.operations.checks import Caller, TensorLike
from commengine.operations.operation import Run
from commengine.shared_memory.copying import copy_bytes
from commengine.shared_memory.flags import PRIVATE
from commengine.shared_memory.sequence import SequenceMemory
from commengine.stream import Stream, Work

from .rows import (
    Rows,
    UnevenOperation,
    checked_rows,
    checked_uneven,
    in_bytes,
    in_place_of,
    row_bytes_of,
    starts_of,
)


class AllGatherV(UnevenOperation):
    """The row of `all_gather_v`, and its ways."""

    name, needs_windows = "all_gather_v", True
    arguments, counted = ("output", "input", "rows"), "output"

    def by_mpi(self, wire: MpiWire, output: Tensor, input: Tensor, rows: Rows) -> Run:
        all_gather, address, datatype = wire.calls.Allgatherv, wire.address, wire.types.move[input.dtype]
        width = row_bytes_of(input) // input.itemsize

        def run(output: Tensor, input: Tensor, rows: Rows) -> None:
            counts = in_bytes(rows, width)
            all_gather(
                (address(input.data_ptr(), input.nbytes), datatype),
                (address(output.data_ptr(), output.nbytes), counts, starts_of(counts), datatype),
            )

        return run

    def in_node(self, memory: SequenceMemory, by_mpi: Run, output: Tensor, input: Tensor, rows: Rows) -> Run:
        flags, width, me, windows = memory.flags, row_bytes_of(input), memory.rank, memory.windows
        words, told = flags.words_of(self.name, width, input.dtype), flags.told

        def run(output: Tensor, input: Tensor, rows: Rows) -> None:
            at = flags.begin_uneven(words, windows.number_of(input), (rows[me],)) + 1
            unfit = None
            given = tuple(one[at] for one in told)
            if given != rows:
                unfit = f"the ranks give {list(given)} rows, and rows say {list(rows)}"
            places = [one[flags.place] for one in told]
            if PRIVATE in places:
                if unfit is not None:
                    output = in_place_of(output, given)
                by_mpi(output, input, given)
            elif unfit is None:
                target = output.data_ptr()
                for peer, count in enumerate(rows):
                    if count:  # an empty input lies anywhere
                        copy_bytes(target, windows.address_of(places[peer], peer), count * width)
                    target += count * width
            flags.meet_unless(unfit)

        return run

    def common(self, output: Tensor, input: Tensor, rows: Rows) -> str:
        return f"{self.name}(rows={list(rows)})"

    def by_nccl(self, wire: NcclWire, output: Tensor, input: Tensor, rows: Rows) -> None:
        counts = in_bytes(rows, row_bytes_of(input))
        with wire.group():
            for peer, (start, count) in enumerate(zip(starts_of(counts), counts, strict=True)):
                wire.send(input.data_ptr(), input.nbytes, peer)
                wire.recv(output.data_ptr() + start, count, peer)


ALL_GATHER_V = AllGatherV()


class AllGatherVCall:
    """`all_gather_v`, as programs call it."""

    def all_gather_v(
        self: Caller, output: TensorLike, input: TensorLike, rows: Sequence[int], *, stream: Stream | None = None
    ) -> Work:
        """Get the ``input`` of every rank in ``output``, in rank order.

        rows: how many rows each rank gives, the same on every rank. output: [sum of rows, ...]; input: [rows of this
        rank, ...]; rows of one shape and one dtype of `commengine.dtypes`. If the inputs of all ranks of a node lie in
        windows (`empty`), each rank copies them from there.

        Raises CollectiveError if ``rows`` are not a number of at least 0 for each rank or do not fit the tensors, and
        if these are 0-d, have rows of different shapes, or share memory. If the ranks differ in ``rows``, all of them
        raise CollectiveMismatch with ``checked=True``, or if the group has windows and lies on one node.
        """
        output, input = checked_uneven(self, "all_gather_v", output, input)
        counts = checked_rows(self, "all_gather_v", "rows", rows, output)
        if input.shape[0] != counts[self.rank]:
            raise call_error(
                self, "all_gather_v", f"input is {list(input.shape)}, and rows say {counts[self.rank]} of this rank"
            )
        return self._calls.run(ALL_GATHER_V, (output, input, counts), stream)
