"""The commands that pretrain transformers: how their settings come from a command line."""

from __future__ import annotations

from functools import partial
from typing import Any

from trainers.settings.command import Command
from trainers.settings.commands import BERTSettings, GPTSettings

from .bert import BERTTask
from .gpt import GPTTask
from .other_models import implied

PRETRAIN_GPT = Command(
    "pretrain_gpt", GPTSettings, megatron="gpt", implied=partial(implied, GPTSettings),
    complete=lambda config, ranks: GPTTask(config).completed(ranks),
)  # fmt: skip
PRETRAIN_BERT = Command(
    "pretrain_bert", BERTSettings, megatron="bert", implied=partial(implied, BERTSettings),
    complete=lambda config, ranks: BERTTask(config).completed(ranks),
)  # fmt: skip
PRETRAIN: dict[str, Command[Any]] = {"gpt": PRETRAIN_GPT, "bert": PRETRAIN_BERT}
