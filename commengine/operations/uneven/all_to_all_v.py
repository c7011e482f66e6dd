"""all_to_all_v: each rank sends other numbers of rows to each rank. `exchange_counts` tells the ranks how many come."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from commengine.device.nccl import NcclWire
from commengine.errors import SettledError, call_error
from commengine.host.wire import MpiWire
from commengine.mpi import load_mpi
from commengine.operations.all_to_all import ALL_TO_ALL
from commengine.operations.checks import Caller, TensorLike
from commengine.operations.operation import Run
from commengine.shared_memory.copying import copy_bytes
from commengine.shared_memory.flags import IN_SLOT, PRIVATE
from commengine.shared_memory.sequence import SequenceMemory
from commengine.stream import DONE, Stream, Work

from .rows import (
    Counts,
    Received,
    Rows,
    UnevenOperation,
    checked_rows,
    checked_uneven,
    in_bytes,
    in_place_of,
    row_bytes_of,
    starts_of,
    too_many,
)

#: up to so many bytes of a private input, without the rank's own rows, go through a slot. With more, the other ranks
#: read the input where it lies
SLOT_MOST = 16 << 10


class AllToAllV(UnevenOperation):
    """The row of `all_to_all_v`, and its ways."""

    name = "all_to_all_v"
    arguments, counted = ("output", "input", "output_rows", "input_rows"), "input"

    def by_mpi(self, wire: MpiWire, output: Tensor, input: Tensor, output_rows: Received, input_rows: Rows) -> Run:
        all_to_all, address, datatype = wire.calls.Alltoallv, wire.address, wire.types.move[input.dtype]
        width = row_bytes_of(input) // input.itemsize

        def run(output: Tensor, input: Tensor, output_rows: Received, input_rows: Rows) -> None:
            if isinstance(output_rows, Counts):
                output_rows.extend(counts_of(wire, input_rows))
            problem = too_many(output_rows, output)
            if problem is not None:
                output = in_place_of(output, output_rows)
            sent, received = in_bytes(input_rows, width), in_bytes(output_rows, width)
            all_to_all(
                (address(input.data_ptr(), input.nbytes), sent, starts_of(sent), datatype),
                (address(output.data_ptr(), output.nbytes), received, starts_of(received), datatype),
            )
            if problem is not None:
                raise SettledError(problem)

        return run

    def in_node(
        self, memory: SequenceMemory, by_mpi: Run, output: Tensor, input: Tensor, output_rows: Received,
        input_rows: Rows,
    ) -> Run:  # fmt: skip
        flags, slots, width, me = memory.flags, memory.slots, row_bytes_of(input), memory.rank
        words, told, peers = flags.words_of(self.name, width, input.dtype), flags.told, memory.peers
        number_of, address_of = memory.windows.number_of, memory.windows.address_of

        def run(output: Tensor, input: Tensor, output_rows: Received, input_rows: Rows) -> None:
            number, source = number_of(input), input.data_ptr()
            in_slots: Sequence[int] = ()
            if slots is not None:
                in_slots = slots.addresses()
                if number == PRIVATE:
                    before, own = sum(input_rows[:me]) * width, input_rows[me] * width
                    handed = input.nbytes - own
                    if handed <= SLOT_MOST:
                        number = IN_SLOT
                        if before:
                            copy_bytes(in_slots[me], source, before)
                        if handed > before:
                            copy_bytes(in_slots[me] + before, source + before + own, handed - before)
                    elif peers is not None:
                        number = -source
            first = flags.begin_uneven(words, number, input_rows)
            if slots is not None:
                slots.chunks += 1
            at, place = first + me, flags.place
            begins, counts, places = [], [], []
            for one in told:
                begin = one[at]
                begins.append(begin)
                counts.append(one[at + 1] - begin)
                places.append(one[place])
            unfit = _unfit(counts, output_rows, output)
            if PRIVATE in places:
                if unfit is not None:
                    output = in_place_of(output, counts)
                by_mpi(output, input, tuple(counts), input_rows)
            else:
                if unfit is None:
                    target = output.data_ptr()
                    for peer, count in enumerate(counts):
                        if not count:  # an empty input lies anywhere
                            continue
                        where, begin, nbytes = places[peer], begins[peer] * width, count * width
                        if peer == me:
                            copy_bytes(target, source + begin, nbytes)
                        elif where == IN_SLOT:
                            if peer < me:  # the slot has no rows of the peer for itself, which lie before mine
                                one = told[peer]
                                begin -= (one[first + peer + 1] - one[first + peer]) * width
                            copy_bytes(target, in_slots[peer] + begin, nbytes)
                        elif where >= 0:
                            copy_bytes(target, address_of(where, peer) + begin, nbytes)
                        else:
                            assert peers is not None
                            peers.read(peer, target, begin - where, nbytes)
                        target += nbytes
                if max(places) >= 0:
                    flags.meet_unless(unfit)
                elif min(places) < IN_SLOT:
                    flags.meet()  # only then may a rank write its input
            if unfit is not None:
                raise flags.mismatch(unfit)

        return run

    def by_nccl(self, wire: NcclWire, output: Tensor, input: Tensor, output_rows: Received, input_rows: Rows) -> None:
        width = row_bytes_of(input)
        sent, received = in_bytes(input_rows, width), in_bytes(output_rows, width)
        with wire.group():
            for peer, (to, source) in enumerate(zip(starts_of(sent), starts_of(received), strict=True)):
                wire.send(input.data_ptr() + to, sent[peer], peer)
                wire.recv(output.data_ptr() + source, received[peer], peer)

    def common(self, output: Tensor, input: Tensor, output_rows: Received, input_rows: Rows) -> str:
        return "exchange_rows" if isinstance(output_rows, Counts) else self.name

    def unmatched(
        self, wire: MpiWire, output: Tensor, input: Tensor, output_rows: Received, input_rows: Rows
    ) -> str | None:
        return _unfit(counts_of(wire, input_rows), output_rows or Counts(), output)


def _unfit(counts: list[int], output_rows: Received, output: Tensor) -> str | None:
    """Return why the rows that come are not those of this rank's call, or None; fill a list that waits for them."""
    if isinstance(output_rows, Counts):
        output_rows += counts
        return too_many(counts, output)
    if tuple(counts) == output_rows:
        return None
    peer = next(peer for peer, count in enumerate(counts) if count != output_rows[peer])
    return f"rank {peer} sends {counts[peer]} rows, and output_rows say {output_rows[peer]}"


ALL_TO_ALL_V = AllToAllV()


def counts_of(wire: MpiWire, sent: Sequence[int]) -> list[int]:
    """Tell each rank how much it gets."""
    received = array("q", bytes(8 * wire.size))
    datatype = load_mpi().INT64_T
    wire.calls.Alltoall((array("q", sent), datatype), (received, datatype))
    return received.tolist()


class AllToAllVCall:
    """`all_to_all_v`, `exchange_rows` and `exchange_counts`, as programs call them."""

    def all_to_all_v(
        self: Caller, output: TensorLike, input: TensorLike, output_rows: Sequence[int], input_rows: Sequence[int], *,
        stream: Stream | None = None,
    ) -> Work:  # fmt: skip
        """Send ``input_rows[j]`` rows of ``input`` to rank j; get ``output_rows[j]`` rows from rank j in ``output``.

        output: [sum of output_rows, ...]; input: [sum of input_rows, ...]; rows of one shape and one dtype of
        `commengine.dtypes`. The rows for and from the ranks lie in rank order. ``output_rows[j]`` of rank i must be
        ``input_rows[i]`` of rank j. Inside a node the ranks compare them: one whose numbers do not fit raises
        CollectiveMismatch, and all do where the inputs lie in windows. With ``checked=True`` all ranks raise
        CollectiveError. A rank that does not know its ``output_rows`` calls `exchange_rows`, or first
        `exchange_counts`.

        Raises CollectiveError if the numbers of rows are not one of at least 0 for each rank or do not add up to the
        rows of their tensor, if the rows of the tensors differ in shape, and if the tensors are 0-d or share memory.

        If the group lies on one node, each rank copies its rows from windows (`empty`) where they lie. The rows of a
        private input go through a slot if those for the other ranks have up to 16,384 bytes: that takes one copy more.
        Otherwise each rank reads its rows in the memory of the other process, in one copy; where that is forbidden, or
        the table of switch points has no slots, all rows go by MPI, as they do in a group that spans nodes.
        """
        known = self._calls.known if stream is None else None
        if known is not None and known.rows("all_to_all_v", output, input, output_rows, input_rows):
            return DONE
        output, input = checked_uneven(self, "all_to_all_v", output, input)
        received = checked_rows(self, "all_to_all_v", "output_rows", output_rows, output)
        sent = checked_rows(self, "all_to_all_v", "input_rows", input_rows, input)
        return self._calls.run(ALL_TO_ALL_V, (output, input, received, sent), stream)

    def exchange_rows(self: Caller, output: TensorLike, input: TensorLike, input_rows: Sequence[int]) -> list[int]:
        """Do an `all_to_all_v` of ranks that do not know how many rows they get. Returns how many come from each rank.

        output: [n, ...], where n is at least the number of rows that come; those after them stay as they are. input,
        input_rows: as in `all_to_all_v`, with its dtypes and its errors. The counts are exchanged first, then the rows.
        It has no form for streams, and is no call of a `coalesce` block. Raises CollectiveError on a rank if its output
        is too small, and on all ranks of a node where the inputs lie in windows.
        """
        received, known = Counts(), self._calls.known
        if known is not None and known.rows("all_to_all_v", output, input, received, input_rows):
            return list(received)  # nobody else gets the list that the next call would fill
        self._calls.refuse_block("exchange_rows")
        output, input = checked_uneven(self, "exchange_rows", output, input)
        sent = checked_rows(self, "exchange_rows", "input_rows", input_rows, input)
        if output.is_cpu:
            self._calls.run(ALL_TO_ALL_V, (output, input, received, sent), None)
            return list(received)
        received.extend(_exchanged(self, sent))
        problem = too_many(received, output)
        whole = output if problem is None else in_place_of(output, received)
        self._calls.run(ALL_TO_ALL_V, (whole[: sum(received)], input, tuple(received), sent), None)
        if problem is not None:
            raise call_error(self, "exchange_rows", problem)
        return list(received)

    def exchange_counts(self: Caller, counts: Sequence[int]) -> tuple[int, ...]:
        """Tell each rank a number: ``counts[r]`` to rank r. Returns the number that each rank tells this one.

        Before an `all_to_all_v` it tells how many rows come, so that each rank can make an output of as many. It is an
        `all_to_all` of one int64 a rank on the host, and blocks. Raises CollectiveError if ``counts`` are not one
        integer of 64 bits for each rank, and inside a `coalesce` block.
        """
        self._calls.refuse_block("exchange_counts")
        try:
            sent = [operator.index(count) for count in counts]
        except TypeError:
            raise call_error(self, "exchange_counts", f"counts={counts!r} must be integers") from None
        if len(sent) != self.size:
            raise call_error(self, "exchange_counts", f"there are {len(sent)} counts for {self.size} ranks")
        if any(not -(2**63) <= count < 2**63 for count in sent):
            raise call_error(self, "exchange_counts", f"counts={sent} must be integers of 64 bits")
        return _exchanged(self, sent)


def _exchanged(group: Caller, counts: Sequence[int]) -> tuple[int, ...]:
    sent = torch.tensor(counts, dtype=torch.int64, device="cpu")
    received = torch.empty_like(sent)
    group._calls.run(ALL_TO_ALL, (received, sent), None)
    return tuple(received.tolist())
