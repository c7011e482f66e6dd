"""A model whose parameters a file fills."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from commengine import Communicator
from tplayers import BERT, GPT

from .bert import BERTTrainConfig
from .gpt import GPTTrainConfig
from .transformer import TransformerTrainConfig


def unfilled_model(settings: TransformerTrainConfig, tensor: Communicator, dtype: torch.dtype) -> GPT | BERT:
    """A model over the tensor group whose parameters hold any values, because all of them will be read from a file.

    A new parameter holds NaN elsewhere. To write that first takes a fourth of the time in which a model is loaded.
    """
    with _Unfilled():
        if isinstance(settings, BERTTrainConfig):
            return BERT(settings.model(), tensor, dtype=dtype)
        assert isinstance(settings, GPTTrainConfig)
        return GPT(settings.model(), tensor, dtype=dtype)


class _Unfilled(TorchFunctionMode):
    """Within it ``torch.full`` leaves the memory as it is."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        if func is torch.full:
            return torch.empty(args[0], **(kwargs or {}))
        return func(*args, **(kwargs or {}))
