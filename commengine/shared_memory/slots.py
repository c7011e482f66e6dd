"""Collectives of private tensors inside a node: through slots in shared memory, one chunk at a time.

A rank copies a chunk of its tensor into a slot that all ranks see, waits until the others have done so, and takes the
chunks of the others from their slots. The ranks reduce in rank order. The slots stay in the caches.

One wait a chunk suffices. A rank fills the slot of chunk n again with chunk n + 2, and it has then waited until all
ranks had filled chunk n + 1; before they did, they had taken chunk n. A rank fills its first chunk before it compares
its call with those of the other ranks, so that the two need one wait together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from commengine.dtypes import reduce_unseen, unseen

from .copying import copy_bytes
from .flags import FILLED, PRIVATE, Flags
from .segment import SharedSegment

#: bytes of a slot, and slots of a rank
SLOT_BYTES = 512 << 10
SLOTS = 2

#: rows of a slot begin at multiples of this many elements
ALIGNMENT = 64

#: views of slots that are kept, because making one takes a microsecond
MOST_VIEWS = 4096

#: a part of a chunk's work: gets the chunk's number and its slot's
Part = Callable[[int, int], object]


class Slots:
    """The slots of one sequence of collectives.

    segment: memory of SLOTS * SLOT_BYTES a rank.
    """

    def __init__(self, flags: Flags, segment: SharedSegment) -> None:
        self.flags, self.rank, self.size = flags, flags.rank, flags.size
        self.slot_bytes, self._slots = SLOT_BYTES, SLOTS
        self._bytes = segment.parts
        #: the addresses: [slot][rank]
        self._turns = [[at + slot * self.slot_bytes for at in segment.addresses] for slot in range(self._slots)]
        self._views: dict[tuple[object, ...], Tensor] = {}
        self.chunks = 0  # of all collectives so far

    def run(
        self, operation: str, nbytes: int, how: tuple[object, ...], written: Tensor, count: int, fill: Part, take: Part
    ) -> None:
        """Take each chunk through a slot: this rank fills it; when all ranks have, this rank takes what they filled.

        how: dtype, and reduction or root, for the comparison of calls. written: the tensor of the results.
        count: chunks, as many on every rank.
        """
        flags, first = self.flags, self.chunks
        with unseen(written):
            for chunk in range(count):
                number = first + chunk + 1
                slot = number % self._slots
                fill(chunk, slot)
                if chunk:
                    flags.post(FILLED, number)
                    flags.wait_for(FILLED, number)
                else:  # nothing has been written yet that another collective could use
                    flags.begin(operation, PRIVATE, nbytes, how)
                take(chunk, slot)
        self.chunks = first + count

    def addresses(self) -> Sequence[int]:
        """Return the addresses of all ranks' slots for the next collective, if it has one chunk."""
        return self._turns[(self.chunks + 1) % self._slots]

    def put(self, source: range, slot: int, offset: int = 0) -> None:
        """Copy the bytes at the addresses ``source`` to byte ``offset`` of a slot of this rank."""
        copy_bytes(self._turns[slot][self.rank] + offset, source.start, len(source))

    def get(self, target: range, rank: int, slot: int, offset: int = 0) -> None:
        """Fill the bytes at the addresses ``target`` from byte ``offset`` of a slot of ``rank``."""
        copy_bytes(target.start, self._turns[slot][rank] + offset, len(target))

    def handing_out(self, flat: Tensor, rows: Sequence[slice], step: int) -> Part:
        """Return the function that copies each row to where the rank that reduces it finds it.

        In the slot of rank q, the row of rank r is number (r - q - 1) modulo the node's size.
        """
        source, item, rank, size = bytes_of(flat), flat.itemsize, self.rank, self.size
        stride = step * item
        others = [(other, row) for other, row in enumerate(rows) if other != rank]
        handed = [(row.start * item, row.stop * item, (other - rank - 1) % size * stride) for other, row in others]

        def fill(chunk: int, slot: int) -> None:
            for start, end, offset in handed:
                self.put(source[start + chunk * stride : min(start + (chunk + 1) * stride, end)], slot, offset)

        return fill

    def reduce(self, output: Tensor, own: Tensor, slot: int, step: int, op: str) -> None:
        """Reduce a chunk of this rank's row, which the other ranks have handed out, into ``output``."""
        rank, dtype, numel = self.rank, own.dtype, own.numel()
        places = [(rank - other - 1) % self.size * step for other in range(self.size)]
        operands = [self.view(dtype, slot, other, place, numel) for other, place in enumerate(places) if other != rank]
        operands.insert(rank, own)
        reduce_unseen(operands, op, output)

    def step(self, flat: Tensor, rows: int) -> int:
        """Return the elements of a chunk when a slot holds a chunk of each of ``rows`` rows."""
        return self.slot_bytes // int(flat.itemsize) // rows // ALIGNMENT * ALIGNMENT

    def view(self, dtype: torch.dtype, slot: int, rank: int, start: int, numel: int) -> Tensor:
        """Return ``numel`` elements of a rank's slot as a tensor, from element ``start`` on."""
        key = (dtype, slot, rank, start, numel)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= MOST_VIEWS:
                self._views.clear()
            begin = slot * self.slot_bytes + start * dtype.itemsize
            with torch.inference_mode(False):
                view = self._bytes[rank][begin : begin + numel * dtype.itemsize].view(dtype)
            self._views[key] = view
        return view


def bytes_of(tensor: Tensor) -> range:
    """Return the addresses of the tensor's bytes."""
    address = tensor.data_ptr()
    return range(address, address + tensor.nbytes)


def chunks_of(rows: Sequence[slice], step: int) -> int:
    """Return how many chunks of ``step`` elements the longest row has."""
    return -(-max(int(row.stop) - int(row.start) for row in rows) // step)


def parts_of(flat: Tensor, step: int, count: int) -> Sequence[Tensor]:
    """Cut a flat tensor, whose row has up to ``count`` chunks, into chunks of ``step`` elements."""
    parts: Sequence[Tensor] = (flat,) if count == 1 else torch.split(flat, step)
    return parts if flat.numel() else ()


def flat_of(tensor: Tensor) -> Tensor:
    """Return the tensor as one row that autograd does not see."""
    tensor = tensor.data
    return tensor if tensor.dim() == 1 else tensor.view(-1)
