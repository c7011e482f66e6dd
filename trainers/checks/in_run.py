"""The checks of a run that its options ask for: one object that the loop calls around and after each step."""

from __future__ import annotations

import contextlib
import socket
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from commengine import UsageError
from commengine.rank_zero import gather_json
from commengine.trace import Trace, trace
from trainers.checkpoints.run_folder import BATCHES
from trainers.training.trainer import Diverged, Step, Trainer

from . import losses, replicas, stragglers


class InRunChecks:
    """``--check-replicas``, ``--check-for-spiky-loss`` and ``--log-straggler``. Collective over the trainer's world.

    folder: of ``--save``; None: no batch is saved. say: prints a line, on rank 0. A check that is off costs nothing.
    """

    def __init__(self, trainer: Trainer, folder: Path | None, say: Callable[[str], None]) -> None:
        config, world = trainer.config, trainer.grid.world
        self._trainer, self._say = trainer, say
        self._folder = None if folder is None else folder / BATCHES
        self._spikes = losses.SpikeDetector(config.check_for_spiky_loss) if config.check_for_spiky_loss else None
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
            if not self._paced:
                yield
                return
            with trace(self._trainer.grid.tensor, self._trainer.grid.data) as self._log:
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
            found = replicas.difference(trainer)
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
            path = losses.save_batch(self._trainer, k, self._folder)
        except (OSError, SafetensorError) as error:
            return f"its batch could not be saved: {error}"
        return f"its batch is in {path.parent}/{path.name.partition('-')[0]}-replica_*.safetensors"

    def _paces(self, iteration: int, seconds: float) -> dict[str, Any]:
        assert self._log is not None
        self._own.append(stragglers.own_seconds(seconds, self._log))
        config, world = self._trainer.config, self._trainer.grid.world
        if iteration % config.log_interval and iteration != config.train_iters:
            return {}
        paces = stragglers.compare(statistics.median(self._own), world)
        self._own.clear()
        if paces.slow and self._hosts:
            self._say(f"iteration {iteration}: {paces.text(self._hosts[paces.slowest])}")
        return paces.row()
