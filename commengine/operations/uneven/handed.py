"""Rows of private tensors inside a node: each rank hands those for the others out through its slots.

The rows for the other ranks are one stretch of bytes, without those for the rank itself. It goes through the slots one
chunk at a time (`commengine.shared_memory.slots`), and each rank takes its part of each chunk. Inputs in windows need
no slot: their rows are copied from there.
"""

from __future__ import annotations

from collections.abc import Sequence

from commengine.shared_memory.copying import copy_bytes
from commengine.shared_memory.flags import FILLED, PRIVATE
from commengine.shared_memory.slots import Slots


def hand_out(slots: Slots, source: int, rows: Sequence[int], width: int, chunk: int) -> None:
    """Copy chunk number ``chunk`` of the rows for the other ranks into the slot of its turn.

    source: the address of the input. rows: of it, for each rank. width: bytes of a row.
    """
    me, size = slots.rank, slots.slot_bytes
    before, own = sum(rows[:me]) * width, rows[me] * width
    low, whole = chunk * size, sum(rows) * width - own
    high = whole if whole < low + size else low + size
    middle = before if low < before < high else low if before <= low else high
    target = slots.address(me, chunk)
    if middle > low:
        copy_bytes(target, source + low, middle - low)
    if high > middle:
        copy_bytes(target + middle - low, source + middle + own, high - middle)


def take_chunks(
    slots: Slots, told: Sequence[memoryview], first: int, place: int, ends: tuple[int, int], rows: Sequence[int],
    width: int,
) -> None:  # fmt: skip
    """Take what the other ranks hand out in several chunks, after all have filled the slots of the first one.

    told, first, place: the words of each rank (`Flags.begin_uneven`). ends: the addresses of the output and the input.
    rows: of the input, for each rank.
    """
    size, me = slots.slot_bytes, slots.rank
    target, source = ends
    parts, longest = [], 0
    for peer, one in enumerate(told):
        begin, count, own = one[first + me], one[first + me + 1] - one[first + me], 0
        if one[place] == PRIVATE:
            own = one[first + peer + 1] - one[first + peer]
            longest = max(longest, one[first + len(told)] - own)
            if peer != me:
                begin -= own if peer < me else 0
                parts.append((peer, target, begin * width, (begin + count) * width))
        target += count * width
    chunks, hands_out = -(-longest * width // size), told[me][place] == PRIVATE
    for chunk in range(chunks):
        if chunk:
            if hands_out:
                hand_out(slots, source, rows, width, chunk)
            slots.post(FILLED, chunk)
            slots.wait_for(FILLED, chunk)
        for peer, where, begin, end in parts:
            low, high = max(begin, chunk * size), min(end, (chunk + 1) * size)
            if high > low:
                copy_bytes(where + low - begin, slots.address(peer, chunk) + low - chunk * size, high - low)
    slots.chunks += chunks
