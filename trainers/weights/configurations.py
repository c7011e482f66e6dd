"""``config.json`` of Hugging Face: read into the shape of our model, and written from it.

A table says for each family which key is which of our fields; both directions follow from it. A key that changes what a
model computes is either read or must have the value that our models have; a key that is not known is refused by its
name, unless it is null, false or empty. The names of transformers 4 and of 5 are read and written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from commengine.files.reading import SETTINGS_BYTES, read_json
from commengine.options.ranges import EXPERTS, LAYERS
from tplayers import BERTConfig, GPTConfig, RopeScaling, T5Config, TransformerConfig
from tplayers.mlp import Gelu

from .hugging_face import experts_family, family

CONFIG = "config.json"

#: the classes that are read, and the ``model_type`` of their configurations
ARCHITECTURES = {
    "GPT2LMHeadModel": "gpt2", "BertForPreTraining": "bert", "BertForMaskedLM": "bert",
    "MegatronBertForPreTraining": "megatron-bert", "MegatronBertForMaskedLM": "megatron-bert",
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2",
    "MixtralForCausalLM": "mixtral", "Qwen2MoeForCausalLM": "qwen2_moe", "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe", "T5ForConditionalGeneration": "t5",
}  # fmt: skip

#: the names of GELU there, by ours; the first is written
GELU_NAMES = {"tanh": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "erf": ("gelu", "gelu_python")}

#: keys that do not change what the model computes
_HARMLESS = {
    "_name_or_path", "_model_name_or_path", "architectures", "model_type", "transformers_version", "dtype",
    "torch_dtype", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "decoder_start_token_id",
    "initializer_range", "id2label", "label2id", "num_labels", "problem_type", "return_dict", "output_attentions",
    "output_hidden_states", "chunk_size_feed_forward", "gradient_checkpointing", "classifier_dropout",
    "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
    "reorder_and_upcast_attn", "n_ctx", "task_specific_params", "pretraining_tp", "is_llama_config", "directionality",
    "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers",
    "pooler_size_per_head", "pooler_type", "max_window_layers", "transformers.js_config", "attn_implementation",
    "_attn_implementation", "_attn_implementation_autoset", "temperature",
    "top_k", "top_p", "tokenizer_class", "mlm_probability", "unsloth_version",
    # of the balance loss, which only training has; ours is another one
    "router_aux_loss_coef", "output_router_logits",
}  # fmt: skip


#: the numbers of each kind of scaling of rotary positions, which are our fields, too
_SCALINGS: dict[str, tuple[str, ...]] = {
    "default": (), "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}  # fmt: skip

#: a key's field of our configuration, its type, and its default; `...` where the key must be there
_Field = tuple[str, type, Any]
_SIZES: dict[str, _Field] = {
    "num_hidden_layers": ("num_layers", int, ...), "hidden_size": ("hidden_size", int, ...),
    "num_attention_heads": ("num_attention_heads", int, ...), "vocab_size": ("vocab_size", int, ...),
    "intermediate_size": ("ffn_hidden_size", int, ...),
}  # fmt: skip
_BERT: dict[str, _Field] = _SIZES | {
    "max_position_embeddings": ("max_position_embeddings", int, ...), "layer_norm_eps": ("norm_epsilon", float, 1e-12),
    "hidden_dropout_prob": ("hidden_dropout", float, 0.1),
    "attention_probs_dropout_prob": ("attention_dropout", float, 0.1),
}  # fmt: skip


def _decoder_fields(positions: int, groups: int | None = None) -> dict[str, _Field]:
    return _SIZES | {
        "max_position_embeddings": ("max_position_embeddings", int, positions),
        "num_key_value_heads": ("num_query_groups", int, groups), "head_dim": ("kv_channels", int, None),
        "rms_norm_eps": ("norm_epsilon", float, 1e-6), "attention_dropout": ("attention_dropout", float, 0.0),
    }  # fmt: skip


#: by ``model_type``
_FIELDS: dict[str, dict[str, _Field]] = {
    "gpt2": {
        "n_layer": ("num_layers", int, ...), "n_embd": ("hidden_size", int, ...),
        "n_head": ("num_attention_heads", int, ...), "vocab_size": ("vocab_size", int, ...),
        "n_positions": ("max_position_embeddings", int, ...), "n_inner": ("ffn_hidden_size", int, None),
        "resid_pdrop": ("hidden_dropout", float, 0.1), "attn_pdrop": ("attention_dropout", float, 0.1),
        "layer_norm_epsilon": ("norm_epsilon", float, 1e-5),
    },
    "bert": _BERT, "megatron-bert": _BERT,
    "llama": _decoder_fields(2048), "mistral": _decoder_fields(131072, 8), "qwen2": _decoder_fields(32768),
    "mixtral": _decoder_fields(131072, 8) | {
        "intermediate_size": ("moe_ffn_hidden_size", int, ...), "num_local_experts": ("num_experts", int, 8),
        "num_experts_per_tok": ("moe_router_topk", int, 2), "rms_norm_eps": ("norm_epsilon", float, 1e-5),
    },
    "qwen2_moe": _decoder_fields(32768, 16) | {
        "num_experts": ("num_experts", int, 60), "num_experts_per_tok": ("moe_router_topk", int, 4),
        "moe_intermediate_size": ("moe_ffn_hidden_size", int, 1408),
        "shared_expert_intermediate_size": ("moe_shared_expert_intermediate_size", int, 5632),
    },
    "qwen3": _decoder_fields(32768, 32) | {"head_dim": ("kv_channels", int, 128)},
    "qwen3_moe": _decoder_fields(32768, 4) | {
        "num_experts": ("num_experts", int, 128), "num_experts_per_tok": ("moe_router_topk", int, 8),
        "moe_intermediate_size": ("moe_ffn_hidden_size", int, 768),
    },
    "t5": {
        "num_layers": ("num_layers", int, ...), "d_model": ("hidden_size", int, ...),
        "num_heads": ("num_attention_heads", int, ...), "vocab_size": ("vocab_size", int, ...),
        "d_ff": ("ffn_hidden_size", int, ...), "d_kv": ("kv_channels", int, 64),
        "dropout_rate": ("hidden_dropout", float, 0.1), "layer_norm_epsilon": ("norm_epsilon", float, 1e-6),
        "relative_attention_num_buckets": ("relative_attention_num_buckets", int, 32),
        "relative_attention_max_distance": ("relative_attention_max_distance", int, 128),
    },
}  # fmt: skip
#: the properties that say what follows from other fields where a field is None
_COMPLETE = {
    "ffn_hidden_size": "ffn_size", "moe_ffn_hidden_size": "expert_ffn_size", "num_query_groups": "query_groups",
    "kv_channels": "head_size",
}  # fmt: skip


class _Keys:
    """The keys of a configuration, of which each must be taken, be harmless, or be null, false or empty."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path, self.values = path, values
        self.taken: set[str] = set()

    def either(self, key: str, old: str) -> str:
        """``key``, or its name of before, ``old``, where only that is there. Raises ValueError if they contradict."""
        first, second = self.values.get(key), self.values.get(old)
        if first is not None and second is not None and first != second:
            said = f"contradicts {key} {json.dumps(first)[:100]}; valid: one of them, or the same in both"
            raise self.fault(old, said)
        if first is not None:
            self.taken.add(old)
        return key if second is None or first is not None else old

    def fault(self, key: str, said: str) -> ValueError:
        return ValueError(f"{self.path}: {key} {json.dumps(self.values.get(key))[:100]}: {said}")

    def take(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of ``key``, of type ``kind``; null counts as missing. default: `...` where the key must be there.

        An integer is a size, and positive.
        """
        self.taken.add(key)
        value = self.values.get(key)
        if value is None:
            if default is ...:
                raise ValueError(f"{self.path}: lacks {key}")
            return default
        right = type(value) is kind or (kind is float and type(value) is int)
        if not right:
            raise self.fault(key, f"must be of type {kind.__name__}")
        if kind is int and not 0 < value < 2**31:
            raise self.fault(key, "must be a positive number")
        if kind is float and not abs(value) < 2.0**1000:  # also not a number; an integer may be too large for a float
            raise self.fault(key, "must be a finite number")
        return kind(value)

    def fields(self, model_type: str) -> dict[str, Any]:
        """The fields of our configuration that the keys of a family tell, by name."""
        found: dict[str, Any] = {}
        for key, (name, kind, default) in _FIELDS[model_type].items():
            found[name] = self.take(key, kind, default)
            if name == "num_layers" and not LAYERS.holds(found[name]):  # each of them has tensors with names
                raise self.fault(key, LAYERS.text)
        return found

    def must(self, key: str, *valid: Any) -> None:
        """Refuse ``key`` if it is there with another value than one of ``valid``."""
        self.taken.add(key)
        if self.values.get(key, valid[0]) not in valid:
            words = " or ".join(json.dumps(one) for one in valid)
            raise self.fault(key, f"is not supported, because it changes what the model computes; supported: {words}")

    def finish(self) -> None:
        """Raise ValueError, naming all of them, if there are keys that were not taken and ask for something."""
        unknown = {
            key: value for key, value in self.values.items() if value and key not in self.taken and key not in _HARMLESS
        }
        if unknown:
            shown = ", ".join(f"{key} {json.dumps(value)[:100]}" for key, value in unknown.items())
            raise ValueError(
                f"{self.path}: {shown[:2000]}: not supported, and may change what the model computes; remove from the "
                "file what does not"
            )


def read_keys(path: Path) -> dict[str, Any]:
    """The keys of a JSON object in a file. Raises ValueError that names the file."""
    found = read_json(path, SETTINGS_BYTES * 16)
    if not isinstance(found, dict):
        raise ValueError(f"{path}: want keys with values")
    return found


def read_configuration(folder: Path, *, interleaved: bool = False) -> TransformerConfig:
    """The shape of the model in a folder of Hugging Face, with no biases or heads that only its weights tell.

    interleaved: whether the caller takes a model with ``rope_interleaved``; only one with rotary positions will do.
    Raises ValueError that names the file and the key: also for a model that is none of `ARCHITECTURES`.
    """
    path = folder / CONFIG
    values = read_keys(path)
    keys = _Keys(path, values)
    model_type = _model_type(path, values)
    if interleaved:
        keys.taken.add("rope_interleaved")
    found = _READERS[model_type](keys, keys.fields(model_type))
    if interleaved and found.position_embedding_type != "rope":
        raise ValueError(f"{path}: --rotary-interleaved needs a model with rotary positions; this is a {model_type}")
    keys.finish()
    return found


def other_dropout(folder: Path) -> str:
    """The dropout of a GPT-2's embedding, which our models share with its residuals, if it is another one; or "".

    Of two different ones a model here has that of the residuals. It matters in training only. Raises ValueError.
    """
    values = read_keys(folder / CONFIG)
    if _model_type(folder / CONFIG, values) != "gpt2":
        return ""
    embedding, residuals = (values.get(key, 0.1) for key in ("embd_pdrop", "resid_pdrop"))
    return "" if embedding == residuals else f"embd_pdrop {embedding} and resid_pdrop {residuals}"


def _model_type(path: Path, values: Mapping[str, Any]) -> str:
    known, classes, told = ", ".join(ARCHITECTURES), values.get("architectures"), values.get("model_type")
    if not classes:
        if not isinstance(told, str) or told not in _READERS:
            raise ValueError(f"{path}: model_type {json.dumps(told)[:100]} is not supported; architectures: {known}")
        return told
    found = ARCHITECTURES.get(str(classes[0])) if isinstance(classes, list) else None
    if found is None:
        raise ValueError(f"{path}: architectures {json.dumps(classes)[:100]} is not supported; supported: {known}")
    if told not in (None, found):
        raise ValueError(f"{path}: model_type {json.dumps(told)[:100]} contradicts architecture {classes[0]}: {found}")
    return found


def _gpt2(keys: _Keys, fields: dict[str, Any]) -> GPTConfig:
    keys.must("activation_function", *GELU_NAMES["tanh"])
    keys.must("scale_attn_weights", True)
    keys.take("embd_pdrop", float, 0.1)  # see `other_dropout`
    return GPTConfig(**fields, untie_embeddings_and_output_weights=not keys.take("tie_word_embeddings", bool, True))


def _bert(keys: _Keys, fields: dict[str, Any]) -> BERTConfig:
    keys.must("hidden_act", *GELU_NAMES["erf"], *GELU_NAMES["tanh"])
    keys.must("position_embedding_type", "absolute")
    keys.must("type_vocab_size", 2)
    keys.must("tie_word_embeddings", True)
    gelu: Gelu = "tanh" if keys.values.get("hidden_act") in GELU_NAMES["tanh"] else "erf"
    return BERTConfig(**fields, norm_placement="post", gelu=gelu)


def _mistral(keys: _Keys, fields: dict[str, Any]) -> GPTConfig:
    window = keys.take("sliding_window", int, None if "sliding_window" in keys.values else 4096)
    if window is not None and window < fields["max_position_embeddings"]:
        raise ValueError(f"{keys.path}: sliding_window is {window}, also where it is missing; supported: null")
    return _decoder(keys, fields)


def _qwen2(keys: _Keys, fields: dict[str, Any]) -> GPTConfig:
    keys.taken.add("sliding_window")  # not used without use_sliding_window, which no model here takes
    if any(kind != "full_attention" for kind in keys.take("layer_types", list, [])):
        raise keys.fault("layer_types", 'is not supported; supported: "full_attention" for every layer')
    return replace(_decoder(keys, fields), add_qkv_bias=True)


def _require_experts(keys: _Keys, fields: dict[str, Any], name: str) -> None:
    """Refuse more experts of a token than there are, and more than have names."""
    experts, k = fields["num_experts"], fields["moe_router_topk"]
    if not EXPERTS.holds(experts):
        raise keys.fault(name, EXPERTS.text)
    if k > experts:
        raise keys.fault("num_experts_per_tok", f"must be at most {name} {experts}")


def _mixtral(keys: _Keys, fields: dict[str, Any]) -> GPTConfig:
    _require_experts(keys, fields, "num_local_experts")
    keys.must("router_jitter_noise", 0.0)
    keys.must("sliding_window", None)
    return _decoder(keys, fields, theta=1e6)


def _qwen_experts(keys: _Keys, fields: dict[str, Any], name: str = "num_experts") -> dict[str, Any]:
    """``fields`` with what the keys of Qwen's experts, which all layers must have, tell of the router.

    name: the key that has their number.
    """
    _require_experts(keys, fields, name)
    keys.must("decoder_sparse_step", 1)
    keys.must("mlp_only_layers", [], None)
    return fields | {"moe_router_pre_softmax": not keys.take("norm_topk_prob", bool, False)}


def _qwen2_moe(keys: _Keys, fields: dict[str, Any]) -> GPTConfig:
    keys.must("qkv_bias", True)
    return _qwen2(keys, _qwen_experts(keys, fields) | {"moe_shared_expert_gate": True})


def _qwen3(keys: _Keys, fields: dict[str, Any]) -> GPTConfig:
    keys.must("attention_bias", False)
    return replace(_qwen2(keys, fields), add_qkv_bias=False, qk_layernorm=True)


def _qwen3_moe(keys: _Keys, fields: dict[str, Any]) -> GPTConfig:
    name = keys.either("num_experts", "num_local_experts")  # transformers 5 writes the name that Mixtral has
    fields["num_experts"] = keys.take(name, int, fields["num_experts"])
    return _qwen3(keys, _qwen_experts(keys, fields, name))


#: how a T5's configuration names its feed-forward block, by whether it is gated
_FEED_FORWARD = {False: "relu", True: "gated-gelu"}


def _t5(keys: _Keys, fields: dict[str, Any]) -> T5Config:
    keys.must("num_decoder_layers", fields["num_layers"], None)
    keys.must("feed_forward_proj", *_FEED_FORWARD.values())
    gated = keys.values.get("feed_forward_proj", "relu") == _FEED_FORWARD[True]
    keys.must("is_gated_act", gated)
    keys.must("dense_act_fn", "gelu_new" if gated else "relu")
    keys.must("is_encoder_decoder", True)
    keys.must("is_decoder", False)
    keys.must("decoder_start_token_id", T5Config.decoder_start_token_id)
    keys.must("n_positions", keys.values.get("n_positions", 512))  # positions are relative
    # transformers 4 writes the first key, and reads both from it. Its version 5 always writes that they are tied, and
    # reads from the files whether they are.
    tied = keys.take("tie_word_embeddings", bool, True)
    tied = keys.take("scale_decoder_outputs", bool, tied) and tied
    return T5Config(
        **fields, attention_dropout=fields["hidden_dropout"], swiglu=gated, scale_decoder_outputs=tied,
        untie_embeddings_and_output_weights=not tied,
    )  # fmt: skip


def _decoder(keys: _Keys, fields: dict[str, Any], theta: float = 10000.0) -> GPTConfig:
    """theta: of rotary positions, where the keys do not tell it."""
    keys.must("hidden_act", "silu")
    theta, scaling = _rope(keys, theta)
    heads = fields["num_attention_heads"]
    if fields["num_query_groups"] == heads:
        fields["num_query_groups"] = None
    if (fields["kv_channels"] or 0) * heads == fields["hidden_size"]:
        fields["kv_channels"] = None
    return GPTConfig(
        **fields, hidden_dropout=0.0, normalization="RMSNorm", swiglu=True, position_embedding_type="rope",
        rotary_base=theta, rope_scaling=scaling, add_bias_linear=False,
        untie_embeddings_and_output_weights=not keys.take("tie_word_embeddings", bool, False),
    )  # fmt: skip


def _rope(keys: _Keys, theta: float) -> tuple[float, RopeScaling | None]:
    """The base and the scaling of rotary positions, from transformers 5's keys or from 4's; both must say the same."""
    told_theta = keys.take("rope_theta", float)
    theta = theta if told_theta is None else told_theta
    keys.must("partial_rotary_factor", 1)
    told = [
        _rope_of(_Keys(keys.path, {f"{name}.{key}": value for key, value in values.items()}), f"{name}.", theta)
        for name in ("rope_parameters", "rope_scaling")
        if (values := keys.take(name, dict))
    ]
    if told_theta is not None and any(one != told_theta for one, _ in told):
        raise keys.fault("rope_theta", "contradicts that of rope_parameters or rope_scaling; valid: the same in all")
    if len(told) == 2 and told[0] != told[1]:
        raise keys.fault("rope_scaling", "contradicts rope_parameters; valid: one of them, or the same in both")
    return told[0] if told else (theta, None)


def _rope_of(keys: _Keys, name: str, theta: float) -> tuple[float, RopeScaling | None]:
    """What keys that begin with ``name`` say. theta: the base, where they do not."""
    of_kind = keys.either(f"{name}rope_type", f"{name}type")
    kind = keys.take(of_kind, str, "default")
    if kind not in _SCALINGS:
        raise keys.fault(of_kind, f"is not supported; supported: {', '.join(_SCALINGS)}")
    theta = keys.take(f"{name}rope_theta", float, theta)
    keys.must(f"{name}partial_rotary_factor", 1)
    numbers = [keys.take(f"{name}{key}", int if "max" in key else float, ...) for key in _SCALINGS[kind]]
    keys.finish()
    return theta, RopeScaling(kind, *numbers) if numbers else None


_READERS: dict[str, Callable[[_Keys, dict[str, Any]], TransformerConfig]] = {
    "gpt2": _gpt2, "bert": _bert, "llama": _decoder, "mistral": _mistral, "qwen2": _qwen2,
    "mixtral": _mixtral, "qwen2_moe": _qwen2_moe, "qwen3": _qwen3, "qwen3_moe": _qwen3_moe, "t5": _t5,
    "megatron-bert": lambda keys, fields: replace(_bert(keys, fields), norm_placement="pre"),
}  # fmt: skip


@dataclass(frozen=True)
class TaskHead:
    """The head of a fine-tuned BERT: our name of it, the end of transformers' class, and its labels if it has such."""

    ours: str
    ends: str
    labels: tuple[str, ...] = ()


def written_configuration(
    config: TransformerConfig, dtype: torch.dtype, origin: Mapping[str, Any] | None = None,
    head: TaskHead | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The keys of a ``config.json`` for a model of this shape, whose parameters are of ``dtype``.

    origin: the keys of the ``config.json`` that the model came from. They are kept where they do not say anything else,
    such as tokens with a meaning; and the model stays a Mistral, if it was one. head: of a fine-tuned BERT.

    Raises ValueError as `family` does.
    """
    kept = dict(origin or {})
    kept.pop("rope_interleaved", None)  # a model that was read has its halves apart, whatever the files had
    dtype_name, of, end = str(dtype).removeprefix("torch."), family(config), ""
    if isinstance(config, BERTConfig):
        model_type, more = ("megatron-bert" if config.norm_placement == "pre" else "bert"), _bert_keys(config, head)
        end = "ForMaskedLM" if head is None and not config.binary_head else "ForPreTraining"
    elif isinstance(config, T5Config):
        model_type, more = of, _t5_keys(config)
    elif of == "gpt2":
        model_type = of
        more = {"activation_function": GELU_NAMES["tanh"][0], "embd_pdrop": config.hidden_dropout}
    else:
        model_type = "mistral" if kept.get("model_type") == "mistral" else "llama"
        model_type = "qwen3" if config.qk_layernorm else "qwen2" if config.qkv_bias else model_type
        model_type = model_type if config.experts is None else experts_family(config)
        more = _decoder_keys(config) | _ONLY[model_type]
        if model_type in ("qwen2_moe", "qwen3_moe"):
            more["norm_topk_prob"] = not config.moe_router_pre_softmax
    name = next(name for name, kind in ARCHITECTURES.items() if kind == model_type and name.endswith(end))
    found: dict[str, Any] = {
        "dtype": dtype_name, "torch_dtype": dtype_name, "model_type": model_type,
        "architectures": [name if head is None else name.removesuffix(end) + head.ends],
        "tie_word_embeddings": of == "bert" or not config.untie_embeddings_and_output_weights, **more,
    }  # fmt: skip
    found |= {key: getattr(config, _COMPLETE.get(name, name)) for key, (name, *_) in _FIELDS[model_type].items()}
    if kept.get("model_type") != model_type:
        kept = {}
    elif of != "bert" and (classes := kept.get("architectures")) and ARCHITECTURES.get(classes[0]) == model_type:
        found["architectures"] = classes
    if of == "gpt2" and kept.get("resid_pdrop", 0.1) == config.hidden_dropout and "embd_pdrop" in kept:
        found.pop("embd_pdrop")  # another one than that of the residuals, of a model that was not trained with it
    implied_head = config.head_size if config.head_size * config.num_attention_heads == config.hidden_size else None
    for key, implied in (("n_inner", 4 * config.hidden_size), ("head_dim", implied_head)):
        if found.get(key) == implied:  # from other sizes; it stays as it stands in the origin
            found.pop(key, None)
    gelu = config.gelu if isinstance(config, BERTConfig) else "tanh"
    for key in {"activation_function", "hidden_act"} & found.keys():
        if kept.get(key) in GELU_NAMES[gelu]:
            found[key] = kept[key]
    return kept | found


_OF_QWEN3: dict[str, Any] = {"use_sliding_window": False, "attention_bias": False}
_OF_QWEN_EXPERTS: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": []}
#: constants of the families of decoders
_ONLY: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": False, "mlp_bias": False}, "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False}, "mixtral": {"sliding_window": None},
    "qwen3": _OF_QWEN3, "qwen2_moe": _OF_QWEN_EXPERTS | {"use_sliding_window": False, "qkv_bias": True},
    "qwen3_moe": _OF_QWEN_EXPERTS | _OF_QWEN3,
}  # fmt: skip


def _bert_keys(config: BERTConfig, head: TaskHead | None) -> dict[str, Any]:
    if config.head_gelu not in (None, config.gelu):
        raise ValueError(
            f"Hugging Face's BERT has one GELU: head_gelu={config.head_gelu!r} must be that of the layers, "
            f"gelu={config.gelu!r}"
        )
    if config.num_tokentypes != 2:
        raise ValueError(f"Hugging Face's BERT has two token types, not num_tokentypes={config.num_tokentypes}")
    labels: dict[str, Any] = {}
    if head is not None and head.labels:
        labels["id2label"] = {str(number): word for number, word in enumerate(head.labels)}
        labels["label2id"] = {word: number for number, word in enumerate(head.labels)}
    return {"hidden_act": GELU_NAMES[config.gelu][0], "type_vocab_size": config.num_tokentypes, **labels}


def _t5_keys(config: T5Config) -> dict[str, Any]:
    gated = config.swiglu
    if config.scale_decoder_outputs == config.untie_embeddings_and_output_weights:
        raise ValueError(
            f"Hugging Face has no T5 with scale_decoder_outputs={config.scale_decoder_outputs} and "
            f"untie_embeddings_and_output_weights={config.untie_embeddings_and_output_weights}: one of them is True"
        )
    return {
        "num_decoder_layers": config.num_layers, "feed_forward_proj": _FEED_FORWARD[gated], "is_gated_act": gated,
        "dense_act_fn": "gelu_new" if gated else "relu", "is_encoder_decoder": True,
        "decoder_start_token_id": config.decoder_start_token_id, "pad_token_id": config.decoder_start_token_id,
        "scale_decoder_outputs": config.scale_decoder_outputs,
    }  # fmt: skip


def _decoder_keys(config: TransformerConfig) -> dict[str, Any]:
    scaled: dict[str, Any] | None = None
    if (scaling := config.rope_scaling) is not None:
        scaled = {"rope_type": scaling.kind, **{key: getattr(scaling, key) for key in _SCALINGS[scaling.kind]}}
    return {
        "hidden_act": "silu", "rope_theta": config.rotary_base, "rope_scaling": scaled,
        "rope_parameters": {"rope_type": "default"} | (scaled or {}) | {"rope_theta": config.rotary_base},
    }  # fmt: skip
