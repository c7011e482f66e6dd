"""``config.json`` of Hugging Face, written from the shape of our model, with the names of transformers 4 and of 5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tplayers import BERTConfig, GPTConfig

from .configurations import ARCHITECTURES, GELU_NAMES, LLAMA3
from .hugging_face import family


@dataclass(frozen=True)
class TaskHead:
    """The head of a fine-tuned BERT: our name of it, the end of transformers' class, and its labels if it has such."""

    ours: str
    ends: str
    labels: tuple[str, ...] = ()


def written_configuration(
    config: GPTConfig | BERTConfig, dtype: torch.dtype, origin: Mapping[str, Any] | None = None,
    head: TaskHead | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The keys of a ``config.json`` for a model of this shape, whose parameters are of ``dtype``.

    origin: the keys of the ``config.json`` that the model came from. They are kept where they do not say anything else,
    such as tokens with a meaning; and the model stays a Mistral, if it was one. head: of a fine-tuned BERT.

    Raises ValueError as `family` does.
    """
    kept = dict(origin or {})
    kept.pop("rope_interleaved", None)  # a model that was read has its halves apart, whatever the files had
    name = str(dtype).removeprefix("torch.")
    found: dict[str, Any] = {"dtype": name, "torch_dtype": name}
    of = family(config)
    if isinstance(config, BERTConfig):
        found |= _bert_keys(config, head)
    elif of == "gpt2":
        found |= _gpt2_keys(config)
    else:
        found |= _llama_keys(config, kept.get("model_type"))
    if kept.get("model_type") != found["model_type"]:
        kept = {}
    elif (classes := kept.get("architectures")) and ARCHITECTURES.get(classes[0]) == found["model_type"]:
        found["architectures"] = classes if of != "bert" else found["architectures"]
    for key, implied in (("n_inner", 4 * config.hidden_size), ("head_dim", _implied_head(config))):
        if found.get(key) == implied:  # from other sizes; it stays as it stands in the origin
            del found[key]
    for key, names in (("activation_function", GELU_NAMES["tanh"]), ("hidden_act", _gelu_names(config))):
        if key in found and kept.get(key) in names:
            found[key] = kept[key]
    return kept | found


def _implied_head(config: GPTConfig | BERTConfig) -> int | None:
    """The size of a head that follows from the other sizes; None where it does not."""
    divides = config.head_size * config.num_attention_heads == config.hidden_size
    return config.head_size if divides else None


def _gelu_names(config: GPTConfig | BERTConfig) -> tuple[str, ...]:
    return GELU_NAMES[config.gelu] if isinstance(config, BERTConfig) else ()


def _gpt2_keys(config: GPTConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": GELU_NAMES["tanh"][0],
        "vocab_size": config.vocab_size, "n_positions": config.max_position_embeddings, "n_embd": config.hidden_size,
        "n_layer": config.num_layers, "n_head": config.num_attention_heads, "n_inner": config.ffn_size,
        "layer_norm_epsilon": config.norm_epsilon, "resid_pdrop": config.hidden_dropout,
        "embd_pdrop": config.hidden_dropout, "attn_pdrop": config.attention_dropout,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
    }  # fmt: skip


def _bert_keys(config: BERTConfig, head: TaskHead | None) -> dict[str, Any]:
    if config.head_gelu not in (None, config.gelu):
        raise ValueError(
            f"Hugging Face's BERT has one GELU: head_gelu={config.head_gelu!r} must be that of the layers, "
            f"gelu={config.gelu!r}"
        )
    pre = config.norm_placement == "pre"
    end = "ForPreTraining" if config.binary_head else "ForMaskedLM"
    name = f"{'MegatronBert' if pre else 'Bert'}{end if head is None else head.ends}"
    labels: dict[str, Any] = {}
    if head is not None and head.labels:
        labels["id2label"] = {str(number): word for number, word in enumerate(head.labels)}
        labels["label2id"] = {word: number for number, word in enumerate(head.labels)}
    return {
        "architectures": [name], "model_type": "megatron-bert" if pre else "bert",
        "hidden_act": GELU_NAMES[config.gelu][0], "hidden_dropout_prob": config.hidden_dropout,
        "attention_probs_dropout_prob": config.attention_dropout, "layer_norm_eps": config.norm_epsilon,
        "type_vocab_size": config.num_tokentypes, "tie_word_embeddings": True, **_size_keys(config), **labels,
    }  # fmt: skip


def _size_keys(config: GPTConfig | BERTConfig) -> dict[str, Any]:
    return {
        "num_hidden_layers": config.num_layers, "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads, "vocab_size": config.vocab_size,
        "intermediate_size": config.ffn_size, "max_position_embeddings": config.max_position_embeddings,
    }  # fmt: skip


def _llama_keys(config: GPTConfig, model_type: Any) -> dict[str, Any]:
    if config.qkv_bias:
        name, model_type = "Qwen2ForCausalLM", "qwen2"
    elif model_type == "mistral":
        name = "MistralForCausalLM"
    else:
        name, model_type = "LlamaForCausalLM", "llama"
    scaling = config.rope_scaling
    scaled: dict[str, Any] | None = None
    if scaling is not None:
        scaled = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            scaled |= {key: getattr(scaling, key) for key in LLAMA3}
    only: dict[str, dict[str, Any]] = {
        "llama": {"attention_bias": False, "mlp_bias": False}, "mistral": {"sliding_window": None},
        "qwen2": {"use_sliding_window": False},
    }  # fmt: skip
    return {
        "architectures": [name], "model_type": model_type, "hidden_act": "silu",
        "num_key_value_heads": config.query_groups, "head_dim": config.head_size, "rms_norm_eps": config.norm_epsilon,
        "attention_dropout": config.attention_dropout, "rope_theta": config.rotary_base, "rope_scaling": scaled,
        "rope_parameters": {"rope_type": "default"} | (scaled or {}) | {"rope_theta": config.rotary_base},
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights, **only[model_type], **_size_keys(config),
    }  # fmt: skip
