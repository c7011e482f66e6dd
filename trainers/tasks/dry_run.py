"""``--dry-run``: the memory of a rank and the time of a step, by the formulas of `tplayers.formulas`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from commengine import Communicator
from commengine.cost import FittedModel
from commengine.errors import usage_errors
from commengine.rank_zero import broadcast_json, on_rank_zero
from tplayers import BERTConfig, StageInput, formulas
from tplayers.formulas import Collective, KeptTensors, StageShape
from trainers.pipeline.orders import order
from trainers.settings import derived
from trainers.settings.commands import TransformerSettings
from trainers.training.precision import parameter_dtype

from .kinds import task_of

#: seconds for which products are timed
PRODUCT_SECONDS = 0.2


@dataclass(frozen=True)
class Forecast:
    """The forecast of a step on ``ranks`` ranks.

    memory: bytes of a rank, by use. flops: of a rank's products, recomputed ones included. rate: the FLOP/s of a
    rank's products. collectives: those of a rank, by group. communication: their seconds; None if no model tells them.
    tokens: of a step, on all ranks. cut: the layers of each stage of a pipeline, for people. waits: the seconds for
    which the busiest stage waits for others. Of a pipeline, memory is that of the stage that needs most, and flops are
    those of the stage that has most.
    """

    memory: dict[str, float]
    flops: float
    rate: float
    collectives: dict[str, list[Collective]]
    communication: float | None
    tokens: int
    cut: str = ""
    waits: float = 0.0

    @property
    def seconds(self) -> float:
        """The seconds of a step: products, bubble, and the collectives if their time is known; nothing is hidden."""
        return self.flops / self.rate + self.waits + (self.communication or 0.0)

    def lines(self) -> Iterator[str]:
        """Yield the forecast for people."""
        yield f"memory of a rank   {_gb(sum(self.memory.values()))}"
        yield from (f"  {_gb(size)}  {name}" for name, size in self.memory.items())
        yield f"time of a step     {self.seconds:.4g} s, {self.tokens / self.seconds:,.0f} tokens/s"
        products = f"products: {self.flops / 1e9:,.4g} GFLOP a rank"
        yield f"  {self.flops / self.rate:9.4g} s  {products}, at the {self.rate / 1e9:,.4g} GFLOP/s measured just now"
        if self.cut:
            yield f"  {self.waits:9.4g} s  bubble, on stages of {self.cut} layers"
        moved = ", ".join(
            f"{sum(one.count for one in found)} of the {group} group with {_mb(found)}"
            for group, found in self.collectives.items()
        )
        spent = "        ?" if self.communication is None else f"{self.communication:9.4g}"
        yield f"  {spent} s  collectives: {moved or 'none'}" + (", and a few numbers" if moved else "")
        yield (
            "not calibrated: no step was run. Norms, dropout and the optimizer take no time here, and nothing is "
            "hidden behind compute"
        )
        if self.communication is None:
            yield "the collectives take no time here: --cost-model FILE tells it, a model of bench.study"


def _gb(size: float) -> str:
    return f"{size / 1e9:9.3f} GB"


def _mb(found: list[Collective]) -> str:
    return f"{sum(one.count * one.size for one in found) / 1e6:,.4g} MB"


def kept_tensors(config: TransformerSettings, *, overlap: bool) -> KeptTensors:
    """The settings that decide which tensors a rank keeps. overlap: whether gradients are sent during the backward."""
    element = _dtype(config).itemsize
    drawn = _draws_by_position(config) and not _in_blocks(config)
    return KeptTensors(
        element_bytes=element, recompute=config.recompute_granularity or "none",
        sequence_parallel=config.sequence_parallel, hidden_dropout=config.hidden_dropout > 0,
        scores="dropped" if drawn else "none", zero1=config.use_distributed_optimizer, sends_together=overlap,
        sent_bytes=element if element == 2 and not config.grad_reduce_in_fp32 else 0,
    )  # fmt: skip


def _draws_by_position(config: TransformerSettings) -> bool:
    """Whether attention has dropout of which no fused kernel draws the mask."""
    return config.attention_dropout > 0 and config.attention_dropout_mask == "position"


def _in_blocks(config: TransformerSettings) -> bool:
    """Whether attention has one block of scores at a time, and keeps none."""
    return config.context_parallel_size > 1 and derived.context_method(config) != "ulysses"


def block_of_scores(config: TransformerSettings) -> float:
    """The bytes of the largest block of scores of a ring or a gather: fp32, dropped, and the mask; 0 if it is fused.

    No block is kept for the backward.
    """
    if not (_draws_by_position(config) and _in_blocks(config)):
        return 0.0
    heads = task_of(config).model().head_split(config.tensor_model_parallel_size).local_heads
    return config.micro_batch_size * heads * (config.seq_length / config.context_parallel_size) ** 2 * (4 + 4 + 1)


def _dtype(config: TransformerSettings) -> torch.dtype:
    return parameter_dtype(bf16=config.bf16, fp16=config.fp16)


def collectives(config: TransformerSettings, ranks: int, device: torch.device) -> dict[str, list[Collective]]:
    """The collectives of a rank in a step, by group, for ``config`` as in `forecast`. Not collective.

    Of a pipeline they are those of a rank with the most layers, and with the output layer.
    """
    tensor, micro, size = config.tensor_model_parallel_size, config.micro_batch_size, _dtype(config).itemsize
    stages, recompute = config.pipeline_model_parallel_size, config.recompute_granularity or "none"
    data, context, task = ranks // derived.replica_size(config), config.context_parallel_size, task_of(config)
    shape = task.cost_shape()
    expert = derived.expert_ranks(config)
    most = max(_stages(config), key=lambda stage: stage.layers)
    whole = replace(shape, layers=most.layers)
    here = replace(whole, seq=shape.seq // context)
    microbatches = derived.batch_size(config, data) // (micro * data)
    model = task_of(config).model()
    order_head = not isinstance(model, BERTConfig) or model.binary_head

    run = formulas.tensor_parallel_collectives(
        here, micro, tensor, element_bytes=size, recompute=recompute, sequence_parallel=config.sequence_parallel,
        stops_early=config.hidden_dropout == 0, order_head=order_head,
    )  # fmt: skip
    run += formulas.loss_collectives(here, micro, tensor, together=True)
    run += formulas.key_value_collectives(here, micro, tensor, element_bytes=size, recompute=recompute)
    of_tensor = [one for one in run for _ in range(microbatches)]
    run = formulas.context_collectives(
        whole, micro, tensor, context, derived.context_method(config), element_bytes=size, recompute=recompute,
        order_head=order_head,
    )  # fmt: skip
    of_context = [one for one in run for _ in range(microbatches)]
    run = formulas.expert_collectives(here, micro, expert, element_bytes=size, recompute=recompute)
    of_expert = [one for one in run for _ in range(microbatches)]

    def reduced(owned: float, ranks: int) -> list[Collective]:
        buckets = math.ceil(owned / derived.bucket_size(config.ddp_bucket_size, device, data * context))
        return formulas.data_parallel_collectives(
            owned, ranks, gradient_bytes=4 if config.grad_reduce_in_fp32 else size, parameter_bytes=size,
            zero1=config.use_distributed_optimizer, buckets=[owned / buckets] * buckets,
        )  # fmt: skip

    owned = formulas.parameters(shape, tensor, most, expert=expert)
    apart = formulas.expert_parameters(shape, tensor, most, expert=expert) if expert > 1 else 0
    of_data = reduced(owned - apart, data * context)
    of_replicas = reduced(apart, data * context // expert) if apart else []
    message = size * micro * here.seq * config.hidden_size / (tensor if config.sequence_parallel else 1)
    why = "activations forward, gradients backward"
    messages = [Collective("p2p", message, 2, 2 * derived.chunks(config) * microbatches, why)] if stages > 1 else []
    replicas = "data" if context == 1 else "replicas"
    of_groups = (
        ("tensor", of_tensor), ("context", of_context), ("expert", of_expert), (replicas, of_data),
        ("expert_replicas", of_replicas), ("pipeline", messages),
    )  # fmt: skip
    return {name: found for name, found in of_groups if found}


def _stages(config: TransformerSettings) -> list[StageShape]:
    """The layers of each rank of the pipeline, all its chunks together."""
    return [StageShape(len(part.numbers), part.first, part.last) for part in task_of(config).parts()]


def _busiest(config: TransformerSettings, microbatches: int) -> tuple[float, float]:
    """(FLOPs of the busiest stage, FLOPs' worth of time for which it waits for others) in a step of one replica."""
    task, recompute, micro = task_of(config), config.recompute_granularity or "none", config.micro_batch_size
    shape = task.cost_shape()

    def flops(layers: int, again: str) -> float:
        shares = config.tensor_model_parallel_size * config.context_parallel_size
        return formulas.model_flops(replace(shape, layers=layers), micro, again) / shares

    layer, forward = (flops(2, again) - flops(1, again) for again in (recompute, "none"))
    ends = flops(1, "none") - forward
    stages, chunks = config.pipeline_model_parallel_size, derived.chunks(config)
    seconds: dict[tuple[int, bool, int], float] = {}
    for rank, part in enumerate(task_of(config).parts()):
        for chunk, numbers in enumerate(part.chunks):
            last = ends if part.ends(StageInput(chunk)) else 0.0
            seconds[rank, False, chunk] = (len(numbers) * forward + last) / 3
            seconds[rank, True, chunk] = len(numbers) * layer + last - seconds[rank, False, chunk]
    most = microbatches * max(
        sum(seconds[rank, back, c] for back in (False, True) for c in range(chunks)) for rank in range(stages)
    )
    orders = [order(stage, stages, microbatches, chunks) for stage in range(stages)]
    return most, formulas.timeline(orders, seconds).seconds - most


def forecast(
    config: TransformerSettings, ranks: int, rate: float, device: torch.device, model: FittedModel | None = None
) -> Forecast:
    """The forecast for ``config``, which is valid and complete for ``ranks`` ranks. Not collective.

    rate: FLOP/s of a rank. model: of the collectives. The few positions at which a BERT predicts count as all, and the
    numbers that ranks exchange about losses and norms do not count. Raises ValueError if ``model`` lacks an operation.
    """
    tensor, stages = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    context = config.context_parallel_size
    data = ranks // derived.replica_size(config)
    kept = kept_tensors(config, overlap=derived.overlapped(config.overlap_grad_reduce, device))
    shape, scores = task_of(config).cost_shape(), block_of_scores(config)
    block = {"one block of scores": scores} if scores else {}
    batch, groups = derived.batch_size(config, data), collectives(config, ranks, device)
    communication = 0.0 if not groups else None
    if groups and model is not None:
        every = (one for found in groups.values() for one in found)
        communication = sum(one.count * _seconds(model, one) for one in every)
    if stages == 1:
        memory = block | formulas.training_bytes(
            shape, config.micro_batch_size, tensor, data, kept, context=context, expert=derived.expert_ranks(config)
        )
        flops = formulas.model_flops(shape, batch, kept.recompute) / ranks
        return Forecast(memory, flops, rate, groups, communication, batch * config.seq_length)
    microbatches = batch // (config.micro_batch_size * data)
    uses = [
        formulas.training_bytes(
            shape, config.micro_batch_size, tensor, data, kept, stage,
            formulas.kept_microbatches(number, stages, microbatches, derived.chunks(config)), context=context,
            expert=derived.expert_ranks(config),
        )
        for number, stage in enumerate(_stages(config))
    ]  # fmt: skip
    memory = max(uses, key=lambda use: sum(use.values())) | block
    most, waits = _busiest(config, microbatches)
    counts = [[len(chunk) for chunk in part.chunks] for part in task_of(config).parts()]
    cut = " + ".join(str(one if len(one) > 1 else one[0]) for one in counts)
    return Forecast(memory, most, rate, groups, communication, batch * config.seq_length, cut, waits / rate)


def _seconds(model: FittedModel, one: Collective) -> float:
    """The seconds of a collective. A hop around a ring is a message: models have no other name for it."""
    return model.seconds("p2p" if one.operation == "sendrecv" else one.operation, one.size, one.ranks)


def product_rate(config: TransformerSettings, comm: Communicator) -> float:
    """The FLOP/s of the slowest rank in the MLP's product, while all ranks compute. Collective."""
    dtype = _dtype(config)
    rows, columns = config.micro_batch_size * config.seq_length, config.hidden_size
    width = task_of(config).model().ffn_size // config.tensor_model_parallel_size
    left, right = (torch.ones(*size, dtype=dtype, device=comm.device) for size in ((rows, columns), (columns, width)))
    times: list[float] = []
    torch.mm(left, right)
    comm.barrier()
    began = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - began < PRODUCT_SECONDS:
        start = time.perf_counter()
        torch.mm(left, right)
        if comm.device.type != "cpu":
            torch.cuda.synchronize(comm.device)
        times.append(time.perf_counter() - start)
    middle = sorted(times)[len(times) // 2]
    slowest: float = max(comm.mpi.allgather(middle))
    return 2.0 * rows * columns * width / slowest


def dry_run(config: TransformerSettings, comm: Communicator) -> bool:
    """Print the forecast on rank 0 if ``--dry-run`` asks for it, and return whether it does. Collective.

    Raises UsageError, on every rank, for a file of ``--cost-model`` that cannot be used.
    """
    if not config.dry_run:
        return False
    rate = broadcast_json(comm, product_rate(config, comm))

    def show() -> None:
        with usage_errors("--cost-model "):
            model = None if config.cost_model is None else FittedModel.load(Path(config.cost_model))
            found = forecast(config, comm.size, rate, comm.device, model)
        stages = config.pipeline_model_parallel_size
        layout = f"tensor {config.tensor_model_parallel_size} x data {comm.size // derived.replica_size(config)}"
        layout += f" x context {config.context_parallel_size}" if config.context_parallel_size > 1 else ""
        layout += f" x pipeline {stages}" if stages > 1 else ""
        layout += f", in expert groups of {derived.expert_ranks(config)}" if derived.expert_ranks(config) > 1 else ""
        print(f"--dry-run on {comm.size} ranks, {layout}: nothing is trained")
        print("\n".join(found.lines()), flush=True)

    on_rank_zero(comm, show)
    return True
