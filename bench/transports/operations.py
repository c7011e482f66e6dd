"""The collectives that bench.collectives measures: sizes, inputs, and the only right outputs.

The input of a rank repeats a table of small integers with a period that no block size shares, so a block in the wrong
place is noticed. Every rank has its own table. Every sum and product of the tables, and every partial one in any
order, is representable in the dtype, so the right result has one value, whatever the algorithm. There are two
exceptions: ``prod`` of uint8 uses 255 for -1, so it wraps around, and ``avg`` by multiplication with 1/ranks rounds if
the number of ranks is not a power of two.

This module does not use MPI, because the peers (bench/peers/calls/collectives.py) make and check the same data.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from bench.transports import names
from bench.transports import skew as skews
from bench.transports.names import OPERATIONS as OPERATIONS
from bench.transports.names import REDOPS as REDOPS
from commengine import cost, operations

REDUCING = frozenset(name for name in OPERATIONS if operations.OPERATIONS[name].reduces)
ROOTED = frozenset(name for name in OPERATIONS if operations.OPERATIONS[name].rooted)
#: their count is a rank's part, and their size the size of all parts
SPLIT = frozenset(name for name in OPERATIONS if operations.OPERATIONS[name].split)
#: they can write the result over the input
IN_PLACE = frozenset({"all_reduce", "reduce", "broadcast", "all_gather"})

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in names.DTYPES}

PERIOD = 1021  # elements; a prime
POISON = 0xA5  # every byte of a buffer before a call
#: the largest integer up to which all are representable; 2**24 in the other dtypes
_EXACT = {torch.bfloat16: 1 << 8, torch.float16: 1 << 11, torch.int8: 127, torch.uint8: 255, torch.int16: (1 << 15) - 1}
#: for an operation whose name has no formula in commengine.cost: the formula whose bus factor it has in nccl-tests
FACTOR_OF = {
    "gather": "all_gather", "scatter": "all_gather", "send": "p2p", "sendrecv": "p2p", "all_to_all_v": "all_to_all",
    "all_gather_v": "all_gather",
}  # fmt: skip
#: the operations in which each rank gives other numbers of elements, in a proportion that has a name
UNEVEN = tuple(name for name in OPERATIONS if operations.OPERATIONS[name].uneven)


@dataclass(frozen=True)
class TableSlice:
    """``count`` elements of an endlessly repeated table, from element ``start`` on."""

    table: Tensor
    start: int
    count: int

    def _cut(self, flat: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """``flat`` as whole periods and the rest, each with the right values."""
        rolled = self.table.roll(-(self.start % PERIOD))
        whole = self.count // PERIOD
        rows, rest = flat[: whole * PERIOD].view(whole, PERIOD), flat[whole * PERIOD :]
        return (rows, rolled.expand(whole, PERIOD)), (rest, rolled[: len(rest)])

    def write(self, flat: Tensor) -> None:
        """Fill ``flat`` [count]."""
        for part, values in self._cut(flat):
            part.copy_(values)

    def wrong(self, flat: Tensor) -> int:
        """The number of wrong elements of ``flat`` [count]."""
        return sum(int(torch.count_nonzero(part != values)) for part, values in self._cut(flat))


@dataclass(frozen=True)
class CollectiveCall:
    """One collective, the same on every rank of the group.

    count: nccl-tests' count: the elements of the buffer, or of a rank's part if the operation splits or joins. redop:
    "none" if nothing is reduced. root: -1 if there is none. A sendrecv sends to the next rank of a ring. A send goes
    one way: from each rank of the first half to one of the second half, which receives. skew: of an operation in
    UNEVEN (bench/transports/skew.py); the largest buffer over the ranks has about ``count`` elements (`largest`).
    """

    operation: str
    dtype: torch.dtype
    redop: str
    root: int
    ranks: int
    count: int
    skew: str = ""

    @staticmethod
    def of(
        operation: str, dtype: torch.dtype, redop: str, root: int, ranks: int, nbytes: int, skew: str = ""
    ) -> CollectiveCall:
        """The call of at least ``nbytes`` bytes, rounded up to whole elements.

        For the operations in SPLIT, the elements are whole on every rank.
        """
        unit = dtype.itemsize * (ranks if operation in SPLIT else 1)
        count = 0 if operation == "barrier" else -(-nbytes // unit)
        return CollectiveCall(
            operation, dtype, redop if operation in REDUCING else "none", root if operation in ROOTED else -1, ranks,
            count, (skew or "uniform") if operation in UNEVEN else "",
        )  # fmt: skip

    @property
    def whole(self) -> int:
        """The elements of the larger of a rank's two buffers."""
        return self.count * (self.ranks if self.operation in SPLIT else 1)

    @cached_property
    def largest(self) -> int:
        """The elements of the largest buffer of a rank, which of an all_to_all_v follow from whole rows."""
        if self.operation != "all_to_all_v":
            return self.whole
        return max(max(sum(self.to(rank)), sum(self.fro(rank))) for rank in range(self.ranks))

    @property
    def nbytes(self) -> int:
        """nccl-tests' size: the bytes of the largest buffer."""
        return self.largest * self.dtype.itemsize

    @property
    def bus_factor(self) -> float:
        """The bus bandwidth divided by the algorithm bandwidth."""
        if self.operation == "barrier":
            return 0.0
        if self.operation == "all_to_all_v":
            return cost.busiest(self.rows) / self.largest
        if self.operation == "all_gather_v":
            return 1 - min(map(sum, self.rows)) / self.whole
        return cost.bus_factor(FACTOR_OF.get(self.operation, self.operation), self.ranks)

    @cached_property
    def rows(self) -> skews.Matrix:
        """The elements that each rank sends to each rank; of an all_gather_v, each rank's part as its one number."""
        if self.operation == "all_to_all_v":
            return skews.matrix(self.skew, self.ranks, self.whole)
        return tuple((part,) for part in skews.parts(self.skew, self.ranks, self.whole))

    def to(self, rank: int) -> list[int]:
        """The elements that ``rank`` sends to each rank in an all_to_all_v."""
        return list(self.rows[rank])

    def fro(self, rank: int) -> list[int]:
        """The elements that ``rank`` gets from each rank in an operation of UNEVEN."""
        return [row[rank if self.operation == "all_to_all_v" else 0] for row in self.rows]

    def partner(self, rank: int) -> int:
        """The rank of the other half to which ``rank`` sends, or from which it receives, in a send."""
        return (rank + self.ranks // 2) % self.ranks

    def called(self, rank: int) -> str:
        """The operation that ``rank`` calls: the second half of the ranks receives what the first half sends."""
        return "recv" if self.operation == "send" and rank >= self.ranks // 2 else self.operation

    def sent(self, rank: int) -> list[TableSlice]:
        """The contents of ``rank``'s input buffer, in order; nothing if the rank gives no input."""
        operation = self.operation
        if operation == "barrier" or (operation in ("broadcast", "scatter") and rank != self.root):
            return []
        if self.called(rank) == "recv":
            return []
        elements = self.whole if operation in ("reduce_scatter", "scatter", "all_to_all") else self.count
        if operation in UNEVEN:
            elements = sum(self.rows[rank])
        return [TableSlice(self._tables[rank], 0, elements)]

    def received(self, rank: int) -> list[TableSlice]:
        """The right contents of ``rank``'s output buffer, in order; nothing if the rank gets no output."""
        operation, count, tables = self.operation, self.count, self._tables
        if operation == "barrier" or (operation in ("reduce", "gather") and rank != self.root):
            return []
        if self.called(rank) == "send":
            return []
        if operation in UNEVEN:
            starts = [sum(row[:rank]) if operation == "all_to_all_v" else 0 for row in self.rows]
            return [TableSlice(*one) for one in zip(tables, starts, self.fro(rank), strict=True)]
        start = rank * count if operation in ("reduce_scatter", "scatter", "all_to_all") else 0
        if operation in REDUCING:
            tables = [self._reduced]
        elif operation in ("broadcast", "scatter"):
            tables = [tables[self.root]]
        elif operation == "sendrecv":
            tables = [tables[rank - 1]]
        elif operation == "send":
            tables = [tables[self.partner(rank)]]
        return [TableSlice(table, start, count) for table in tables]

    @cached_property
    def _integers(self) -> Tensor:
        """The tables of all ranks, int64 [ranks, PERIOD]."""
        return torch.stack([self._numbers(rank) for rank in range(self.ranks)])

    @cached_property
    def _tables(self) -> list[Tensor]:
        return list(self._integers.to(self.dtype))

    @cached_property
    def _reduced(self) -> Tensor:
        """The tables reduced over the ranks."""
        integers, redop = self._integers, self.redop
        if redop in ("sum", "avg"):
            return (integers.sum(0) // (self.ranks if redop == "avg" else 1)).to(self.dtype)
        if redop == "prod":
            return integers.prod(0).to(self.dtype)
        return (integers.amin(0) if redop == "min" else integers.amax(0)).to(self.dtype)

    def _numbers(self, rank: int) -> Tensor:
        """The table of ``rank``: equal in every process, and unlike the table of any other rank."""
        generator = torch.Generator().manual_seed(rank)

        def drawn(end: int) -> Tensor:
            return torch.randint(0, end, (PERIOD,), generator=generator)

        place = torch.arange(PERIOD)
        exact = _EXACT.get(self.dtype, 1 << 24)
        if self.redop == "sum":
            largest = max(1, min(15, exact // self.ranks))
            every = -(-self.ranks * largest // exact)  # if there are more ranks than may add 1, they take turns
            return drawn(largest + 1) * ((place + rank) % every == 0)
        if self.redop == "prod":  # each product has one 2, from another rank at each place
            return (2 * drawn(2) - 1) * (1 + (place % self.ranks == rank).long())
        if self.redop == "avg":  # the mean is an integer, because the deviations of two ranks cancel
            generator.manual_seed(self.ranks)
            mean = 1 + drawn(max(1, min(3, exact // self.ranks - 1)))
            turn = (place + rank) % self.ranks
            return mean if self.ranks == 1 else mean + (turn == 0).long() - (turn == 1).long()
        return drawn(127)


class Buffers:
    """A rank's two flat buffers for calls of up to ``capacity`` bytes. Every call uses their beginnings.

    send, recv: uint8 [capacity]. In place the input lies in recv: at the place of the output, or for an all_gather in
    the rank's rows of it.
    """

    def __init__(self, send: Tensor, recv: Tensor) -> None:
        self._send, self._recv = send, recv

    @property
    def memory(self) -> tuple[Tensor, Tensor]:
        """Both, whole."""
        return self._send, self._recv

    def views(self, call: CollectiveCall, rank: int, in_place: bool) -> tuple[Tensor, Tensor]:
        """(input, output) of a call on this rank.

        An input that the rank does not give, or an output that it does not get, is there too, but has no meaning.

        Both are [elements]: a rank's part, or all parts if the operation splits (input) or joins (output).
        """
        if call.operation in UNEVEN:
            return self._typed(self._send, call, sum(call.rows[rank])), self._typed(
                self._recv, call, sum(call.fro(rank))
            )
        several = call.operation in ("reduce_scatter", "scatter", "all_to_all")
        send = self._typed(self._send, call, call.whole if several else call.count)
        joined = call.operation in ("all_gather", "gather", "all_to_all")
        recv = self._typed(self._recv, call, call.whole if joined else call.count)
        if in_place:
            send = recv[rank * call.count : (rank + 1) * call.count] if joined else recv
        return send, recv

    @staticmethod
    def _typed(memory: Tensor, call: CollectiveCall, elements: int) -> Tensor:
        return memory[: elements * call.dtype.itemsize].view(call.dtype)

    def reset(self, call: CollectiveCall, rank: int, in_place: bool) -> None:
        """Poison the used parts of both buffers, and write the input."""
        for used in self.views(call, rank, in_place):
            used.view(torch.uint8).fill_(POISON)
        self.write(call, rank, in_place)

    def write(self, call: CollectiveCall, rank: int, in_place: bool) -> None:
        """Write the input."""
        send, recv = self.views(call, rank, in_place)
        for piece in call.sent(rank):  # one, or none
            piece.write(send)
        if recv.is_cuda:
            torch.cuda.synchronize(recv.device)

    def wrong(self, call: CollectiveCall, rank: int) -> int:
        """The number of wrong elements in this rank's output."""
        recv, pieces = self.views(call, rank, False)[1], call.received(rank)
        ends = [*accumulate(piece.count for piece in pieces)]
        return sum(piece.wrong(recv[end - piece.count : end]) for piece, end in zip(pieces, ends, strict=True))
