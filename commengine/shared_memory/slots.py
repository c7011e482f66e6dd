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
from commengine.mpi import load_mpi

from .flags import FILLED, PRIVATE, REDUCED, Flags
from .segment import SharedSegment

#: bytes of a slot, and slots of a rank
SLOT_BYTES = 512 << 10
SLOTS = 2

#: rows of a slot begin at multiples of this many elements
ALIGNMENT = 64

#: views of slots that are kept, because making one takes a microsecond
MOST_VIEWS = 4096

#: a part of a chunk's work: gets the chunk's number and its slot's
Work = Callable[[int, int], object]


class Bounce:
    """The slots of one sequence of collectives.

    segment: memory of `nbytes` bytes a rank.

    In every method rank r of the node has row r of the flat tensor: ``rows`` are the bounds of the rows. An all-reduce
    of two ranks does not use them. ``begun``: the ranks have compared their calls already.
    """

    def __init__(self, flags: Flags, segment: SharedSegment) -> None:
        self._flags, self._rank, self._size = flags, flags.rank, flags.size
        self._slot_bytes, self._slots = SLOT_BYTES, SLOTS
        self._bytes, self._memory = segment.parts, segment.memory
        self._address = load_mpi().memory.fromaddress
        self._views: dict[tuple[object, ...], Tensor] = {}
        self._chunks = 0  # chunks of all collectives so far

    @staticmethod
    def nbytes() -> int:
        """Bytes of shared memory that each rank needs for its slots."""
        return SLOT_BYTES * SLOTS

    # The collectives --------------------------------------------------------------------------------------------

    def all_reduce(self, flat: Tensor, rows: Sequence[slice], op: str, *, begun: bool = False) -> None:
        """Reduce all ranks' flat tensors into each of them.

        Of two ranks each reduces the whole tensor; of more ranks each reduces its row.
        """
        if self._size == 2:
            source = self._bytes_of(flat)
            self._reduce_two("all_reduce", len(source), op, begun, source, flat, flat)
        else:
            self._all_reduce_rows(flat, rows, op, begun)

    def _reduce_two(
        self, operation: str, nbytes: int, op: str, begun: bool, source: memoryview, own: Tensor, output: Tensor
    ) -> None:
        """Give the other rank ``source``, and reduce what it gives with ``own`` into ``output``.

        In an all-reduce both ranks reduce everything: one wait a chunk instead of two, for as many bytes read and
        written.
        """
        rank, dtype, stride, memory = self._rank, own.dtype, self._slot_bytes, self._memory[self._rank]
        count = -(-max(len(source), own.nbytes) // stride)
        step = stride // dtype.itemsize
        parts = _parts(own, step, count)
        totals = parts if output is own else _parts(output, step, count)

        def fill(chunk: int, slot: int) -> None:
            part = source[chunk * stride : (chunk + 1) * stride] if count > 1 else source
            begin = slot * stride
            memory[begin : begin + len(part)] = part

        def take(chunk: int, slot: int) -> None:
            if chunk < len(parts):
                part = parts[chunk]
                other = self._view(dtype, slot, 1 - rank, 0, part.numel())
                reduce_unseen((other, part) if rank else (part, other), op, totals[chunk])

        self._run(operation, nbytes, (dtype, op), begun, output, count, fill, take)

    def _all_reduce_rows(self, flat: Tensor, rows: Sequence[slice], op: str, begun: bool) -> None:
        """Let rank r reduce row r, then copy the results to all ranks."""
        rank, size, step = self._rank, self._size, self._step(flat, self._size)
        target, stride, count = self._bytes_of(flat), step * flat.itemsize, _count(rows, step)
        own, fill = flat[rows[rank]], self._handing_out(flat, rows, step)

        def take(chunk: int, slot: int) -> None:
            part = own[chunk * step :][:step]
            if part.numel():
                total = self._view(flat.dtype, slot, rank, (size - 1) * step, part.numel())
                self._reduce(total, part, slot, step, op)
                part.copy_(total)
            number = self._chunks + chunk + 1
            self._flags.post(REDUCED, number)
            self._flags.wait_for(REDUCED, number)
            for other, row in enumerate(rows):
                if other != rank:
                    self._collect(target, row, chunk, other, slot, (size - 1) * stride, stride, flat.itemsize)

        self._run("all_reduce", flat.nbytes, (flat.dtype, op), begun, flat, count, fill, take)

    def reduce_scatter(
        self, output: Tensor, flat: Tensor, rows: Sequence[slice], op: str, *, begun: bool = False
    ) -> None:
        """Reduce row r of all ranks' flat tensors into the flat ``output`` of rank r.

        output: may be the rank's row r itself; for a float16 or bfloat16 tensor it may be float32, and then it gets the
        sum before rounding.
        """
        row = rows[self._rank]
        nbytes = (rows[-1].stop - rows[0].start) * flat.itemsize  # the same number on every rank
        if self._size == 2:
            other, item = rows[1 - self._rank], flat.itemsize
            source = self._bytes_of(flat)[other.start * item : other.stop * item]
            self._reduce_two("reduce_scatter", nbytes, op, begun, source, flat[row], output)
            return
        step = self._step(flat, self._size - 1)
        count, fill = _count(rows, step), self._handing_out(flat, rows, step)
        parts, totals = _parts(flat[row], step, count), _parts(output, step, count)

        def take(chunk: int, slot: int) -> None:
            if chunk < len(parts):
                self._reduce(totals[chunk], parts[chunk], slot, step, op)

        self._run("reduce_scatter", nbytes, (flat.dtype, op), begun, output, count, fill, take)

    def all_gather(self, output: Tensor, input: Tensor, bounds: Sequence[int], *, begun: bool = False) -> None:
        """Copy ``input`` of rank r of the node into row r of the ``output`` of all ranks.

        bounds: row r is the bytes from bounds[r] to bounds[r + 1]; no row is longer than the last. ``input`` may be
        this rank's row itself.
        """
        rank, stride, memory = self._rank, self._slot_bytes, self._memory
        source, target = self._bytes_of(input), self._bytes_of(output)
        low = bounds[rank]
        in_place = input.data_ptr() == output.data_ptr() + low
        others = [other for other in range(self._size) if other != rank]

        def fill(chunk: int, slot: int) -> None:
            part = source[chunk * stride : (chunk + 1) * stride]
            begin = slot * stride
            memory[rank][begin : begin + len(part)] = part

        def take(chunk: int, slot: int) -> None:
            start, begin = chunk * stride, slot * stride
            if not in_place:
                part = source[start : start + stride]
                target[low + start : low + start + len(part)] = part
            for other in others:
                part = target[bounds[other] + start : min(bounds[other] + start + stride, bounds[other + 1])]
                part[:] = memory[other][begin : begin + len(part)]

        longest = bounds[-1] - bounds[-2]
        self._run("all_gather", len(target), (output.dtype, ""), begun, output, -(-longest // stride), fill, take)

    def broadcast(self, tensor: Tensor, root: int, *, begun: bool = False) -> None:
        """Copy the tensor of rank ``root`` of the node."""
        rank, stride, memory = self._rank, self._slot_bytes, self._memory[root]
        target = self._bytes_of(tensor)

        def fill(chunk: int, slot: int) -> None:
            if rank == root:
                part = target[chunk * stride : (chunk + 1) * stride]
                begin = slot * stride
                memory[begin : begin + len(part)] = part

        def take(chunk: int, slot: int) -> None:
            if rank != root:
                part = target[chunk * stride : (chunk + 1) * stride]
                begin = slot * stride
                part[:] = memory[begin : begin + len(part)]

        count = -(-len(target) // stride)
        self._run("broadcast", len(target), (tensor.dtype, root), begun, tensor, count, fill, take)

    # The parts of a chunk's work --------------------------------------------------------------------------------

    def _run(
        self, operation: str, nbytes: int, how: tuple[object, ...], begun: bool, written: Tensor, count: int,
        fill: Work, take: Work,
    ) -> None:  # fmt: skip
        """Take each chunk through a slot: this rank fills it; when all ranks have, this rank takes what they filled.

        how: dtype, and reduction or root, for the comparison of calls. written: the tensor of the results.
        count: chunks, as many on every rank.
        """
        flags, first = self._flags, self._chunks
        flags.refuse_child()  # the first chunk is filled before the ranks compare their calls
        with unseen(written):
            for chunk in range(count):
                number = first + chunk + 1
                slot = number % self._slots
                fill(chunk, slot)
                apart = chunk or begun
                if not apart:  # nothing has been written yet that another collective could use
                    flags.ask(operation, PRIVATE, nbytes, how)
                    apart = flags.agree() is not None  # a rank that has a block of a pool asked before it filled a slot
                if apart:
                    flags.post(FILLED, number)
                    flags.wait_for(FILLED, number)
                take(chunk, slot)
        self._chunks = first + count

    def _copy(self, source: memoryview, start: int, end: int, slot: int, offset: int, most: int) -> None:
        """Copy up to ``most`` bytes of ``source``, from byte ``start`` to ``end``, to byte ``offset`` of a slot."""
        part = source[start : min(start + most, end)]
        if part:
            begin = slot * self._slot_bytes + offset
            self._memory[self._rank][begin : begin + len(part)] = part

    def _collect(
        self, target: memoryview, row: slice, chunk: int, other: int, slot: int, offset: int, stride: int, item: int
    ) -> None:
        """Copy a chunk of a row from byte ``offset`` of rank ``other``'s slot to its place in ``target``."""
        start, end = row.start * item + chunk * stride, row.stop * item
        part = target[start : min(start + stride, end)]
        if part:
            begin = slot * self._slot_bytes + offset
            part[:] = self._memory[other][begin : begin + len(part)]

    def _handing_out(self, flat: Tensor, rows: Sequence[slice], step: int) -> Work:
        """Return the function that copies each row to where the rank that reduces it finds it.

        In the slot of rank q, the row of rank r is number (r - q - 1) modulo the node's size.
        """
        source, item, rank, size = self._bytes_of(flat), flat.itemsize, self._rank, self._size
        stride = step * item
        others = [(other, row) for other, row in enumerate(rows) if other != rank]
        handed = [(row.start * item, row.stop * item, (other - rank - 1) % size * stride) for other, row in others]

        def fill(chunk: int, slot: int) -> None:
            for start, end, offset in handed:
                self._copy(source, start + chunk * stride, end, slot, offset, stride)

        return fill

    def _reduce(self, output: Tensor, own: Tensor, slot: int, step: int, op: str) -> None:
        """Reduce a chunk of this rank's row, which the other ranks have handed out, into ``output``."""
        rank, dtype, numel = self._rank, own.dtype, own.numel()
        places = [(rank - other - 1) % self._size * step for other in range(self._size)]
        operands = [self._view(dtype, slot, other, place, numel) for other, place in enumerate(places) if other != rank]
        operands.insert(rank, own)
        reduce_unseen(operands, op, output)

    def _step(self, flat: Tensor, rows: int) -> int:
        """Return the elements of a chunk when a slot holds a chunk of each of ``rows`` rows."""
        return self._slot_bytes // int(flat.itemsize) // rows // ALIGNMENT * ALIGNMENT

    def _bytes_of(self, tensor: Tensor) -> memoryview:
        return memoryview(self._address(tensor.data_ptr(), tensor.nbytes))

    def _view(self, dtype: torch.dtype, slot: int, rank: int, start: int, numel: int) -> Tensor:
        """Return ``numel`` elements of a rank's slot as a tensor, from element ``start`` on."""
        key = (dtype, slot, rank, start, numel)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= MOST_VIEWS:
                self._views.clear()
            begin = slot * self._slot_bytes + start * dtype.itemsize
            with torch.inference_mode(False):
                view = self._bytes[rank][begin : begin + numel * dtype.itemsize].view(dtype)
            self._views[key] = view
        return view


def _count(rows: Sequence[slice], step: int) -> int:
    return -(-max(int(row.stop) - int(row.start) for row in rows) // step)


def _parts(flat: Tensor, step: int, count: int) -> Sequence[Tensor]:
    """Cut a flat tensor, whose row has up to ``count`` chunks, into chunks of ``step`` elements."""
    parts: Sequence[Tensor] = (flat,) if count == 1 else torch.split(flat, step)
    return parts if flat.numel() else ()
