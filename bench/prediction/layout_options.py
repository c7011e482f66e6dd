"""The layout of a prediction, from options: how the ranks are split, the batch, and the dropout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bench.prediction.layout import Layout
from trainers import presets

#: the options of dropout, and their default, that of pretrain_gpt
DROPOUT = ("hidden_dropout", "attention_dropout")
DROPOUT_DEFAULT = 0.1


def batch_of(arguments: Any) -> int | None:
    """The global batch that is asked for, or else the preset's; None if there is neither."""
    if arguments.global_batch_size is None and arguments.preset:
        batch: int = presets.find(arguments.preset).recipe["global_batch_size"]
        return batch
    asked: int | None = arguments.global_batch_size
    return asked


def dropout_of(arguments: Any) -> Layout:
    """A layout with the dropout that is asked for: by default pretrain_gpt's."""
    given = [getattr(arguments, name) for name in DROPOUT]
    hidden, attention = (DROPOUT_DEFAULT if value is None else value for value in given)
    return Layout(
        hidden_dropout=hidden > 0, attention_dropout=attention > 0,
        position_mask=arguments.attention_dropout_mask != "fused",
    )  # fmt: skip


def _recompute_of(arguments: Any) -> str:
    """The recomputation of training without the option: the preset's, or none."""
    recipe = presets.find(arguments.preset).recipe if arguments.preset else {}
    return recipe.get("recompute_granularity") or "none"


def layout_of(arguments: Any) -> Layout:
    """The layout that --gpus and the sizes give. Raises ValueError if one number does not divide another."""
    tensor = presets.find(arguments.preset).tensor if arguments.preset else 1
    if arguments.tensor_model_parallel_size is not None:
        tensor = arguments.tensor_model_parallel_size
    micro = 8 if arguments.micro_batch_size is None else arguments.micro_batch_size
    gpus = tensor if arguments.gpus is None else arguments.gpus
    if gpus % tensor:
        raise ValueError(f"--tensor-model-parallel-size {tensor} does not divide --gpus {gpus}")
    data = gpus // tensor
    batch = batch_of(arguments) or data * micro
    if batch % (data * micro):
        raise ValueError(
            f"--global-batch-size {batch} is no multiple of --micro-batch-size {micro} x {data} data-parallel replicas"
        )
    return replace(
        dropout_of(arguments),
        tensor=tensor,
        data=data,
        micro_batch=micro,
        micro_batches=batch // (data * micro),
        recompute=arguments.recompute_granularity or _recompute_of(arguments),
        sequence_parallel=bool(arguments.sequence_parallel) and tensor > 1,
        zero1=bool(arguments.use_distributed_optimizer),
    )
