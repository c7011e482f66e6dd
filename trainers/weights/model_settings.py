"""The settings of a training command that give a model of a known shape."""

from __future__ import annotations

from typing import Any

from tplayers import BERTConfig, GPTConfig

#: the fields of both configurations that are settings of the same name
_SAME = (
    "num_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings", "hidden_dropout",
    "attention_dropout", "norm_epsilon",
)  # fmt: skip
_SAME_OF_GPT = (
    "normalization", "swiglu", "position_embedding_type", "rotary_base", "kv_channels", "add_qkv_bias",
    "untie_embeddings_and_output_weights",
)  # fmt: skip
_SAME_OF_BERT = ("norm_placement", "gelu", "head_gelu")


def model_settings(config: GPTConfig | BERTConfig) -> dict[str, Any]:
    """The settings of `GPTTrainConfig` or `BERTTrainConfig` whose ``model()`` has the function of ``config``.

    Settings that do not change the function are left out: how it is split, recomputed and initialised.
    """
    own = _SAME_OF_BERT if isinstance(config, BERTConfig) else _SAME_OF_GPT
    found: dict[str, Any] = {name: getattr(config, name) for name in (*_SAME, *own)}
    found["ffn_hidden_size"] = config.ffn_size
    if isinstance(config, BERTConfig):
        return found | {"bert_no_binary_head": not config.binary_head}
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
