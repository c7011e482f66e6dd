"""Reductions of private tensors inside a node: through slots in a shared window, one chunk at a time.

A rank copies a chunk of its tensor into a slot that all ranks see, the ranks reduce there in rank order, and each rank
copies the result out. The chunks go through a pipeline of such stages, whose slots stay in the caches. A tensor is
given as *rows*: flat tensors, one for each rank of the node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from commengine.dtypes import reduce_unseen

from .flags import PRIVATE, Flags, new_window

if TYPE_CHECKING:
    from mpi4py import MPI

#: bytes of a slot, and slots of a rank: so much of a tensor is in the pipeline at a time
SLOT_BYTES = 1 << 20
SLOTS = 4

#: rows of a slot begin at multiples of this many elements
ALIGNMENT = 64

#: the flag of the stage whose end frees a slot
_LAST = 2

#: one stage of the pipeline: does its part of a chunk, given the chunk's number and every rank's slot for it
Stage = Callable[[int, list[Tensor]], object]


class Bounce:
    """The slots of one sequence of collectives. Collective to make, on the main threads, and to close."""

    def __init__(self, flags: Flags) -> None:
        self._flags, self._rank, self._size = flags, flags.rank, flags.size
        self._slot_bytes, self._slots = SLOT_BYTES, SLOTS
        self._window: MPI.Win = new_window(flags.comm, self._slot_bytes * self._slots)
        memory = [self._window.Shared_query(rank)[0] for rank in range(flags.size)]
        self._bytes = [torch.frombuffer(part, dtype=torch.uint8) for part in memory]
        self._bytes[flags.rank].zero_()  # touch every page, as in `SharedTensors`
        self._views: dict[torch.dtype, list[list[Tensor]]] = {}
        self._chunks = 0  # chunks of all collectives so far
        flags.comm.Barrier()

    @staticmethod
    def nbytes() -> int:
        """Bytes of shared memory that each rank needs for its slots."""
        return SLOT_BYTES * SLOTS

    def close(self) -> None:
        """Free the window. Collective."""
        self._views.clear()
        self._bytes.clear()
        self._window.Free()

    def all_reduce(self, flat: Tensor, rows: Sequence[slice], op: str) -> None:
        """Reduce all ranks' flat tensors into each of them.

        Of two ranks each reduces the whole tensor; of more ranks each reduces its row.
        """
        if self._size == 2:
            self._all_reduce_of_two(flat, op)
        else:
            self._all_reduce_rows([flat[row] for row in rows], op)

    def _all_reduce_of_two(self, flat: Tensor, op: str) -> None:
        """Let both ranks reduce every chunk: one wait a chunk instead of two, for as many bytes read and written."""
        rank, step = self._rank, self._step(flat, 1)

        def fill(chunk: int, slots: list[Tensor]) -> None:
            part = _part(flat, chunk, step)
            slots[rank][: part.numel()].copy_(part)

        def reduce(chunk: int, slots: list[Tensor]) -> None:
            part = _part(flat, chunk, step)
            operands = [slot[: part.numel()] for slot in slots]
            operands[rank] = part
            reduce_unseen(operands, op, part)

        self._run("all_reduce", [flat], op, step, [fill, reduce])

    def _all_reduce_rows(self, rows: Sequence[Tensor], op: str) -> None:
        """Let rank r reduce row r, then copy the results to all ranks."""
        rank, step = self._rank, self._step(rows[0], self._size)

        def reduce(chunk: int, slots: list[Tensor]) -> None:
            own = _part(rows[rank], chunk, step)
            total = slots[rank][rank * step :][: own.numel()]
            self._reduce(total, own, slots, step, op)
            own.copy_(total)

        def collect(chunk: int, slots: list[Tensor]) -> None:
            for other, row in enumerate(rows):
                if other != rank:
                    part = _part(row, chunk, step)
                    part.copy_(slots[other][other * step :][: part.numel()])

        self._run("all_reduce", rows, op, step, [self._handing_out(rows, step), reduce, collect])

    def reduce_scatter(self, output: Tensor, rows: Sequence[Tensor], op: str) -> None:
        """Reduce row r of all ranks' tensors into the flat ``output`` of rank r.

        output: may be the rank's row r itself; for float16 and bfloat16 rows it may be float32.
        """
        rank, step = self._rank, self._step(rows[0], self._size)

        def reduce(chunk: int, slots: list[Tensor]) -> None:
            self._reduce(_part(output, chunk, step), _part(rows[rank], chunk, step), slots, step, op)

        self._run("reduce_scatter", rows, op, step, [self._handing_out(rows, step), reduce])

    def all_gather(self, rows: Sequence[Tensor]) -> None:
        """Copy each rank's own row into the rows of all ranks."""
        rank, step = self._rank, self._step(rows[0], 1)

        def fill(chunk: int, slots: list[Tensor]) -> None:
            part = _part(rows[rank], chunk, step)
            slots[rank][: part.numel()].copy_(part)

        def collect(chunk: int, slots: list[Tensor]) -> None:
            for other, row in enumerate(rows):
                if other != rank:
                    part = _part(row, chunk, step)
                    part.copy_(slots[other][: part.numel()])

        self._run("all_gather", rows, "", step, [fill, collect])

    def _step(self, row: Tensor, rows: int) -> int:
        """Return the elements of a chunk when a slot holds a chunk of each of ``rows`` rows."""
        return self._slot_bytes // row.itemsize // rows // ALIGNMENT * ALIGNMENT

    def _handing_out(self, rows: Sequence[Tensor], step: int) -> Stage:
        """Return the stage that copies each row to where the rank that reduces it finds it."""

        def fill(chunk: int, slots: list[Tensor]) -> None:
            for other, row in enumerate(rows):
                if other != self._rank:
                    part = _part(row, chunk, step)
                    slots[self._rank][other * step :][: part.numel()].copy_(part)

        return fill

    def _reduce(self, output: Tensor, own: Tensor, slots: list[Tensor], step: int, op: str) -> None:
        operands = [slot[self._rank * step :][: own.numel()] for slot in slots]
        operands[self._rank] = own
        reduce_unseen(operands, op, output)

    def _run(self, operation: str, rows: Sequence[Tensor], how: str, step: int, stages: Sequence[Stage]) -> None:
        """Take each chunk through each stage. A rank begins a stage when all ranks have done the stage before it.

        rows: the flat tensors, cut into chunks of ``step`` elements. how: the reduction, for the comparison of calls.
        A rank whose next stage must wait for other ranks goes on with later chunks as long as there are free slots.
        """
        dtype = rows[0].dtype
        self._flags.begin(operation, PRIVATE, sum(row.nbytes for row in rows), f"{dtype} {how}")
        slots = self._typed(dtype)
        count = -(-max(row.numel() for row in rows) // step)
        pipeline = _Pipeline(self._flags, self._slots, self._chunks, count, len(stages))
        self._chunks += count
        with torch.inference_mode():
            while not pipeline.finished:
                stage = pipeline.ready()
                if stage is None:
                    self._flags.wait(pipeline.can_go_on)
                    continue
                stages[stage](pipeline.done[stage], slots[pipeline.slot(stage)])
                pipeline.advance(stage)

    def _typed(self, dtype: torch.dtype) -> list[list[Tensor]]:
        """Return the slots of all ranks as tensors of ``dtype``: [slot][rank]."""
        if dtype not in self._views:
            self._views[dtype] = [
                [part[slot * self._slot_bytes :][: self._slot_bytes].view(dtype) for part in self._bytes]
                for slot in range(self._slots)
            ]
        return self._views[dtype]


def _part(row: Tensor, chunk: int, step: int) -> Tensor:
    return row[chunk * step :][:step]


class _Pipeline:
    """The progress of one collective through its stages: on this rank in ``done``, on all ranks in the flags.

    slots: slots of a rank. first: chunks that earlier collectives took through the slots. count: chunks of this
    collective. stages: number of stages.
    """

    def __init__(self, flags: Flags, slots: int, first: int, count: int, stages: int) -> None:
        self._flags, self._slots, self._first, self._count = flags, slots, first, count
        self._words = [*range(stages - 1), _LAST]  # the flag of each stage's progress
        self.done = [0] * stages  # chunks that this rank has taken through each stage

    @property
    def finished(self) -> bool:
        """Whether this rank has taken all chunks through the last stage."""
        return self.done[-1] == self._count

    def ready(self) -> int | None:
        """Return a stage that can go on with its next chunk, or None.

        The last such stage comes first, because it frees a slot and finds its chunk in the caches.
        """
        for stage in reversed(range(len(self.done))):
            if self._is_ready(stage):
                return stage
        return None

    def _is_ready(self, stage: int) -> bool:
        """Whether the next chunk of ``stage`` has left the stage before on all ranks, or, at stage 0, has a slot."""
        chunk = self.done[stage]
        number = self._first + chunk + 1
        if stage == 0:
            return chunk < self._count and self._flags.reached(_LAST, number - self._slots)
        return chunk < self.done[stage - 1] and self._flags.reached(self._words[stage - 1], number)

    def can_go_on(self) -> bool:
        """Whether any stage is ready."""
        return self.ready() is not None

    def slot(self, stage: int) -> int:
        """Return the slot of the next chunk of ``stage``."""
        return (self._first + self.done[stage]) % self._slots

    def advance(self, stage: int) -> None:
        """Note that ``stage`` has done its next chunk, and tell the other ranks."""
        self.done[stage] += 1
        self._flags.post(self._words[stage], self._first + self.done[stage])
