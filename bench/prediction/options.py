"""The model and the layout of a prediction, from options: those of pretrain_gpt, a preset, known models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bench.prediction.flags import DEFAULTS, FAMILY, LAYOUT, MICRO_BATCH, SHAPE
from bench.prediction.layout import MODELS
from commengine.options.declared import as_flags, flag_of
from commengine.options.ranges import divisors
from tplayers.formulas import StepLayout, TransformerShape
from trainers import presets
from trainers.settings.commands import GPTSettings
from trainers.settings.layout import METHODS
from trainers.tasks.kinds import task_of


def shape_of(arguments: Any) -> TransformerShape:
    """The model that --preset or --model and the sizes name. Raises ValueError if a size is missing or wrong."""
    given = [getattr(arguments, name) for name in SHAPE]
    model, known = "gpt", None
    if arguments.preset or arguments.model:
        known = presets.find(arguments.preset).shape() if arguments.preset else MODELS[arguments.model]
        model = known.model
        defaults = (known.layers, known.hidden, known.heads, known.seq, known.vocab)
        given = [default if size is None else size for size, default in zip(given, defaults, strict=True)]
    missing = [flag_of(name) for name, size in zip(SHAPE, given, strict=True) if size is None]
    if missing:
        raise ValueError(f"give --preset or --model, or also {', '.join(missing)}")
    layers, hidden, heads, seq, vocab = given
    if hidden % heads and arguments.kv_channels is None:
        raise ValueError(f"--hidden-size {hidden}: must be a multiple of --num-attention-heads {heads}")
    family = {name: getattr(arguments, name) for name in FAMILY}
    changed = [name for name in FAMILY if family[name] != DEFAULTS[name]]
    if not changed:
        sizes = {"layers": layers, "hidden": hidden, "heads": heads, "seq": seq, "vocab": vocab}
        return TransformerShape(**sizes) if known is None else replace(known, **sizes)
    if model != "gpt":
        raise ValueError(f"{flag_of(changed[0])}: is a GPT's, and the model is a BERT")
    if known is not None and known.experts:
        raise ValueError(f"{flag_of(changed[0])}: --model {arguments.model} has its own")
    config = GPTSettings(
        num_layers=layers, hidden_size=hidden, num_attention_heads=heads, seq_length=seq, vocab_size=vocab,
        make_vocab_size_divisible_by=1, **family,
    )  # fmt: skip
    if config.num_query_groups is not None and not config.group_query_attention:
        raise ValueError(f"--num-query-groups {config.num_query_groups}: needs --group-query-attention")
    try:
        return task_of(config).model().cost_shape(seq)
    except ValueError as error:
        raise ValueError(as_flags(str(error), GPTSettings)) from None


def batch_of(arguments: Any) -> int | None:
    """The global batch that is asked for, or else the preset's; None if there is neither."""
    preset = presets.find(arguments.preset).recipe["global_batch_size"] if arguments.preset else None
    batch: int | None = arguments.global_batch_size or preset
    return batch


def dropout_of(arguments: Any) -> StepLayout:
    """A layout with the dropout that is asked for: by default pretrain_gpt's."""
    found = {name: DEFAULTS[name] if (value := getattr(arguments, name)) is None else value for name in LAYOUT[-3:]}
    return StepLayout(
        hidden_dropout=found["hidden_dropout"] > 0, attention_dropout=found["attention_dropout"] > 0,
        position_mask=found["attention_dropout_mask"] != "fused",
    )  # fmt: skip


def layout_of(arguments: Any) -> StepLayout:
    """The layout that --gpus and the sizes give. Raises ValueError if one number does not divide another."""
    preset = presets.find(arguments.preset) if arguments.preset else None
    tensor = arguments.tensor_model_parallel_size or (preset.tensor if preset else 1)
    stages, context = arguments.pipeline_model_parallel_size or 1, arguments.context_parallel_size or 1
    micro, gpus = arguments.micro_batch_size or MICRO_BATCH, arguments.gpus or tensor * context * stages
    left, before = gpus, f"--gpus {gpus}"
    for name, size in (("tensor_model", tensor), ("context", context), ("pipeline_model", stages)):
        option = f"--{name.replace('_', '-')}-parallel-size {size}"
        if left % size:
            valid = ", ".join(map(str, divisors(left)))
            raise ValueError(f"{option}: must divide {before}; valid: {valid}")
        left //= size
        before += f" / {option}" if size > 1 else ""
    data, expert = left, arguments.expert_model_parallel_size or 1
    if data % expert:
        valid = ", ".join(map(str, divisors(data)))
        raise ValueError(f"--expert-model-parallel-size {expert}: must divide {before}; valid: {valid}")
    batch = batch_of(arguments) or data * micro
    if batch % (data * micro):
        raise ValueError(
            f"--global-batch-size {batch} is no multiple of --micro-batch-size {micro} x {data} data-parallel replicas"
        )
    usual = preset.recipe.get("recompute_granularity") if preset else None
    return replace(
        dropout_of(arguments),
        tensor=tensor,
        data=data,
        micro_batch=micro,
        micro_batches=batch // (data * micro),
        recompute=arguments.recompute_granularity or usual or "none",
        sequence_parallel=bool(arguments.sequence_parallel) and tensor > 1,
        zero1=bool(arguments.use_distributed_optimizer),
        pipeline=stages,
        context=context,
        method=METHODS[arguments.cp_comm_type or "a2a"],
        chunk_layers=arguments.num_layers_per_virtual_pipeline_stage,
        expert=expert,
    )
