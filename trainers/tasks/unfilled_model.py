"""A model whose parameters a file fills."""

from __future__ import annotations

import torch

from commengine import Communicator
from tplayers import BERT, GPT
from tplayers.parameter_memory import unfilled_parameters

from .bert import BERTTrainConfig
from .gpt import GPTTrainConfig
from .transformer import TransformerTrainConfig


def unfilled_model(settings: TransformerTrainConfig, tensor: Communicator, dtype: torch.dtype) -> GPT | BERT:
    """A model over the tensor group whose parameters hold any values, because all of them will be read from a file."""
    with unfilled_parameters():
        if isinstance(settings, BERTTrainConfig):
            return BERT(settings.model(), tensor, dtype=dtype)
        assert isinstance(settings, GPTTrainConfig)
        return GPT(settings.model(), tensor, dtype=dtype)
