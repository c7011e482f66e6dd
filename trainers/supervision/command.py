"""The training command that is supervised: its places to fill, its settings, and how far its run has come."""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from commengine import UsageError
from commengine.command.table import command_of
from commengine.options.declared import require
from trainers.checkpoints import pointer
from trainers.settings.command import Command
from trainers.settings.commands import TrainSettings

from .settings import Size, SuperviseSettings

#: the commands that can be supervised; each module has its COMMAND
COMMANDS = ("trainers.pretrain_gpt", "trainers.pretrain_bert", "trainers.pretrain_t5", "trainers.finetune")
#: the file in the folder of --save into which the run writes its step
STEP_FILE = "supervised-step"


def started(words: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield each of `COMMANDS` that the words start, by python -m or by commengine, and where its arguments begin."""
    for number, (before, word) in enumerate(itertools.pairwise(words), 1):
        if before == "-m" and word in COMMANDS:
            yield word, number + 1
        listed = command_of(words[number:]) if Path(before).name == "commengine" else None
        if listed is not None and listed.module in COMMANDS:
            yield listed.module, number + len(listed.words.split())


class Position(NamedTuple):
    """How far a run has come. step: the step under way when it ended, from 1; None if no step had begun.

    saved: the iteration of the newest checkpoint, 0 if there is none.
    """

    step: int | None
    saved: int


class TrainingCommand:
    """The words after ``--``: a launcher and one of `COMMANDS`, which goes on where it stopped if it is started again.

    words: with ``{ranks}``, ``{tensor}`` and ``{hosts}``. settings: valid (`SuperviseSettings.validate`). Raises
    UsageError, naming what is wrong, unless the command can be started at each size of ``settings``.
    """

    def __init__(self, words: Sequence[str], settings: SuperviseSettings) -> None:
        self.words = list(words)
        sizes = settings.sizes()
        found = [*started(words)]
        require(
            len(found) == 1,
            f"the command after -- must start python -m {' or -m '.join(COMMANDS)}, as in: mpirun -n {{ranks}} "
            f"python -m {COMMANDS[0]} --save DIR --load DIR --save-interval 100 ...",
        )
        self._module, self._begin = found[0]
        tensor = bool(sizes) and sizes[0].tensor is not None
        filled = (("{ranks}", "--ranks", bool(sizes)), ("{tensor}", "--ranks N:T", tensor),
                  ("{hosts}", "--hosts", settings.hosts is not None))  # fmt: skip
        for place, option, given in filled:
            there = any(place in word for word in words)
            require(there == given, f"{option}, and {place} in the command after --: give both of them, or none")
        config = [self._config(size) for size in sizes][-1] if sizes else self._config(None)
        #: the folder of --save
        self.folder = Path(config.save or "")
        #: the signal of --exit-signal, or None
        self.exit_signal = config.exit_signal
        goes_on = config.save and config.load and Path(config.load).resolve() == self.folder.resolve()
        require(
            goes_on and config.save_interval,
            "the command after -- needs --save DIR --load DIR, of one folder, and --save-interval N: so it goes on "
            "there when it is started again",
        )
        require(
            len(sizes) < 2 or config.global_batch_size is not None,
            f"--ranks {settings.ranks}: the command after -- needs --global-batch-size, which otherwise depends on the "
            "number of ranks",
        )

    def _config(self, size: Size | None) -> TrainSettings:
        """The settings of the run at this size; valid, if the size is known."""
        module = self._module
        words = self.filled(size, {})[self._begin :]
        try:
            command: Command[Any] = importlib.import_module(module).COMMAND
            config: TrainSettings = command.parse(words)
            if size is not None:
                command.require_valid(config, size.ranks)
                command.complete(config, size.ranks)  # the vocabulary and the heads, which this size must divide
        except (UsageError, ValueError) as error:
            at = f" on {size.ranks} ranks" if size is not None else ""
            raise UsageError(f"{module}{at}: {error}") from error
        return config

    def filled(self, size: Size | None, hosts: Mapping[str, int]) -> list[str]:
        """The words with their places filled. hosts: how many ranks each takes."""
        ranks, tensor = size or (None, None)
        listed = ",".join(f"{name}:{slots}" for name, slots in hosts.items())
        words = self.words
        for place, value in (("{ranks}", ranks), ("{tensor}", tensor), ("{hosts}", listed)):
            words = [word.replace(place, str(value)) for word in words]
        return words

    def to_start(self, size: Size | None, hosts: Mapping[str, int]) -> list[str]:
        """The words to start: the places filled, and the run asked for its step."""
        return [*self.filled(size, hosts), "--step-file", str(self.folder / STEP_FILE)]

    def forget_step(self) -> None:
        """Remove the file with the step, so that the next one is of the next start."""
        with contextlib.suppress(OSError):
            (self.folder / STEP_FILE).unlink(missing_ok=True)

    def step(self) -> int | None:
        """The number of the last step that has begun since `forget_step`, or None."""
        with contextlib.suppress(OSError, ValueError):
            return int((self.folder / STEP_FILE).read_text())
        return None

    def position(self) -> Position:
        """How far the run has come since `forget_step`."""
        found = None
        with contextlib.suppress(OSError, ValueError, UsageError):
            found = pointer.latest(self.folder)
        return Position(self.step(), 0 if found is None else pointer.iteration_of(found) or 0)
