"""Run pretrain_gpt, and kill one rank before a change that one of its saves makes to a file.

``KILL=RANK,SAVE,CHANGE killed_save.py OPTIONS``: the checkpoint and the change are numbered from 1. All writes to a
file from the second one on count as one change.
"""

import os
import signal
from typing import Any

from commengine import launch
from tests.support.file_operations import FileOperations
from trainers import pretrain_gpt
from trainers.checkpoints import run_state

RANK, SAVE, CHANGE = map(int, os.environ["KILL"].split(","))


class KilledSaver(run_state.CheckpointSaver):
    """Counts the changes of one of its checkpoints, from its beginning until the older ones are removed."""

    saves = 0

    def __init__(self, trainer: Any, *more: Any) -> None:
        super().__init__(trainer, *more)
        self._rank = trainer.grid.world.rank
        self._operations: FileOperations | None = None
        self._changes = 0
        self._writes = 0

    def start(self, **options: Any) -> None:
        self.finish()
        KilledSaver.saves += 1
        if self._rank == RANK and KilledSaver.saves == SAVE:
            self._operations = FileOperations(self._before)
            self._operations.__enter__()
        super().start(**options)

    def finish(self) -> None:
        super().finish()
        if self._operations is not None and self._changes:
            self._operations.__exit__()
            self._operations = None

    def _before(self, number: int, name: str) -> None:
        self._writes = self._writes + 1 if name == "pwrite" else 0
        self._changes += self._writes < 3
        if self._changes == CHANGE:
            os.kill(os.getpid(), signal.SIGKILL)


run_state.CheckpointSaver = KilledSaver  # type: ignore[misc]
launch.run(pretrain_gpt.main)
