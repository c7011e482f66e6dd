"""The checks of a run that its options ask for: losses that jump, ranks that are slow, replicas that differ.

`InRunChecks` is the one object that the loop calls around and after each step.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from commengine import Communicator, UsageError
from commengine.rank_zero import gather_json
from commengine.trace import Trace, trace
from trainers.checkpoints import disk
from trainers.checkpoints.run_folder import BATCHES
from trainers.training.trainer import Diverged, Step, Trainer

from .replicas import difference

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
    """Write this rank's samples of global batch ``k``, from 0, if it is the first that has them. Not collective.

    The file, whose path is returned on all ranks of the tensor, the context and the pipeline group, is a safetensors
    file: the tensors of the microbatches, one after the other along their first dimension, and ``numbers``, int64,
    those of the samples. Raises OSError if it cannot be written.
    """
    path = folder / f"step_{k + 1:07d}-replica_{trainer.grid.data.rank}.safetensors"
    if trainer.grid.tensor.rank == trainer.grid.context.rank == trainer.grid.pipeline.rank == 0:
        microbatches = list(trainer.batches(k))
        tensors: dict[str, Tensor] = {"numbers": torch.tensor([n for batch in microbatches for n in batch.numbers])}
        names = [name for name, value in vars(microbatches[0]).items() if isinstance(value, Tensor)]
        tensors |= {name: torch.cat([getattr(batch, name) for batch in microbatches]) for name in names}
        folder.mkdir(parents=True, exist_ok=True)
        disk.rewrite(path, save(tensors))
    return path


#: how much slower than the median of all ranks a rank is before it is named
SLOW = 1.2


def own_seconds(wall: float, log: Trace) -> float:
    """The seconds of a step, which took ``wall``, in which this rank did not wait in a collective; empties the log.

    A collective of a device counts with the time for which its stream waited.
    """
    waited = sum(event.seconds - event.hidden_seconds for event in log.events)
    log.events.clear()
    return max(0.0, wall - waited)


def paces(seconds: float, world: Communicator) -> dict[str, float | int]:
    """The fields of a row of metrics.jsonl that compare the ranks: the milliseconds of the median rank and the slowest.

    seconds: of this rank's own in a typical step. Collective over ``world``: 8 bytes a rank.
    """
    every = torch.zeros(world.size, dtype=torch.float64)
    world.all_gather(every, torch.tensor([1e3 * seconds], dtype=torch.float64))
    values = every.tolist()
    slowest = max(range(world.size), key=values.__getitem__)
    return {"own_ms": statistics.median_low(values), "slowest_own_ms": values[slowest], "slowest_rank": slowest}


class InRunChecks:
    """``--check-replicas``, ``--check-for-spiky-loss`` and ``--log-straggler``. Collective over the trainer's world.

    folder: of ``--save``; None: no batch is saved. say: prints a line, on rank 0. A check that is off costs nothing.
    """

    def __init__(self, trainer: Trainer, folder: Path | None, say: Callable[[str], None]) -> None:
        config, world = trainer.config, trainer.grid.world
        self._trainer, self._say = trainer, say
        self._folder = None if folder is None else folder / BATCHES
        self._spikes = SpikeDetector(config.check_for_spiky_loss) if config.check_for_spiky_loss else None
        self._problem: str | None = None
        self._log: Trace | None = None
        self._own: list[float] = []
        self._paced = config.log_straggler and world.size > 1
        #: of all ranks, on rank 0
        self._hosts: list[str] = gather_json(world, socket.gethostname()) if self._paced else []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Around ``trainer.step()``. A step that has diverged (`Diverged`) leaves its batch."""
        try:
            grid = self._trainer.grid
            log = trace(*grid.groups) if self._paced else contextlib.nullcontext()
            with log as self._log:
                yield
        except Diverged as error:
            raise UsageError(f"{error}; {self._save_batch(self._trainer.iteration)}") from error

    def after(self, step: Step, seconds: float) -> dict[str, Any]:
        """After a step, before the ranks agree on what follows. Returns fields for the step's row of metrics.jsonl.

        step, seconds: the result of ``trainer.step()`` and the time it took.
        """
        trainer, config = self._trainer, self._trainer.config
        iteration = trainer.iteration
        if config.check_replicas and iteration % config.check_replicas == 0:
            found = difference(trainer)
            if found is not None:
                self._problem = f"step {iteration}: --check-replicas: {found}; the last checkpoint is as it was"
        if self._spikes is not None and not step.skipped:
            above = self._spikes.deviations(step.loss)  # the same on all ranks, as the loss is
            if above is not None:
                saved = self._save_batch(iteration - 1)
                self._say(
                    f"iteration {iteration}: the loss {step.loss:.4f} is {above:.0f} deviations above the last ones; "
                    f"{saved}"
                )
        return self._paces(iteration, seconds) if self._log is not None else {}

    def problem(self) -> str | None:
        """What is so wrong that the run must end, on this rank, or None."""
        return self._problem

    def _save_batch(self, k: int) -> str:
        """Save global batch ``k``, from 0. Returns words on where it is."""
        if self._folder is None:
            return "its batch is not saved, because there is no --save"
        try:
            path = save_batch(self._trainer, k, self._folder)
        except OSError as error:
            return f"its batch could not be saved: {error}"
        return f"its batch is in {path.parent}/{path.name.partition('-')[0]}-replica_*.safetensors"

    def _paces(self, iteration: int, seconds: float) -> dict[str, Any]:
        assert self._log is not None
        self._own.append(own_seconds(seconds, self._log))
        config, world = self._trainer.config, self._trainer.grid.world
        if iteration % config.log_interval and iteration != config.train_iters:
            return {}
        row = paces(statistics.median(self._own), world)
        self._own.clear()
        median, slowest = row["own_ms"], row["slowest_own_ms"]
        if slowest > SLOW * median and self._hosts:
            rank = int(row["slowest_rank"])
            self._say(
                f"iteration {iteration}: rank {rank} on {self._hosts[rank]} keeps the others waiting: "
                f"{slowest:.1f} ms a step outside of collectives, the median rank {median:.1f} ms"
            )
        return row
