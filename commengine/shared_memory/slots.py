"""Reductions of private tensors inside a node: through slots in a window, a chunk at a time.

A rank copies a chunk of its tensor into a slot that all see, the ranks reduce there in rank order, and copy the result
out, in a pipeline whose slots stay in the caches. A tensor is given as *rows*, flat, one for each rank of the node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from commengine.dtypes import reduce_unseen

from .flags import PRIVATE, Lane, new_window

if TYPE_CHECKING:
    from mpi4py import MPI

#: bytes of a slot, and slots of a rank: how much of a tensor is on its way at a time
SLOT_BYTES = 1 << 20
SLOTS = 4

#: rows of a slot begin at multiples of this many elements
ALIGNMENT = 64

#: the stage whose end frees a slot
_LAST = 2

#: does its part of a chunk: (the chunk's number, every rank's slot for it)
Stage = Callable[[int, list[Tensor]], object]


class Bounce:
    """The slots of one lane. Collective to make, on the main threads, and to close."""

    def __init__(self, lane: Lane) -> None:
        self._lane, self._rank, self._size = lane, lane.rank, lane.size
        self._slot_bytes, self._slots = SLOT_BYTES, SLOTS
        self._window: MPI.Win = new_window(lane.comm, self._slot_bytes * self._slots)
        memory = [self._window.Shared_query(rank)[0] for rank in range(lane.size)]
        self._bytes = [torch.frombuffer(part, dtype=torch.uint8) for part in memory]
        self._bytes[lane.rank].zero_()  # touched, as in `SharedTensors`
        self._views: dict[torch.dtype, list[list[Tensor]]] = {}
        self._chunks = 0  # that have gone through
        lane.comm.Barrier()

    @staticmethod
    def nbytes() -> int:
        """Of shared memory that each rank adds."""
        return SLOT_BYTES * SLOTS

    def close(self) -> None:
        """Collective."""
        self._views.clear()
        self._bytes.clear()
        self._window.Free()

    def all_reduce(self, flat: Tensor, rows: Sequence[slice], op: str) -> None:
        """Reduce everybody's flat tensor into everybody's. Of two ranks each reduces all of it, of more its row."""
        if self._size == 2:
            self._all_reduce_of_two(flat, op)
        else:
            self._all_reduce_rows([flat[row] for row in rows], op)

    def _all_reduce_of_two(self, flat: Tensor, op: str) -> None:
        """One wait a chunk, not two, for as many bytes to read and write."""
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
        """Row r on rank r, then to all."""
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
        """Reduce row r of everybody into rank r's ``output``, of halves perhaps float32; it may be its row r."""
        rank, step = self._rank, self._step(rows[0], self._size)

        def reduce(chunk: int, slots: list[Tensor]) -> None:
            self._reduce(_part(output, chunk, step), _part(rows[rank], chunk, step), slots, step, op)

        self._run("reduce_scatter", rows, op, step, [self._handing_out(rows, step), reduce])

    def all_gather(self, rows: Sequence[Tensor]) -> None:
        """Copy every rank's own row into everybody's rows."""
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
        """Elements of each of ``rows`` in a chunk."""
        return self._slot_bytes // row.itemsize // rows // ALIGNMENT * ALIGNMENT

    def _handing_out(self, rows: Sequence[Tensor], step: int) -> Stage:
        """Each row where the rank that reduces it finds it."""

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
        """Each chunk through each stage, when all ranks have done the one before with it.

        A rank that finds its next stages held up by the others goes on to later chunks, as far as there are slots.
        """
        lane, dtype = self._lane, rows[0].dtype
        lane.begin(operation, PRIVATE, sum(row.nbytes for row in rows), f"{dtype} {how}")
        slots = self._typed(dtype)
        count = -(-max(row.numel() for row in rows) // step)
        first, self._chunks = self._chunks, self._chunks + count
        words = [*range(len(stages) - 1), _LAST]  # where a stage's progress stands
        done = [0] * len(stages)

        def ready() -> int | None:
            """A stage that can go on; the last such one, for it frees a slot and finds its chunk in the caches."""
            for stage in reversed(range(len(stages))):
                chunk = done[stage]
                if chunk < (done[stage - 1] if stage else count) and (
                    lane.reached(words[stage - 1], first + chunk + 1)
                    if stage
                    else lane.reached(_LAST, first + chunk + 1 - self._slots)
                ):
                    return stage
            return None

        with torch.inference_mode():
            while done[-1] < count:
                stage = ready()
                if stage is None:
                    lane.wait(lambda: ready() is not None)
                    continue
                stages[stage](done[stage], slots[(first + done[stage]) % self._slots])
                done[stage] += 1
                lane.post(words[stage], first + done[stage])

    def _typed(self, dtype: torch.dtype) -> list[list[Tensor]]:
        """The slots of all ranks: [slot][rank]."""
        if dtype not in self._views:
            self._views[dtype] = [
                [part[slot * self._slot_bytes :][: self._slot_bytes].view(dtype) for part in self._bytes]
                for slot in range(self._slots)
            ]
        return self._views[dtype]


def _part(row: Tensor, chunk: int, step: int) -> Tensor:
    return row[chunk * step :][:step]
