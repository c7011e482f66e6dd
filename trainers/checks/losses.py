"""Losses that jump, and the batch of the step in which one did."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from trainers.training.trainer import Trainer

#: losses that a new one is compared with, and how many there must be
REMEMBERED, FEWEST = 100, 20
#: so many spikes in a row are no spikes: the losses have another level
IN_A_ROW = 5
#: standard deviations in a median absolute deviation of normal values
_NORMAL = 1.4826


class SpikeDetector:
    """Tells losses that lie far above those before. ``limit``: in standard deviations.

    The deviation is estimated from the median of absolute deviations, which spikes themselves do not change, and is at
    least a thousandth of the median. A spike is not remembered, but after IN_A_ROW of them in a row losses are compared
    with these. The first FEWEST losses are never spikes.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._losses: deque[float] = deque(maxlen=REMEMBERED)
        self._row: list[float] = []  # the spikes since the last loss that was none

    def deviations(self, loss: float) -> float | None:
        """How many standard deviations above the median of the last losses a spike is; None for other losses."""
        if len(self._losses) >= FEWEST:
            median = statistics.median(self._losses)
            spread = _NORMAL * statistics.median(abs(one - median) for one in self._losses)
            above = (loss - median) / max(spread, 1e-3 * abs(median), 1e-12)
            if above > self._limit:
                self._row.append(loss)
                if len(self._row) == IN_A_ROW:
                    self._losses.clear()
                    self._losses.extend(self._row)
                    self._row.clear()
                return above
        self._row.clear()
        self._losses.append(loss)
        return None


def save_batch(trainer: Trainer, k: int, folder: Path) -> Path:
    """Write this rank's samples of global batch ``k``, from 0, if it is the first of its tensor group. Not collective.

    The file, whose path is returned on all ranks of the tensor group, is a safetensors file: the tensors of the
    microbatches, one after the other along their first dimension, and ``numbers``, int64, those of the samples. Raises
    OSError if it cannot be written.
    """
    path = folder / f"step_{k + 1:07d}-replica_{trainer.grid.data.rank}.safetensors"
    if trainer.grid.tensor.rank == 0:
        microbatches = list(trainer.batches(k))
        tensors: dict[str, Tensor] = {"numbers": torch.tensor([n for batch in microbatches for n in batch.numbers])}
        for name in _tensor_names(microbatches[0]):
            tensors[name] = torch.cat([getattr(batch, name) for batch in microbatches]).contiguous()
        folder.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".tmp")
        try:
            save_file(tensors, beside)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    return path


def _tensor_names(batch: Any) -> list[str]:
    names = [item.name for item in fields(batch)] if is_dataclass(batch) else list(vars(batch))
    return [name for name in names if isinstance(getattr(batch, name), Tensor)]
