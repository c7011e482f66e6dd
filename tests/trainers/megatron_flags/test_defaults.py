"""Defaults behind Megatron-LM's names: those that differ from Megatron-LM's are known, and are said."""

from dataclasses import fields
from typing import Any

import pytest

from tests.trainers.megatron_flags.test_table import KINDS, THEIRS
from trainers.megatron_flags.answers import COMMANDS
from trainers.megatron_flags.defaults import DIFFERENCES
from trainers.tasks.commands import PRETRAIN_BERT, PRETRAIN_GPT

#: None here, which comes to Megatron-LM's default or to nothing that changes a number
COMES_TO_THE_SAME = {"min_loss_scale", "num_query_groups", "cp_comm_type", "lr_warmup_iters"}
#: of a command that Megatron-LM has not got in this form: fine-tuning's own flags
OF_FINETUNE = {
    "lr",
    "eval_iters",
    "keep_last",
    "epochs",
    "eval_interval",
    "make_vocab_size_divisible_by",
    "seq_length",
    "norm_epsilon",
}
#: Megatron-LM wants these given (None there), and the oldest version's default is another
GIVEN_THERE = {
    "lr", "train_iters", "num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size",
    "max_position_embeddings", "micro_batch_size", "eval_iters", "hidden_dropout", "split",
}  # fmt: skip


def different(kind: Any, command: str) -> list[str]:
    """The fields with another default than that of the same flag in the newest version that has one."""
    found = []
    for item in fields(kind):
        _, defaults = THEIRS.get(f"--{item.name.replace('_', '-')}", ("", []))
        if not defaults or isinstance(item.default, bool):
            continue
        try:
            same = float(item.default) == float(defaults[-1])
        except (TypeError, ValueError):
            same = str(item.default) == defaults[-1]
        known = COMES_TO_THE_SAME | GIVEN_THERE | (OF_FINETUNE if command == "finetune" else set())
        if not same and item.name not in known:
            found.append(item.name)
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_every_default_that_differs_is_said(command: str) -> None:
    said = {one.name for one in DIFFERENCES if command in one.commands}
    assert set(different(KINDS[command].settings, command)) <= said
    assert said - {"moe_router_load_balancing_type"} <= {item.name for item in fields(KINDS[command].settings)}


def lines(kind: Any, *words: str) -> str:
    told: list[str] = []
    kind.parse([*words, "--mock-data", "--vocab-size", "9"], told.append)
    return "\n".join(told)


def test_a_run_says_the_defaults_that_it_was_not_given() -> None:
    said = lines(PRETRAIN_GPT)
    assert said.startswith("defaults that are not Megatron-LM's: ") and "\n" not in said
    assert "--lr-decay-style cosine (there linear)" in said and "--min-lr" in said
    assert "--make-vocab-size-divisible-by 1024 (there 128 times" in said
    assert not any(flag in said for flag in ("--initial-loss-scale", "--grad-reduce", "--swiglu", "--moe", "--gelu"))
    rest = ["--lr-decay-style", "linear", "--min-lr", "0", "--make-vocab-size-divisible-by", "128"]
    assert lines(PRETRAIN_GPT, *rest) == ""
    assert "--initial-loss-scale 2**16 (there 2**32)" in lines(PRETRAIN_GPT, *rest, "--fp16")
    assert lines(PRETRAIN_GPT, *rest, "--fp16", "--loss-scale", "128") == ""
    assert "--grad-reduce-in-fp32 off (there on" in lines(PRETRAIN_GPT, *rest, "--bf16")
    assert "defaults" not in lines(PRETRAIN_GPT, *rest, "--bf16", "--accumulate-allreduce-grads-in-fp32")
    assert "--swiglu off, GELU by tanh" in lines(PRETRAIN_GPT, *rest, "--disable-bias-linear")
    assert lines(PRETRAIN_GPT, *rest, "--disable-bias-linear", "--swiglu") == ""
    assert "--gelu erf" in lines(PRETRAIN_BERT, *rest)
    balanced = [*rest, "--moe-aux-loss-coeff", "0.1", "--micro-batch-size"]
    assert "--moe-router-load-balancing-type seq_aux_loss (there aux_loss)" in lines(PRETRAIN_GPT, *balanced, "2")
    assert lines(PRETRAIN_GPT, *balanced, "1") == ""
    assert "defaults" not in lines(PRETRAIN_GPT, *balanced, "2", "--moe-router-load-balancing-type", "seq_aux_loss")
