"""What flags of Megatron-LM come to that depend on other settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from commengine import UsageError

Value = Callable[[str], Any]
Words = Sequence[str]

#: the names of GPT-2's files end in these
VOCABULARY, MERGES = "vocab.json", "merges.txt"


def _number(word: str, kind: Callable[[str], Any], text: str) -> Any:
    try:
        found = kind(word)
    except (ValueError, ZeroDivisionError, OverflowError):
        found = -1
    if not 0 <= found < 2**63:
        raise UsageError(text)
    return found


def _exact(word: str) -> Fraction:
    """The decimal number; a float is asked first, because an exponent of nine digits would take hours."""
    return Fraction(word) if 0 < float(word) < 1e300 else Fraction(0 if float(word) == 0 else -1)


def _steps(words: Words, value: Value, flag: str) -> int:
    """The whole steps that so many samples make, at least one."""
    samples, batch = _number(words[0], int, "must be a number of samples"), value("global_batch_size")
    if batch is None:
        raise UsageError(f"is counted in steps here: give --global-batch-size, or {flag}")
    if samples < batch:
        raise UsageError(f"is less than a step of --global-batch-size {batch}")
    return int(samples // batch)


def train_samples(words: Words, value: Value) -> Mapping[str, Any]:
    """Megatron-LM, too, leaves out the samples that do not make a whole step."""
    return {"train_iters": _steps(words, value, "--train-iters")}


def decay_samples(words: Words, value: Value) -> Mapping[str, Any]:
    """The step at which the decay ends."""
    return {"lr_decay_iters": _steps(words, value, "--lr-decay-iters")}


def warmup_samples(words: Words, value: Value) -> Mapping[str, Any]:
    """The steps of the warm-up."""
    return {"lr_warmup_iters": 0 if words[0] == "0" else _steps(words, value, "--lr-warmup-iters")}


def warmup_fraction(words: Words, value: Value) -> Mapping[str, Any]:
    """A share of the steps of the decay, exactly: the decimal number that was written."""
    share = _number(words[0], _exact, "must be a share of the steps, such as 0.01")
    steps = value("lr_decay_iters") or value("train_iters")
    if share >= 1:
        raise UsageError("must be below 1")
    return {"lr_warmup_iters": int(share * steps)}


def virtual_stages(words: Words, value: Value) -> Mapping[str, Any]:
    """The layers of a stretch, so that each stage has so many stretches."""
    chunks = _number(words[0], int, "must be a number of stretches")
    layers, stages = value("num_layers"), value("pipeline_model_parallel_size")
    if chunks == 1:
        return {}
    if not chunks or layers % (stages * chunks):
        raise UsageError(f"does not cut --num-layers {layers} evenly over {stages} stages")
    return {"num_layers_per_virtual_pipeline_stage": layers // (stages * chunks)}


def gpt2_files(words: Words, value: Value) -> Mapping[str, Any]:
    """``--vocab-file X-vocab.json``: the merges have their own flag, and stand in X-merges.txt."""
    path = Path(words[0])
    if not path.name.endswith(VOCABULARY):
        raise UsageError(
            f"a vocabulary of GPT-2 is in NAME{VOCABULARY} here, its merges in NAME{MERGES} beside it; any other "
            "tokenizer is --tokenizer-model tokenizer.json"
        )
    asked = value("tokenizer_model")
    if asked not in (None, words[0]):
        raise UsageError(f"--tokenizer-model {asked} names another vocabulary; leave one of them out")
    return {"tokenizer_model": words[0]}


def merges(words: Words, value: Value) -> Mapping[str, Any]:
    """Beside the vocabulary, with which it is read."""
    path = Path(words[0])
    if not path.name.endswith(MERGES):
        raise UsageError(f"the merges of NAME{VOCABULARY} are in NAME{MERGES} here")
    vocabulary = path.with_name(path.name.removesuffix(MERGES) + VOCABULARY)
    asked = value("tokenizer_model")
    if asked is not None and Path(asked) != vocabulary:
        raise UsageError(f"belongs to {vocabulary}, and the vocabulary is {asked}; put them beside each other")
    return {"tokenizer_model": str(vocabulary)}


def tokenizer_type(words: Words, value: Value) -> Mapping[str, Any]:
    """Which files a tokenizer has there; here a file says by itself what it is."""
    kind = words[0]
    if kind == "NullTokenizer":
        if value("vocab_size") is None:
            raise UsageError("needs --vocab-size V")
        return {}
    if kind in ("GPT2BPETokenizer", "HuggingFaceTokenizer", "BertWordPieceLowerCase"):
        return {}
    if kind == "BertWordPieceCase":
        raise UsageError(
            'a vocab.txt is of lower case here unless the tokenizer_config.json beside it says {"do_lower_case": '
            "false}; then leave this flag out"
        )
    raise UsageError(
        "not here; give the same vocabulary as --tokenizer-model tokenizer.json, as Hugging Face has it, or only its "
        "--vocab-size V; valid: GPT2BPETokenizer, HuggingFaceTokenizer, BertWordPieceLowerCase, NullTokenizer"
    )


def balance(words: Words, value: Value) -> Mapping[str, Any]:
    """Of the kinds of balance only the one within each sequence is here. aux_loss takes a micro-batch for one."""
    coefficient = value("moe_aux_loss_coeff")
    alone = value("micro_batch_size") == 1 and value("context_parallel_size") == 1
    kinds = list(words)
    if kinds == ["none"] and coefficient:
        raise UsageError("with --moe-aux-loss-coeff there is a loss; leave that out")
    if kinds in (["seq_aux_loss"], ["none"]) or (kinds == ["aux_loss"] and (alone or not coefficient)):
        return {}
    raise UsageError(
        "not here; valid: seq_aux_loss, which balances the experts within each sequence as --moe-aux-loss-coeff does "
        "here, none, and aux_loss with --micro-batch-size 1 or without --moe-aux-loss-coeff"
    )


def rotary(words: Words, value: Value) -> Mapping[str, Any]:
    """The old name of --position-embedding-type rope."""
    del words, value
    return {"position_embedding_type": "rope"}


def no_positions(words: Words, value: Value) -> Mapping[str, Any]:
    """A model with rotary positions has no table of positions; one with neither is not here."""
    del words
    if value("position_embedding_type") != "rope":
        raise UsageError("a model without positions is not here; use --position-embedding-type rope")
    return {}


def erf_gelu(words: Words, value: Value) -> Mapping[str, Any]:
    """Megatron-LM's fused GELU is the form by tanh, the other one that by the error function."""
    del words
    if not value("swiglu"):
        raise UsageError(
            "GELU is then the form by the error function there, and a GPT has the form by tanh here (they differ by up "
            "to 4.7e-4); leave it out, or use --swiglu"
        )
    return {}


def tanh_gelu(words: Words, value: Value) -> Mapping[str, Any]:
    """BERT's two GELUs."""
    del words, value
    return {"gelu": "tanh", "head_gelu": "tanh"}


def bf16_sums(words: Words, value: Value) -> Mapping[str, Any]:
    """What --bf16 does here without --grad-reduce-in-fp32."""
    del words
    if not value("bf16") or value("grad_reduce_in_fp32"):
        raise UsageError("needs --bf16, and excludes --grad-reduce-in-fp32")
    return {}


def fp32_residuals(words: Words, value: Value) -> Mapping[str, Any]:
    """Nothing to change in an fp32 run."""
    del words
    if value("bf16") or value("fp16"):
        raise UsageError("not here: residuals have the dtype of the activations; leave out --bf16 and --fp16, or this")
    return {}


def constant_decay(words: Words, value: Value) -> Mapping[str, Any]:
    """A weight decay that stays as it is."""
    decay = value("weight_decay")
    if _number(words[0], float, "must be a number") != decay:
        raise UsageError(f"the weight decay is constant here; valid: that of --weight-decay {decay}")
    return {}


def loads_nothing(write: str) -> Callable[[Words, Value], Mapping[str, Any]]:
    """Flags that matter only where a checkpoint is loaded, and are refused there. write: what to do instead."""

    def work(words: Words, value: Value) -> Mapping[str, Any]:
        del words
        load = value("load")
        if load is not None and (":" in load or Path(load).name.startswith("iter_") or [*Path(load).glob("iter_*")]):
            raise UsageError(f"--load {load} has a checkpoint; {write}")
        return {}

    return work


def retained(words: Words, value: Value) -> Mapping[str, Any]:
    """Megatron-LM removes the checkpoint before, unless its step is a multiple of this."""
    del value
    return {"keep_last": 1, "keep_every": _number(words[0], int, "must be a number of steps")}
