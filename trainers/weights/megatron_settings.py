"""The contents of a file of Megatron-LM's checkpoints, and the shape of the model that they tell."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from commengine.files.reading import InputFileError
from tplayers import BERTConfig, GPTConfig
from tplayers.mlp import Gelu

#: the first part of the names of the tensors that all models have
TOP = "language_model"
#: the sizes of the vocabularies of Megatron-LM's tokenizers
_VOCABULARIES = {"GPT2BPETokenizer": 50257, "BertWordPieceLowerCase": 30522, "BertWordPieceCase": 28996}
#: settings that change the function of the model, and the values with which ours is the same. A setting that a version
#: of Megatron-LM did not have is absent; then it has the first of these values.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "pipeline_model_parallel_size": (1,), "apply_residual_connection_post_layernorm": (False,),
    "apply_layernorm_1p": (False,), "normalization": ("LayerNorm",), "swiglu": (False,), "squared_relu": (False,),
    "position_embedding_type": ("learned_absolute",), "add_position_embedding": (True,),
    "use_rotary_position_embeddings": (False,), "group_query_attention": (False,), "qk_layernorm": (False,),
    "multi_latent_attention": (False,), "untie_embeddings_and_output_weights": (False,), "num_experts": (None,),
    "add_bias_linear": (True,), "window_size": (None,), "softmax_scale": (None,), "softmax_type": ("vanilla",),
    "attention_output_gate": (False,), "quick_geglu": (False,), "quick_gelu": (False,), "parallel_residual": (False,),
    "use_alibi_position_embeddings": (False,),
}  # fmt: skip


#: settings of the function whose values are taken
_READ = (
    "num_attention_heads", "num_layers", "hidden_size", "ffn_hidden_size", "max_position_embeddings", "kv_channels",
    "layernorm_epsilon", "norm_epsilon", "bias_gelu_fusion", "openai_gelu", "tokenizer_type", "vocab_size",
    "make_vocab_size_divisible_by", "tensor_model_parallel_size", "model_parallel_size",
)  # fmt: skip


@dataclass(frozen=True)
class MegatronContents:
    """What one file holds.

    tensors: by their paths in the file's ``model``, joined by dots, as version 0 names them. settings: ``args``, the
    run's; empty where an old release has none. version: of the format, 0 to 3. iteration: None where it is not there.
    """

    file: Path
    tensors: Mapping[str, Tensor]
    settings: Mapping[str, Any]
    version: int
    iteration: int | None

    @classmethod
    def of(cls, file: Path, loaded: Any) -> MegatronContents:
        """The contents of ``file``. loaded: the object that it holds. Raises InputFileError."""
        if not isinstance(loaded, dict) or not isinstance(loaded.get("model"), dict):
            there = f"the keys {list(loaded)}"[:200] if isinstance(loaded, dict) else f"a {type(loaded).__name__}"
            raise InputFileError(f"{file}: no checkpoint of Megatron-LM: it has {there}; needed: model")
        version = loaded.get("checkpoint_version", 0)
        if not isinstance(version, int | float) or version not in (0, 1, 2, 3):
            raise InputFileError(f"{file}: checkpoint_version={str(version)[:40]!r}; valid: 0, 1, 2, 3")
        arguments, iteration = loaded.get("args"), loaded.get("iteration")
        found = vars(arguments) if isinstance(arguments, argparse.Namespace) else {}
        settings = {name: value for name, value in found.items() if isinstance(value, str | int | float)}
        settings |= {name: str(value)[:80] for name, value in found.items() if isinstance(value, list | tuple)}
        tensors: dict[str, Tensor] = {}
        try:
            for name, tensor in _flat(loaded["model"]):
                if name in tensors:
                    raise InputFileError(f"{file}: has {name} twice, under names of two releases")
                if tensor.is_nested:  # its shape cannot be asked for
                    raise InputFileError(f"{file}: {name[:100]} is a nested tensor; needed: a dense one")
                tensors[name] = tensor
        except RecursionError:
            raise InputFileError(f"{file}: damaged: the dicts of its model lie within each other without end") from None
        return cls(file, tensors, settings, int(version), iteration if isinstance(iteration, int) else None)

    def setting(self, name: str, default: Any) -> Any:
        """The setting, or ``default`` where it is absent or None."""
        found = self.settings.get(name)
        return default if found is None else found

    @property
    def common(self) -> dict[str, Any]:
        """What all files of a checkpoint have in common, with the settings that the model's function depends on."""
        settings = {name: self.settings.get(name) for name in (*_SUPPORTED, *_READ)}
        return {"checkpoint_version": self.version, "iteration": self.iteration, **settings}

    def wrong(self, message: str) -> InputFileError:
        """The error of this file."""
        return InputFileError(f"{self.file}: {message}")


def _flat(nested: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """(Name, tensor) of all tensors in dicts within each other, without those of TransformerEngine's state."""
    for key, value in nested.items():
        name = f"{prefix}{key}"
        if isinstance(value, Tensor):
            if not name.endswith("_extra_state"):
                yield _as_version_0(name), value
        elif isinstance(value, dict):
            yield from _flat(value, f"{name}.")


def _as_version_0(name: str) -> str:
    """The name that a tensor had first; later releases call the transformer an encoder, and its attention self."""
    return name.replace(f"{TOP}.encoder.", f"{TOP}.transformer.").replace(".self_attention.", ".attention.")


def model_config(
    contents: MegatronContents, ranks: int, vocab_size: int | None, num_attention_heads: int | None
) -> GPTConfig | BERTConfig:
    """The shape of a model of ours with the same function. Raises InputFileError.

    The tensors tell it and, where they do not, the settings. A BERT without token types has two of ours.

    ranks: the number of files. vocab_size, num_attention_heads: as for `trainers.weights.megatron.open_megatron`.
    """
    setting, tensors = contents.setting, contents.tensors
    for name, valid in _SUPPORTED.items():
        value = setting(name, valid[0])
        if isinstance(value, str | int | float | bool) and value not in valid:
            raise contents.wrong(f"{name}={value!r} changes the model's function; supported: {valid[0]!r}")
    rows, hidden = _matrix(contents, f"{TOP}.embedding.word_embeddings.weight")
    positions, _ = _matrix(contents, f"{TOP}.embedding.position_embeddings.weight")
    up, _ = _matrix(contents, f"{TOP}.transformer.layers.0.mlp.dense_h_to_4h.weight")
    numbers = (re.match(rf"{TOP}\.transformer\.layers\.(\d+)\.", name) for name in tensors)
    found: dict[str, Any] = {
        "num_layers": 1 + max(int(number[1]) for number in numbers if number), "hidden_size": hidden,
        "ffn_hidden_size": up * ranks, "num_attention_heads": _heads(contents, ranks, hidden, num_attention_heads),
        "max_position_embeddings": positions, "vocab_size": _vocabulary(contents, rows * ranks, ranks, vocab_size),
    }  # fmt: skip
    if found["num_layers"] > len(tensors):
        raise contents.wrong(f"a tensor is of layer {found['num_layers']}, and there are {len(tensors)} tensors")
    for name in ("num_layers", "hidden_size", "ffn_hidden_size", "max_position_embeddings"):
        if (said := setting(name, found[name])) != found[name]:
            raise contents.wrong(f"{name} is {said} in the settings (args), and {found[name]} by the tensors")
    old, new = setting("layernorm_epsilon", None), setting("norm_epsilon", None)  # the name until 2023, and today's
    if None not in (old, new) and old != new:
        raise contents.wrong(f"layernorm_epsilon={old!r} contradicts norm_epsilon={new!r}")
    numbers_of = {"norm_epsilon": 1e-5 if old is None else old, "hidden_dropout": 0.1, "attention_dropout": 0.1}
    for name, default in numbers_of.items():
        found[name] = setting(name, default)
        if not isinstance(found[name], float | int) or not 0 <= found[name] < 1:
            raise contents.wrong(f"{name}={str(found[name])[:80]!r}; needed: a number from 0 to 1")
    # The fused kernel of bias and GELU computes the form by tanh. The head of masked tokens does not use this kernel.
    openai = setting("openai_gelu", False)
    gelu: Gelu = "tanh" if openai or setting("bias_gelu_fusion", True) else "erf"
    if "lm_head.bias" in tensors:
        head: Gelu = "tanh" if openai else "erf"
        return BERTConfig(**found, gelu=gelu, head_gelu=head, binary_head="binary_head.weight" in tensors)
    if gelu != "tanh":
        raise contents.wrong("bias_gelu_fusion=False is GELU by the error function; supported in a GPT: tanh alone")
    return GPTConfig(**found)


def _matrix(contents: MegatronContents, name: str) -> tuple[int, int]:
    """The sizes of the matrix ``name``. Raises InputFileError if there is none."""
    found = contents.tensors.get(name)
    if found is None or found.dim() != 2 or not found.numel():
        said = "lacks" if found is None else f"has {list(found.shape)}, not a matrix, as"
        raise contents.wrong(f"{said} {name}, which each GPT and BERT of Megatron-LM has")
    return found.shape[0], found.shape[1]


def _heads(contents: MegatronContents, ranks: int, hidden: int, asked: int | None) -> int:
    """The number of attention heads. Raises InputFileError if it is not known, or does not fit."""
    heads = contents.setting("num_attention_heads", asked)
    if heads is None:
        raise contents.wrong("has no settings (args): give the number of its attention heads, --num-attention-heads")
    if asked not in (None, heads):
        raise contents.wrong(f"has {heads} attention heads; {asked} were asked for")
    if not _natural(heads) or hidden % heads or heads % ranks:
        raise contents.wrong(
            f"{heads!r} attention heads do not divide hidden_size={hidden}, or {ranks} files do not divide them"
        )
    if contents.setting("kv_channels", hidden // heads) != hidden // heads:
        raise contents.wrong(f"kv_channels={contents.setting('kv_channels', 0)!r}; supported: {hidden // heads}")
    return int(heads)


def _vocabulary(contents: MegatronContents, padded: int, ranks: int, asked: int | None) -> int:
    """The size of the vocabulary without padding. Raises InputFileError if it is not known, or does not fit."""
    tokenizer, said = str(contents.setting("tokenizer_type", None)), contents.setting("vocab_size", None)
    known: Any = _VOCABULARIES.get(tokenizer) if said is None else said
    if tokenizer == "NullTokenizer" and _natural(known):
        known += 1  # the end of a document
    if asked is not None:
        if not 0 < asked <= padded:
            raise contents.wrong(f"a vocabulary of {asked} was asked for; it has {padded} tokens with the padding")
        # A tokenizer's type says less: its vocabulary may be another of the same name.
        if said is not None and asked != known:
            raise contents.wrong(f"a vocabulary of {asked} was asked for; its settings (args) say {known}")
        return asked
    multiple = contents.setting("make_vocab_size_divisible_by", 128)
    if _natural(known) and _natural(multiple) and -(-known // (multiple * ranks)) * multiple * ranks == padded:
        return int(known)
    raise contents.wrong(f"has {padded} tokens with the padding: give the number without it, --vocab-size")


def _natural(value: Any) -> bool:
    return isinstance(value, int) and value > 0
