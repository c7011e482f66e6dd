"""What recording a training step needs: its settings, its trainer, and the folder of the recording."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeAlias

from commengine import Communicator, UsageError
from commengine.options.declared import make_writable
from commengine.rank_zero import on_every_rank
from trainers import presets
from trainers.settings.commands import BERTSettings, GPTSettings
from trainers.tasks.commands import PRETRAIN
from trainers.tasks.kinds import task_of
from trainers.training.trainer import Trainer

#: the settings of the training commands whose steps can be traced
TracedConfig: TypeAlias = GPTSettings | BERTSettings


def read_traceable(model: str | None, rest: Sequence[str], command: str, ranks: int) -> TracedConfig:
    """The settings of a training command's options, if such steps can be traced. Rank 0 alone calls it.

    model: the word of ``--model``, or None. Raises UsageError or ValueError that names the option at fault.
    """
    if model is None:
        given = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        given.add_argument("--preset", nargs="?")
        preset = presets.PRESETS.get(given.parse_known_args(rest)[0].preset or "")
        model = "gpt" if preset is None else preset.task
    config: TracedConfig = replace(PRETRAIN[model], name=command).read(rest, ranks)
    if config.compile:
        raise UsageError(
            "--compile: a compiled graph runs no hooks, so its collectives belong to no layer; leave it out"
        )
    if isinstance(config, GPTSettings) and config.num_experts is not None:
        raise UsageError(f"--num-experts {config.num_experts}: the formulas of a step know no experts; leave it out")
    if config.deterministic:
        raise UsageError(
            "--deterministic: computes one sample at a time, and the formulas count micro-batches; leave it out"
        )
    return config


def to_json(config: TracedConfig) -> dict[str, Any]:
    """The model and its settings, as JSON types."""
    return {"model": config.kind, "config": asdict(config)}


def from_json(found: Mapping[str, Any]) -> TracedConfig:
    """The settings that `to_json` wrote, among other things in ``found``."""
    config: TracedConfig = PRETRAIN[found["model"]].settings(**found["config"])
    return config


def open_trainer(config: TracedConfig, comm: Communicator) -> Trainer:
    """The trainer of a study's steps. Collective over ``comm``; the caller closes it."""
    task = task_of(config)
    return task.new_trainer(comm, on_every_rank(comm, task.open_corpus))


def make_folder(folder: Path, option: str, patterns: Collection[str], *, overwrite: bool) -> None:
    """Make the folder of a recording, on one rank.

    An older recording is deleted with ``overwrite``, so that no file of it is left among the new ones. Without it,
    the folder must not hold a recording. patterns: of the files of recordings, in all formats. option: the option that
    names the folder, for the UsageError.
    """
    make_writable(option, folder)
    older = sorted(file for pattern in patterns for file in folder.glob(pattern))
    if older and not overwrite:
        raise UsageError(
            f"{option} {folder}: holds a recording of {len(older)} ranks; give another folder, or --overwrite"
        )
    for file in older:
        file.unlink()
