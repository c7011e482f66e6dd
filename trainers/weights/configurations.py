"""``config.json`` of Hugging Face, read into the shape of our model.

A key that changes what a model computes is either read or must have the value that our models have; a key that is not
known is refused by its name, unless it is null, false or empty. The names of transformers 4 and of 5 are read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tplayers import BERTConfig, GPTConfig, RopeScaling
from trainers.files.reading import SETTINGS_BYTES, read_text
from trainers.options import LAYERS

CONFIG = "config.json"

#: the classes that are read, and the ``model_type`` of their configurations
ARCHITECTURES = {
    "GPT2LMHeadModel": "gpt2", "BertForPreTraining": "bert", "BertForMaskedLM": "bert",
    "MegatronBertForPreTraining": "megatron-bert", "MegatronBertForMaskedLM": "megatron-bert",
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2",
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
}  # fmt: skip


class _Keys:
    """The keys of a configuration, of which each must be taken, be harmless, or be null, false or empty."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path, self.values = path, values
        self.taken: set[str] = set()

    def fault(self, key: str, said: str) -> ValueError:
        return ValueError(f"{self.path}: {key} {json.dumps(self.values.get(key))[:100]}: {said}")

    def take(self, key: str, kind: type, default: Any = None, *, needed: bool = False) -> Any:
        """The value of ``key``, of type ``kind``; null counts as missing."""
        self.taken.add(key)
        value = self.values.get(key)
        if value is None:
            if needed:
                raise ValueError(f"{self.path}: lacks {key}")
            return default
        right = type(value) is kind or (kind is float and type(value) is int)
        if not right:
            raise self.fault(key, f"must be of type {kind.__name__}")
        if kind is float and not abs(value) < 2.0**1000:  # also not a number; an integer may be too large for a float
            raise self.fault(key, "must be a finite number")
        return kind(value)

    def size(self, key: str, default: int | None = None, *, needed: bool = False) -> Any:
        """A positive integer, or ``default``, as `take` gives it."""
        value = self.take(key, int, default, needed=needed)
        if value is not None and not 0 < value < 2**31:
            raise self.fault(key, "must be a positive number")
        return value

    def layers(self, key: str) -> int:
        """The number of layers, of which each has tensors with names."""
        value: int = self.size(key, needed=True)
        if not LAYERS.holds(value):
            raise self.fault(key, LAYERS.text)
        return value

    def must(self, key: str, *valid: Any) -> None:
        """Refuse ``key`` if it is there with another value than one of ``valid``."""
        self.taken.add(key)
        if key in self.values and not any(
            self.values[key] == one and type(self.values[key]) is type(one) for one in valid
        ):
            words = " or ".join(json.dumps(one) for one in valid)
            raise self.fault(key, f"is not supported, because it changes what the model computes; supported: {words}")

    def finish(self) -> None:
        """Raise ValueError, naming all of them, if there are keys that are not known."""
        unknown = {
            key: value
            for key, value in self.values.items()
            if key not in self.taken and key not in _HARMLESS and value not in (None, False, 0, [], {}, "")
        }
        if unknown:
            shown = ", ".join(f"{key} {json.dumps(value)[:100]}" for key, value in unknown.items())
            raise ValueError(
                f"{self.path}: {shown[:2000]}: not known, and may change what the model computes; remove from the file "
                "what does not"
            )


def read_json(path: Path) -> dict[str, Any]:
    """The keys of a JSON object in a file. Raises ValueError that names the file."""
    text = read_text(path, SETTINGS_BYTES * 16)
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError(f"{path}: nested too deeply") from None
    except ValueError as error:  # not JSON, or an integer of more digits than Python converts
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: want keys with values")
    return found


def read_configuration(folder: Path, *, interleaved: bool = False) -> GPTConfig | BERTConfig:
    """The shape of the model in a folder of Hugging Face, with no biases or heads that only its weights tell.

    interleaved: whether the caller takes a model with ``rope_interleaved``; only one with rotary positions will do.
    Raises ValueError that names the file and the key: also for a model that is none of `ARCHITECTURES`.
    """
    path = folder / CONFIG
    values = read_json(path)
    keys = _Keys(path, values)
    model_type = _model_type(path, values)
    for key in ("quantization_config", "pruned_heads", "is_encoder_decoder", "add_cross_attention", "is_decoder"):
        keys.must(key, None, False, {})
    if "rope_interleaved" in values and not interleaved:
        keys.must("rope_interleaved", False, None)
    keys.taken.add("rope_interleaved")
    found = _READERS[model_type](keys)
    if interleaved and found.position_embedding_type != "rope":
        raise ValueError(f"{path}: --rotary-interleaved needs a model with rotary positions; this is a {model_type}")
    keys.finish()
    return found


def _model_type(path: Path, values: Mapping[str, Any]) -> str:
    classes, told = values.get("architectures") or [], values.get("model_type")
    known, shown = ", ".join(ARCHITECTURES), json.dumps(told)[:100]
    if not isinstance(classes, list) or not classes:
        if not isinstance(told, str) or told not in _READERS:
            raise ValueError(f"{path}: model_type {shown} is not supported; architectures: {known}")
        return told
    first = classes[0]
    if not isinstance(first, str) or first not in ARCHITECTURES:
        raise ValueError(f"{path}: architecture {json.dumps(first)[:100]} is not supported; supported: {known}")
    if told not in (None, ARCHITECTURES[first]):
        raise ValueError(
            f'{path}: model_type {shown} contradicts architecture "{first}"; valid: "{ARCHITECTURES[first]}"'
        )
    return ARCHITECTURES[first]


def _gpt2(keys: _Keys) -> GPTConfig:
    keys.must("activation_function", *GELU_NAMES["tanh"])
    keys.must("scale_attn_weights", True)
    keys.must("scale_attn_by_inverse_layer_idx", False)
    dropout = keys.take("resid_pdrop", float, 0.1)
    if keys.take("embd_pdrop", float, 0.1) != dropout:
        keys.must("embd_pdrop", dropout)
    return GPTConfig(
        num_layers=keys.layers("n_layer"), hidden_size=keys.size("n_embd", needed=True),
        num_attention_heads=keys.size("n_head", needed=True), vocab_size=keys.size("vocab_size", needed=True),
        max_position_embeddings=keys.size("n_positions", needed=True), ffn_hidden_size=keys.size("n_inner"),
        hidden_dropout=dropout, attention_dropout=keys.take("attn_pdrop", float, 0.1),
        norm_epsilon=keys.take("layer_norm_epsilon", float, 1e-5),
        untie_embeddings_and_output_weights=not keys.take("tie_word_embeddings", bool, True),
    )  # fmt: skip


def _bert(keys: _Keys, placement: str) -> BERTConfig:
    keys.must("hidden_act", *GELU_NAMES["erf"], *GELU_NAMES["tanh"])
    keys.must("position_embedding_type", "absolute")
    keys.must("type_vocab_size", 2)
    keys.must("tie_word_embeddings", True)
    gelu = "tanh" if keys.values.get("hidden_act") in GELU_NAMES["tanh"] else "erf"
    return BERTConfig(
        **_sizes(keys), max_position_embeddings=keys.size("max_position_embeddings", needed=True),
        hidden_dropout=keys.take("hidden_dropout_prob", float, 0.1),
        attention_dropout=keys.take("attention_probs_dropout_prob", float, 0.1),
        norm_epsilon=keys.take("layer_norm_eps", float, 1e-12),
        norm_placement=placement, gelu=gelu,  # type: ignore[arg-type]
    )  # fmt: skip


def _sizes(keys: _Keys) -> dict[str, Any]:
    return {
        "num_layers": keys.layers("num_hidden_layers"), "hidden_size": keys.size("hidden_size", needed=True),
        "num_attention_heads": keys.size("num_attention_heads", needed=True),
        "vocab_size": keys.size("vocab_size", needed=True),
        "ffn_hidden_size": keys.size("intermediate_size", needed=True),
    }  # fmt: skip


def _llama(keys: _Keys) -> GPTConfig:
    keys.must("attention_bias", False)
    keys.must("mlp_bias", False)
    return _decoder(keys, keys.size("num_key_value_heads"), positions=2048)


def _mistral(keys: _Keys) -> GPTConfig:
    positions = keys.size("max_position_embeddings", 131072)
    window = keys.take("sliding_window", int, None if "sliding_window" in keys.values else 4096)
    if window is not None and window < positions:
        keys.must("sliding_window", None)
        raise ValueError(f"{keys.path}: lacks sliding_window, which is then {window}; supported: null")
    return _decoder(keys, keys.size("num_key_value_heads", 8), positions=131072)


def _qwen2(keys: _Keys) -> GPTConfig:
    keys.must("use_sliding_window", False)
    keys.taken.add("sliding_window")  # not used then
    kinds = keys.take("layer_types", list, [])
    if any(kind != "full_attention" for kind in kinds):
        raise keys.fault("layer_types", 'is not supported; supported: "full_attention" for every layer')
    return _decoder(keys, keys.size("num_key_value_heads"), positions=32768, qkv_bias=True)


def _decoder(keys: _Keys, groups: int | None, *, positions: int, qkv_bias: bool = False) -> GPTConfig:
    keys.must("hidden_act", "silu")
    theta, scaling = _rope(keys)
    sizes = _sizes(keys)
    head = keys.size("head_dim")
    heads = sizes["num_attention_heads"]
    return GPTConfig(
        **sizes, max_position_embeddings=keys.size("max_position_embeddings", positions), hidden_dropout=0.0,
        attention_dropout=keys.take("attention_dropout", float, 0.0),
        norm_epsilon=keys.take("rms_norm_eps", float, 1e-6), normalization="RMSNorm", swiglu=True,
        position_embedding_type="rope", rotary_base=theta, rope_scaling=scaling,
        num_query_groups=None if groups == heads else groups,
        kv_channels=None if head is None or head * heads == sizes["hidden_size"] else head,
        add_bias_linear=False, add_qkv_bias=qkv_bias,
        untie_embeddings_and_output_weights=not keys.take("tie_word_embeddings", bool, False),
    )  # fmt: skip


def _rope(keys: _Keys) -> tuple[float, RopeScaling | None]:
    """The base and the scaling of rotary positions, from transformers 5's keys or from 4's; both must say the same."""
    theta = keys.take("rope_theta", float, 10000.0)
    keys.must("partial_rotary_factor", 1, 1.0)
    told = [
        _rope_of(keys, name, values, theta)
        for name in ("rope_parameters", "rope_scaling")
        if (values := keys.take(name, dict))
    ]
    if len(told) == 2 and told[0] != told[1]:
        raise keys.fault("rope_scaling", "contradicts rope_parameters; valid: one of them, or the same in both")
    return told[0] if told else (theta, None)


def _rope_of(keys: _Keys, name: str, told: dict[str, Any], theta: float) -> tuple[float, RopeScaling | None]:
    """What key ``name`` says: ``told``. theta: the base, where that is no part of it."""
    values = dict(told)
    kind = values.pop("rope_type", None) or values.get("type") or "default"
    values.pop("type", None)
    inner = _Keys(keys.path, {f"{name}.{key}": value for key, value in values.items()})
    theta = inner.take(f"{name}.rope_theta", float, theta)
    inner.must(f"{name}.partial_rotary_factor", 1, 1.0)
    scaling = None
    if kind == "linear":
        scaling = RopeScaling("linear", inner.take(f"{name}.factor", float, needed=True))
    elif kind == "llama3":
        factor, low, high = (inner.take(f"{name}.{key}", float, needed=True) for key in ("factor", *LLAMA3[:-1]))
        scaling = RopeScaling("llama3", factor, low, high, inner.size(f"{name}.{LLAMA3[-1]}", needed=True))
    elif kind != "default":
        known = '"default", "linear", "llama3"'
        raise ValueError(f"{keys.path}: {name}.rope_type {json.dumps(kind)[:100]} is not supported; supported: {known}")
    inner.finish()
    return theta, scaling


#: the keys of Llama 3.1's scaling besides its factor, which are our fields, too
LLAMA3 = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

_READERS: dict[str, Callable[[_Keys], GPTConfig | BERTConfig]] = {
    "gpt2": _gpt2, "bert": lambda keys: _bert(keys, "post"), "megatron-bert": lambda keys: _bert(keys, "pre"),
    "llama": _llama, "mistral": _mistral, "qwen2": _qwen2,
}  # fmt: skip
