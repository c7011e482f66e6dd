"""The training command that is supervised: its places to fill, its settings, and how far its run has come."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from commengine import UsageError
from trainers import options
from trainers.checkpoints import pointer
from trainers.config import TrainConfig
from trainers.options import OptionError, require

from .settings import Host, Size, SuperviseConfig

#: the commands that can be supervised; each module has the type of its settings as CONFIG
COMMANDS = ("trainers.pretrain_gpt", "trainers.pretrain_bert", "trainers.finetune")
PLACES = ("ranks", "tensor", "hosts")
#: the file in the folder of --save into which the run writes its step
STEP_FILE = "supervised-step"


@dataclass(frozen=True)
class Position:
    """How far a run has come. step: the step under way when it ended, from 1; None if no step had begun.

    saved: the iteration of the newest checkpoint, 0 if there is none.
    """

    step: int | None
    saved: int


class TrainingCommand:
    """The words after ``--``: a launcher and one of `COMMANDS`, which goes on where it stopped if it is started again.

    words: with ``{ranks}``, ``{tensor}`` and ``{hosts}``. settings: valid (`SuperviseConfig.validate`). Raises
    UsageError, naming what is wrong, unless the command can be started at each size of ``settings``.
    """

    def __init__(self, words: Sequence[str], settings: SuperviseConfig) -> None:
        self.words = list(words)
        sizes = settings.sizes()
        at = [n for n, word in enumerate(words) if word in COMMANDS and n and words[n - 1] == "-m"]
        require(
            len(at) == 1,
            f"the command after -- must start python -m {' or -m '.join(COMMANDS)}, as in: mpirun -n {{ranks}} "
            f"python -m {COMMANDS[0]} --save DIR --load DIR --save-interval 100 ...",
        )
        self._at = at[0]
        self._require_places(settings, sizes)
        each: list[Size | None] = [*sizes] or [None]
        for size in each:
            config = self._config(size)
        #: the folder of --save
        self.folder = Path(config.save or "")
        #: the signal of --exit-signal, or None
        self.exit_signal = config.exit_signal
        require(config.save is not None, "the command after -- needs --save DIR, the folder for its checkpoints")
        require(
            config.load is not None and Path(config.load).resolve() == self.folder.resolve(),
            f"the command after -- needs --load {self.folder}, the folder of its --save, so that it goes on there when "
            "it is started again",
        )
        require(
            config.save_interval is not None,
            "the command after -- needs --save-interval N: otherwise each restart begins at the first step",
        )
        require(
            len(sizes) < 2 or config.global_batch_size is not None,
            f"--ranks {settings.ranks}: the command after -- needs --global-batch-size, which otherwise depends on the "
            "number of ranks",
        )

    def _require_places(self, settings: SuperviseConfig, sizes: Sequence[Size]) -> None:
        """Raise UsageError unless the command has those places that the options fill."""
        filled = {
            "ranks": ("--ranks", bool(sizes)),
            "tensor": ("--ranks N:T", bool(sizes and sizes[0].tensor)),
            "hosts": ("--hosts", settings.hosts is not None),
        }
        for place, (option, given) in filled.items():
            there = any(f"{{{place}}}" in word for word in self.words)
            require(there or not given, f"{option}: the command after -- has no {{{place}}}, which it stands for")
            require(given or not there, f"the command after -- has {{{place}}}: give {option}, which says its value")

    def _config(self, size: Size | None) -> TrainConfig:
        """The settings of the run at this size; valid, if the size is known."""
        module = self.words[self._at]
        words = self.filled(size, [], with_step_file=False)
        try:
            config = options.parse(importlib.import_module(module).CONFIG, words[self._at + 1 :], module.split(".")[1])
            if size is not None:
                config.validate(size.ranks)
                config.completed(size.ranks)  # the vocabulary and the heads, which this size must divide
        except (OptionError, UsageError, ValueError) as error:
            at = f" on {size.ranks} ranks" if size is not None else ""
            raise UsageError(f"{module}{at}: {error}") from error
        assert isinstance(config, TrainConfig)
        return config

    def filled(self, size: Size | None, hosts: Sequence[Host], *, with_step_file: bool = True) -> list[str]:
        """The words to start: the places filled, and, unless that is turned off, the run asked for its step."""
        values = {"hosts": ",".join(f"{host.name}:{host.slots}" for host in hosts) or "HOSTS"}
        if size is not None:
            values |= {"ranks": str(size.ranks), "tensor": str(size.tensor)}
        place = re.compile("|".join(f"{{{name}}}" for name in PLACES))
        words = [place.sub(lambda found: values.get(found[0][1:-1], found[0]), word) for word in self.words]
        return [*words, "--step-file", str(self.folder / STEP_FILE)] if with_step_file else words

    def forget_step(self) -> None:
        """Remove the file with the step, so that the next one is of the next start."""
        with contextlib.suppress(OSError):
            (self.folder / STEP_FILE).unlink(missing_ok=True)

    def position(self) -> Position:
        """How far the run has come since `forget_step`."""
        return Position(self.step(), self._saved())

    def step(self) -> int | None:
        """The number of the last step that has begun since `forget_step`, or None."""
        with contextlib.suppress(OSError, ValueError):
            return int((self.folder / STEP_FILE).read_text())
        return None

    def _saved(self) -> int:
        with contextlib.suppress(OSError, ValueError, UsageError):
            found = pointer.latest(self.folder)
            return 0 if found is None else int(found.stem.removeprefix("iter_"))
        return 0
