"""Ask a transport what the bits of its sums depend on: it adds up the same numbers in calls that differ in one thing.

The numbers of a rank repeat with a period. So an element has the same operands as that one period on, in a longer
message, and at the same place of a part; and if the order of additions is the same, too, it has the same bits. Only
numbers are taken whose sums differ between the usual orders, so that another order shows.

Each rank answers for its own results, without a message besides the sums.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.transports.in_process import LocalCall, LocalTransport
from bench.transports.operations import DTYPES, IN_PLACE, ROOTED, CollectiveCall

PERIOD = 61  # elements; a prime, so that no block of an algorithm has the same length
OPERATIONS = ("all_reduce", "reduce", "reduce_scatter")
FLOATS = {name: dtype for name, dtype in DTYPES.items() if dtype.is_floating_point}
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

#: by the name of each thing that a call may differ in: when a program relies on it
QUESTIONS = {
    "size": "an element's sum is the same in a message of another size",
    "offset": "an element's sum is the same at another index of the message",
    "parts": "a message has the same sums in one call and in several",
    "address": "the sums are the same when the memory begins at another address, on all ranks or on one",
    "in place": "the sums are the same when the result is written over the input",
    "holders": "the sums are the same when the ranks have each other's operands",
    "repetition": "a call has the same sums each time, also when ranks come late",
}
#: the answers of several ranks or jobs together
BETWEEN = {
    "ranks": "all ranks get the same sums of the same operands",
    "nodes": "the sums are the same when the ranks lie on another number of nodes",
}

#: where memory begins, in elements of the dtype after a page
SHIFTS = (1, 2, 3, 4, 8, 15, 16, 1023)
#: the calls of which each has all questions but the first two
REPEATS, LATEST_S = 20, 0.002
SPARE = max(SHIFTS) * 8  # bytes


@dataclass
class RankAnswers:
    """What one rank found out about one operation of one transport.

    no: by the name of a question, the smallest example that was found of sums that differ. asked: the questions that
    were asked. seen: by the number of elements, the bits of the first period in hexadecimal.
    """

    operation: str
    rank: int
    asked: list[str] = field(default_factory=list)
    no: dict[str, str] = field(default_factory=dict)
    seen: dict[str, list[str]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As the JSON file has it."""
        return asdict(self)


def summands(ranks: int, dtype: torch.dtype) -> Tensor:
    """Numbers [ranks, PERIOD] whose sums over the ranks tell the usual orders of additions apart.

    The orders: of the ranks, the reverse, pairs of neighbours, pairs of ranks half the ranks apart.
    """
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(ranks, 400 * PERIOD, dtype=torch.float64, generator=generator).mul(2).exp2()
    drawn *= torch.randint(0, 2, drawn.shape, generator=generator) * 2 - 1
    drawn = drawn.to(dtype)
    found = torch.stack([order([*drawn]) for order in (_in_turn, _reverse, _neighbours, _halves)])
    different = torch.stack([(one != other) for one, other in itertools.combinations(found, 2)]).sum(0)
    best = torch.argsort(different, descending=True, stable=True)[:PERIOD]
    return drawn[:, best].contiguous()


def _in_turn(rows: list[Tensor]) -> Tensor:
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total


def _reverse(rows: list[Tensor]) -> Tensor:
    return _in_turn(rows[::-1])


def _neighbours(rows: list[Tensor]) -> Tensor:
    while len(rows) > 1:
        rows = [_in_turn(rows[low : low + 2]) for low in range(0, len(rows), 2)]
    return rows[0]


def _halves(rows: list[Tensor]) -> Tensor:
    while len(rows) > 1:
        half = -(-len(rows) // 2)
        rows = [_in_turn(rows[low::half]) for low in range(half)]
    return rows[0]


def sizes(most: int) -> list[int]:
    """Numbers of elements up to ``most``: the smallest ones, and those around each power of two."""
    around = (2**power + by for power in range(3, most.bit_length()) for by in (-1, 0, 1))
    return sorted({count for count in (1, 2, 3, 5, PERIOD, *around, most) if count <= most})


class Sums:
    """The sums of one transport. rank, ranks: of its group. most: elements of the largest result."""

    def __init__(self, transport: LocalTransport, rank: int, ranks: int, dtype: torch.dtype, most: int) -> None:
        self._transport, self._rank, self._ranks, self._dtype, self.most = transport, rank, ranks, dtype, most
        self._rows = summands(ranks, dtype)

    @staticmethod
    def capacity(ranks: int, dtype: torch.dtype, most: int) -> int:
        """The bytes that each of the transport's buffers needs."""
        return most * ranks * dtype.itemsize + SPARE

    def of(
        self, operation: str, count: int, *, first: int = 0, shift: int = 0, in_place: bool = False,
        holders: Sequence[int] | None = None,
    ) -> Tensor:  # fmt: skip
        """The bits [count] of the sums on this rank, as integers; [0] where it gets none. Collective.

        first: the place in the period of the first element. shift: where memory begins, in elements. holders: the row
        of numbers of each rank.
        """
        root = 0 if operation in ROOTED else -1
        call = CollectiveCall(operation, self._dtype, "sum", root, self._ranks, count)
        self._transport.shift(shift * self._dtype.itemsize)
        bound = self._transport.bind(call, in_place)
        assert isinstance(bound, LocalCall)
        row = self._rows[self._rank if holders is None else holders[self._rank]].roll(-(first % PERIOD))
        blocks = bound.input.view(-1, count)  # one for each rank if the operation splits
        whole = count // PERIOD * PERIOD
        blocks[:, :whole].view(len(blocks), -1, PERIOD).copy_(row.expand(len(blocks), whole // PERIOD, PERIOD))
        blocks[:, whole:].copy_(row[: count - whole].expand(len(blocks), -1))
        if bound.input.is_cuda:
            torch.cuda.synchronize(bound.input.device)
        bound.invoke()
        if operation in ROOTED and self._rank:
            return torch.empty(0, dtype=BITS[self._dtype.itemsize])
        output = bound.buffers.views(call, self._rank, in_place)[1]
        return output.cpu().clone().view(BITS[self._dtype.itemsize])

    def refusal(self, operation: str) -> str | None:
        """Why the transport does not have the operation for the dtype; None if it does."""
        root = 0 if operation in ROOTED else -1
        return self._transport.refuses(CollectiveCall(operation, self._dtype, "sum", root, self._ranks, 1), False)

    def ask(self, operation: str, *, one_rank_apart: bool) -> RankAnswers:
        """Ask all questions about an operation. Collective.

        one_rank_apart: whether the memory of one rank may begin elsewhere than that of the others.
        """
        answers = RankAnswers(operation, self._rank)
        for question, examples in self._examples(operation, answers, one_rank_apart):
            answers.asked.append(question)
            for example in examples:  # to the end, because all ranks take part
                answers.no.setdefault(question, example)
        return answers

    def _examples(self, operation: str, answers: RankAnswers, apart: bool) -> Iterator[tuple[str, Iterator[str]]]:
        offsets: list[str] = []
        yield "size", self._of_sizes(operation, answers.seen, offsets)
        yield "offset", iter(offsets)
        some = [count for count in (2, PERIOD, 1024, 5000, 40_000, 300_000, self.most) if count <= self.most]
        whole = {count: self.of(operation, count) for count in some}

        def beside(calls: dict[str, Callable[[int], Tensor]]) -> Iterator[str]:
            for count, (name, call) in itertools.product(some, calls.items()):
                other = call(count)
                where = (whole[count] != other).nonzero()
                if len(where):
                    at = int(where[0])
                    one, two = (self._hex(int(bits[at])) for bits in (whole[count], other))
                    yield f"element {at} of {count} is {one}, and {name} {two}"

        yield "parts", beside({f"in {parts} calls": self._in_parts(operation, parts) for parts in (2, 3, 7)})
        shifts = {f"{by * self._dtype.itemsize} bytes on": self._shifted(operation, [by] * 2) for by in SHIFTS}
        if apart:
            shifts |= {f"{by * self._dtype.itemsize} bytes on in rank 1": self._shifted(operation, [0, by])
                       for by in SHIFTS}  # fmt: skip
        yield "address", beside(shifts)
        if operation in IN_PLACE:
            yield "in place", beside({"in place": partial(self.of, operation, in_place=True)})
        own = [*range(self._ranks)]
        orders = {"with the operands in reverse order": own[::-1], "with those of the next rank": [*own[1:], 0],
                  "with those of ranks 0 and 1 swapped": [1, 0, *own[2:]]}  # fmt: skip
        yield "holders", beside({name: partial(self.of, operation, holders=held) for name, held in orders.items()})
        late = random.Random(self._rank)
        yield "repetition", beside({f"in call {number + 2}": self._late(operation, late) for number in range(REPEATS)})

    def _of_sizes(self, operation: str, seen: dict[str, list[str]], offsets: list[str]) -> Iterator[str]:
        """Compare each element with the first one of its place in the period, in another size and in the same one."""
        first: dict[int, tuple[int, int]] = {}  # by place: its bits, and the number of elements of that message
        for count in sizes(self.most):
            bits = self.of(operation, count)
            begin = bits[:PERIOD].tolist()
            seen[str(count)] = [self._hex(one) for one in begin]
            where = next((at for at, one in enumerate(begin) if first.setdefault(at, (one, count))[0] != one), None)
            if where is not None:
                bits_then, count_then = first[where]
                yield (
                    f"element {where} of {count_then} is {self._hex(bits_then)}, and of {count} "
                    f"{self._hex(begin[where])}"
                )
            later = (bits != bits[torch.arange(len(bits)) % PERIOD]).nonzero()
            if len(later):
                at = int(later[0])
                same = f"with the operands of element {at % PERIOD}, {self._hex(begin[at % PERIOD])}"
                offsets.append(f"element {at} of {count} is {self._hex(int(bits[at]))}, and {same}")

    def _in_parts(self, operation: str, parts: int) -> Callable[[int], Tensor]:
        def call(count: int) -> Tensor:
            ends = [count * part // parts for part in range(parts + 1)]
            return torch.cat([
                self.of(operation, high - low, first=low, shift=low)
                for low, high in itertools.pairwise(ends) if high > low
            ])  # fmt: skip

        return call

    def _shifted(self, operation: str, shifts: list[int]) -> Callable[[int], Tensor]:
        return partial(self.of, operation, shift=shifts[self._rank == 1])

    def _late(self, operation: str, lateness: random.Random) -> Callable[[int], Tensor]:
        def call(count: int) -> Tensor:
            time.sleep(lateness.choice((0.0, lateness.uniform(0, LATEST_S))))
            return self.of(operation, count)

        return call

    def _hex(self, bits: int) -> str:
        nbytes = self._dtype.itemsize
        return f"0x{bits % 256**nbytes:0{2 * nbytes}x}"


def ask(
    transport: LocalTransport, rank: int, ranks: int, dtype: torch.dtype, most: int, operations: Sequence[str]
) -> list[dict[str, Any]]:
    """What this rank found out about each operation that the transport has for the dtype. Collective."""
    sums = Sums(transport, rank, ranks, dtype, most)
    # The ranks of a window must begin at the same place of it.
    return [sums.ask(operation, one_rank_apart=transport.name != "shared").to_json() for operation in operations
            if not sums.refusal(operation)]  # fmt: skip
