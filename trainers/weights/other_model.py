"""Models that other programs saved: what every reader of such files gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tplayers import BERTConfig, Placement, T5Config, TransformerConfig

#: the dtypes in which our models compute; others, such as those of 8 bits, mean numbers only with scales
REAL = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

#: the fields of both configurations that do not change the function, and the one that is told with another setting
_LEFT_OUT = {
    "init_method_std", "make_vocab_size_divisible_by", "sequence_parallel", "recompute", "attention_dropout_mask",
    "pad_attention_heads", "num_query_groups",
}  # fmt: skip


def model_settings(config: TransformerConfig) -> dict[str, Any]:
    """The settings of `GPTSettings`, `BERTSettings` or `T5Settings` whose ``model()`` has the function of ``config``.

    Settings that do not change the function are left out: how it is split, recomputed and initialised. Fields of
    ``config`` that are no settings are there, too.
    """
    found = {name: value for name, value in vars(config).items() if name not in _LEFT_OUT}
    found["ffn_hidden_size"] = config.ffn_size
    if isinstance(config, BERTConfig):
        return found | {"bert_no_binary_head": not config.binary_head, "bert_no_token_types": not config.num_tokentypes}
    if isinstance(config, T5Config):
        more = {"gated_gelu": config.swiglu, "disable_decoder_output_scale": not config.scale_decoder_outputs}
        return found | more | {"max_position_embeddings": None}
    found["disable_bias_linear"] = not config.add_bias_linear
    if config.grouped:
        found |= {"group_query_attention": True, "num_query_groups": config.query_groups}
    if (scaling := config.rope_scaling) is not None:
        found |= {
            "use_rope_scaling": True, "rope_scaling_type": scaling.kind, "rope_scaling_factor": scaling.factor,
            "rope_low_freq_factor": scaling.low_freq_factor, "rope_high_freq_factor": scaling.high_freq_factor,
            "rope_original_max_position_embeddings": scaling.original_max_position_embeddings,
        }  # fmt: skip
    return found


@dataclass
class OtherModel(ABC):
    """A model in the files of another program.

    config: its shape. dtype: of its parameters, the widest if they differ.
    """

    config: TransformerConfig
    dtype: torch.dtype

    @property
    def kind(self) -> str:
        """The kind of model: "gpt", "bert" or "t5"."""
        return "bert" if isinstance(self.config, BERTConfig) else "t5" if isinstance(self.config, T5Config) else "gpt"

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of `GPTSettings`, `BERTSettings` or `T5Settings` that its files tell, by name."""
        return model_settings(self.config)

    @abstractmethod
    def parts(
        self, config: TransformerConfig, placements: Mapping[str, Placement]
    ) -> Mapping[str, Callable[[Tensor], None]]:
        """For each of our parameters, by name, a function that fills a host tensor with this rank's part of it.

        config: of our model. placements: of its parameters. A tensor has the local shape and any dtype and strides.
        Rows of vocabulary padding become 0. Nothing is read yet, but names and shapes are compared.

        Raises ValueError, with the names, if tensors are missing, have other shapes, or have no place in the model.
        The functions raise ValueError, naming the file, and OSError. Not collective.
        """

    @abstractmethod
    def their_names(self, name: str) -> str:
        """The tensors of the files in which our parameter ``name`` lies, by their names there, for people."""

    @abstractmethod
    def close(self) -> None:
        """Close the files."""
