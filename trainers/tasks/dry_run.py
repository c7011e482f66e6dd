"""``--dry-run``: the memory of a rank and the time of a step, by the formulas of `tplayers.formulas`."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from commengine import Communicator
from commengine.cost import FittedModel
from commengine.errors import usage_errors
from commengine.rank_zero import broadcast_json, on_rank_zero
from tplayers import StageInput, formulas
from tplayers.formulas import Collective, KeptTensors, StageShape, equal_buckets
from trainers.pipeline.orders import order
from trainers.settings import derived
from trainers.settings.commands import TransformerSettings
from trainers.training.precision import parameter_dtype

from .kinds import task_of
from .step_model import step_model

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
    model, most = step_model(config, ranks), max(_stages(config), key=lambda stage: stage.layers)
    layout, whole = model.layout, StageShape(most.layers)
    found: defaultdict[str, list[Collective]] = defaultdict(list)
    run = model.of_microbatch(whole)
    for group in ("tensor", "context", "expert"):
        if mine := [one for name, one in run if name.split("/")[0] == group]:
            found[group] = mine * layout.micro_batches
    owned = formulas.parameters(model.shape, layout.tensor, most, expert=layout.expert)
    apart = formulas.expert_parameters(model.shape, layout.tensor, most, expert=layout.expert)
    apart = apart if layout.expert > 1 else 0
    largest = derived.bucket_size(config.ddp_bucket_size, device, layout.replicas)
    for count, experts in ((owned - apart, False), (apart, True)):
        for name, one in model.of_gradients(count, equal_buckets(count, largest), experts=experts):
            found[name].append(one)
    if layout.pipeline > 1:
        positions = model.shape.seq // layout.context * layout.micro_batch
        shards = layout.tensor if layout.sequence_parallel else 1
        message = model.element_bytes * positions * config.hidden_size / shards
        times, why = 2 * derived.chunks(config) * layout.micro_batches, "activations forward, gradients backward"
        found["pipeline"].append(Collective("p2p", message, 2, times, why))
    return dict(found)


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
    step, stages = step_model(config, ranks), config.pipeline_model_parallel_size
    kept = kept_tensors(config, overlap=derived.overlapped(config.overlap_grad_reduce, device))
    scores, groups = block_of_scores(config), collectives(config, ranks, device)
    block = {"one block of scores": scores} if scores else {}
    communication = 0.0 if not groups else None
    if groups and model is not None:
        every = (one for found in groups.values() for one in found)
        communication = sum(one.count * _seconds(model, one) for one in every)
    uses = step.memory(kept, _stages(config), derived.chunks(config))
    memory, tokens = max(uses, key=lambda use: sum(use.values())) | block, step.layout.batch * config.seq_length
    if stages == 1:
        flops = formulas.model_flops(step.shape, step.layout.batch, kept.recompute) / ranks
        return Forecast(memory, flops, rate, groups, communication, tokens)
    most, waits = _busiest(config, step.layout.micro_batches)
    counts = [[len(chunk) for chunk in part.chunks] for part in task_of(config).parts()]
    cut = " + ".join(str(one if len(one) > 1 else one[0]) for one in counts)
    return Forecast(memory, most, rate, groups, communication, tokens, cut, waits / rate)


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
