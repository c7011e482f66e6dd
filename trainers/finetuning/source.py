"""The runs that fine-tuning starts from, goes on with, or uses: their folders and their settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from commengine import UsageError
from trainers.checkpoints import checkpoint, pointer
from trainers.config import of_other_program
from trainers.tasks.bert import BERTTrainConfig
from trainers.tasks.other_models import require_kind, settings_of_other
from trainers.trained import read_settings
from trainers.weights.opening import open_other

from .flags import SHAPE, FinetuneFlags

#: in the folder of several runs: how good each is, and which is the median (`trainers.finetuning.seeds`)
SEEDS = "seeds.json"


def settings_of(found: Path, *, verify: bool) -> Mapping[str, Any]:
    """The settings of the run that wrote a checkpoint, as it saved them. Raises UsageError if they cannot be read.

    verify: compare them with their checksum.
    """
    return checkpoint.saved_state(found, verify=verify).settings


def is_fine_tuned(saved: Mapping[str, Any]) -> bool:
    """Whether these are the settings of a run of ``finetune``."""
    return "task" in saved and "doc_stride" in saved


def pretrained(folder: str | None, *, verify: bool) -> tuple[Mapping[str, Any], str]:
    """(The settings of the BERT in ``folder``, the words for it). Raises UsageError for anything else.

    folder: of a run of pretrain_bert, or ``hf:FOLDER``.
    """
    if folder is None:
        raise UsageError(
            "--pretrained-checkpoint: needed: a run of pretrain_bert to start from, because the folder of --load and "
            "--save holds no checkpoint yet"
        )
    if of_other_program(folder):
        other = open_other(folder)
        other.close()
        require_kind(folder, other, "bert")
        return settings_of_other(BERTTrainConfig, other, folder).to_json(), f"--load {folder}"
    found = checkpoint.find(Path(folder))
    if found is None:
        raise UsageError(f"--load {folder}: {_nothing(Path(folder))}; valid: the --save folder of a run")
    saved = settings_of(found, verify=verify)
    if is_fine_tuned(saved):
        raise UsageError(f"--pretrained-checkpoint {folder}: is a run of finetune; give one of pretrain_bert")
    if "norm_placement" not in saved or not saved.get("vocab_size"):
        kind = "a GPT" if "num_layers" in saved else "another model"
        raise UsageError(
            f"--load {folder}: holds {kind}, and a BERT is needed; give the --save folder of trainers.pretrain_bert"
        )
    return read_settings(found, BERTTrainConfig, saved).to_json(), f"--load {folder}"


def fine_tuned(found: Path, words: str, *, verify: bool) -> Mapping[str, Any]:
    """The settings of the run of ``finetune`` that wrote a checkpoint. Raises UsageError for any other run.

    words: the option that names the run, and its folder.
    """
    saved = settings_of(found, verify=verify)
    if not is_fine_tuned(saved):
        raise UsageError(f"{words}: is no run of finetune, so it has learnt no task; to train it, give --save DIR")
    settings = read_settings(found, FinetuneFlags, saved)
    # A run may leave the width to its default, and older versions had one epsilon only.
    needed = {"task", "seq_length", *SHAPE} - {"ffn_hidden_size", "norm_epsilon"}
    if lacking := sorted(name for name in needed if not getattr(settings, name)):
        raise checkpoint.cannot_load(found, ValueError(f"{found / pointer.STATE}: settings: {lacking[0]} is missing"))
    return settings.to_json()


def best_checkpoint(folder: str, option: str) -> Path:
    """The best checkpoint of a run, or the newest if it marks none; of several runs, that of the median run.

    Or ``folder`` itself, if it is a checkpoint. Raises UsageError, naming ``option``, if there is none.
    """
    path = Path(folder)
    if (path / pointer.STATE).is_file():
        return path
    if (path / SEEDS).is_file():
        path = path / median_run(path / SEEDS)
    found = pointer.best(path) or checkpoint.find(path)
    if found is None:
        raise UsageError(f"{option} {folder}: {_nothing(path)}; valid: the --save folder of a run of finetune")
    return found


def median_run(summary: Path) -> str:
    """The name of the median run's folder. Raises UsageError if the file is damaged."""
    try:
        name = json.loads(summary.read_bytes())["median_run"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{summary}: cannot be read: {error!r}; run finetune --seeds again") from error
    if not isinstance(name, str) or Path(name).name != name:
        raise UsageError(f"{summary}: names no run")
    return name


def _nothing(folder: Path) -> str:
    return "holds no checkpoint" if folder.is_dir() else "no such folder"
