"""The `tplayers.formulas.StepModel` of a training command."""

from __future__ import annotations

from tplayers import BERTConfig
from tplayers.formulas import StepLayout, StepModel
from trainers.settings import derived
from trainers.settings.commands import TransformerSettings
from trainers.training.precision import parameter_dtype

from .kinds import task_of


def step_model(config: TransformerSettings, ranks: int, predictions: int | None = None) -> StepModel:
    """The model of a step of ``config``, which is valid and complete for ``ranks`` ranks. Not collective.

    predictions: the positions of a sequence at which a BERT predicts; None: all.
    """
    task = task_of(config)
    model, data = task.model(), ranks // derived.replica_size(config)
    bert = model if isinstance(model, BERTConfig) else None
    size = parameter_dtype(bf16=config.bf16, fp16=config.fp16).itemsize
    layout = StepLayout(
        tensor=config.tensor_model_parallel_size, data=data, micro_batch=config.micro_batch_size,
        micro_batches=derived.batch_size(config, data) // (config.micro_batch_size * data),
        recompute=config.recompute_granularity or "none", sequence_parallel=config.sequence_parallel,
        zero1=config.use_distributed_optimizer, hidden_dropout=config.hidden_dropout > 0,
        attention_dropout=config.attention_dropout > 0,
        position_mask=config.attention_dropout_mask == "position", pipeline=config.pipeline_model_parallel_size,
        chunk_layers=config.num_layers_per_virtual_pipeline_stage, context=config.context_parallel_size,
        method=derived.context_method(config), expert=derived.expert_ranks(config),
    )  # fmt: skip
    return StepModel(
        task.cost_shape(), layout, element_bytes=size, gradient_bytes=4 if config.grad_reduce_in_fp32 else size,
        stops_early=config.hidden_dropout == 0 and (bert is None or bert.norm_placement == "pre"),
        order_head=bert is None or bert.binary_head, predictions=predictions,
    )  # fmt: skip
