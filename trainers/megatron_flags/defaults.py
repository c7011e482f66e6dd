"""Defaults behind Megatron-LM's names that differ from Megatron-LM's, and change the numbers of a run."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

from commengine.options.declared import flag_of

Value = Callable[[str], Any]


@dataclass(frozen=True)
class Difference:
    """One default. name: of the field. here, there: the defaults, in words. holds: whether it matters to a run."""

    name: str
    here: str
    there: str
    commands: tuple[str, ...] = ("gpt", "bert", "finetune")
    holds: Callable[[Value], bool] = lambda value: True

    @property
    def flag(self) -> str:
        """The flag of the field."""
        return flag_of(self.name)


_PRETRAIN, _GPT, _BERT = ("gpt", "bert"), ("gpt",), ("bert",)
#: those that matter; sizes and rates that Megatron-LM wants given, such as --lr and --num-layers, have defaults here
DIFFERENCES = (
    Difference("lr_decay_style", "cosine", "linear", _PRETRAIN),
    Difference(
        "min_lr", "1e-5, or lr if that is less", "0", _PRETRAIN, lambda value: value("lr_decay_style") != "constant"
    ),
    Difference("lr_warmup_fraction", "0.06", "0", ("finetune",), lambda value: value("lr_warmup_iters") is None),
    Difference("make_vocab_size_divisible_by", "1024", "128 times the tensor-parallel size", _PRETRAIN),
    Difference(
        "initial_loss_scale", "2**16", "2**32", holds=lambda value: value("fp16") and value("loss_scale") is None
    ),
    Difference("grad_reduce_in_fp32", "off", "on with --bf16", holds=lambda value: value("bf16")),
    Difference("gelu", "erf in the layers", "tanh, unless --no-bias-gelu-fusion", _BERT),
    Difference(
        "swiglu", "off, GELU by tanh", "off, GELU by the error function with --disable-bias-linear", _GPT,
        lambda value: value("disable_bias_linear") and not value("swiglu"),
    ),
    Difference(
        "moe_router_load_balancing_type", "seq_aux_loss", "aux_loss", _GPT,
        lambda value: bool(value("moe_aux_loss_coeff")) and value("micro_batch_size") > 1,
    ),
)  # fmt: skip


def remark(command: str, given: Container[str], value: Value) -> str:
    """What a run of ``command`` says at its start of defaults that are not Megatron-LM's; "" for nothing.

    given: the fields that it has been given. value: of any field, by its name.
    """
    found = [one for one in DIFFERENCES if command in one.commands and one.name not in given and one.holds(value)]
    predicts = value("predict") is not None or value("ensemble") is not None
    if not found or (predicts and value("save") is None):  # fine-tuning may only predict
        return ""
    said = ", ".join(f"{one.flag} {one.here} (there {one.there})" for one in found)
    return f"defaults that are not Megatron-LM's: {said}"
