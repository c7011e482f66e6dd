"""The commands that pretrain transformers: how their settings come from a command line."""

from __future__ import annotations

from functools import partial
from typing import Any

from trainers.megatron_flags.answers import COMMANDS
from trainers.settings.command import Command

from .kinds import TASKS, task_of
from .other_models import implied

#: by the kind of model
PRETRAIN: dict[str, Command[Any]] = {
    kind: Command(
        f"pretrain_{kind}", task.settings, megatron=kind if kind in COMMANDS else None,
        implied=partial(implied, task.settings), complete=lambda config, ranks: task_of(config).completed(ranks),
    )
    for kind, task in TASKS.items()
}  # fmt: skip
PRETRAIN_GPT, PRETRAIN_BERT, PRETRAIN_T5 = PRETRAIN["gpt"], PRETRAIN["bert"], PRETRAIN["t5"]
