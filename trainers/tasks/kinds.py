"""The kinds of transformers that can be pretrained, by their names."""

from __future__ import annotations

from typing import Any

from trainers.settings.commands import TransformerSettings

from .bert import BERTTask
from .gpt import GPTTask
from .t5 import T5Task
from .transformer import TransformerTask

TASKS: dict[str, type[TransformerTask[Any]]] = {task.kind: task for task in (GPTTask, BERTTask, T5Task)}


def task_of(config: TransformerSettings) -> TransformerTask[Any]:
    """The task of settings."""
    return TASKS[config.kind](config)
