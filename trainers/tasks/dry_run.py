"""``--dry-run``: the memory of a rank and the time of a step, by the formulas of `commengine.cost`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from commengine import Communicator, cost
from commengine.cost import Collective, FittedModel, KeptTensors
from commengine.errors import usage_errors
from commengine.rank_zero import broadcast_json, on_rank_zero
from trainers.config import bucket_size, overlapped
from trainers.training.precision import parameter_dtype

from .transformer import TransformerTrainConfig

#: seconds for which products are timed
PRODUCT_SECONDS = 0.2


@dataclass(frozen=True)
class Forecast:
    """The forecast of a step on ``ranks`` ranks.

    memory: bytes of a rank, by use. flops: of a rank's products, recomputed ones included. rate: the FLOP/s of a
    rank's products. collectives: those of a rank, by group. communication: their seconds; None if no model tells them.
    tokens: of a step, on all ranks.
    """

    memory: dict[str, float]
    flops: float
    rate: float
    collectives: dict[str, list[Collective]]
    communication: float | None
    tokens: int

    @property
    def seconds(self) -> float:
        """The seconds of a step: products, and the collectives if their time is known; nothing is hidden."""
        return self.flops / self.rate + (self.communication or 0.0)

    def lines(self) -> Iterator[str]:
        """Yield the forecast for people."""
        yield f"memory of a rank   {_gb(sum(self.memory.values()))}"
        yield from (f"  {_gb(size)}  {name}" for name, size in self.memory.items())
        yield f"time of a step     {self.seconds:.4g} s, {self.tokens / self.seconds:,.0f} tokens/s"
        products = f"products: {self.flops / 1e9:,.4g} GFLOP a rank"
        yield f"  {self.flops / self.rate:9.4g} s  {products}, at the {self.rate / 1e9:,.4g} GFLOP/s measured just now"
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


def kept_tensors(config: TransformerTrainConfig, *, overlap: bool) -> KeptTensors:
    """The settings that decide which tensors a rank keeps. overlap: whether gradients are sent during the backward."""
    element = _dtype(config).itemsize
    drawn = config.attention_dropout > 0 and config.attention_dropout_mask == "position"
    return KeptTensors(
        element_bytes=element, recompute=config.recompute_granularity or "none",
        sequence_parallel=config.sequence_parallel, hidden_dropout=config.hidden_dropout > 0,
        scores="dropped" if drawn else "none", zero1=config.use_distributed_optimizer, sends_together=overlap,
        sent_bytes=element if element == 2 and not config.grad_reduce_in_fp32 else 0,
    )  # fmt: skip


def _dtype(config: TransformerTrainConfig) -> torch.dtype:
    return parameter_dtype(bf16=config.bf16, fp16=config.fp16)


def collectives(config: TransformerTrainConfig, ranks: int, device: torch.device) -> dict[str, list[Collective]]:
    """The collectives of a rank in a step, by group, for ``config`` as in `forecast`. Not collective."""
    tensor, micro, size = config.tensor_model_parallel_size, config.micro_batch_size, _dtype(config).itemsize
    data, recompute = ranks // tensor, config.recompute_granularity or "none"
    shape = config.model().cost_shape(config.seq_length, config.task, tensor)

    run = cost.tensor_parallel_collectives(
        shape, micro, tensor, element_bytes=size, recompute=recompute, sequence_parallel=config.sequence_parallel,
        stops_early=config.hidden_dropout == 0,
    )  # fmt: skip
    run += cost.loss_collectives(shape, micro, tensor, together=True)
    run += cost.key_value_collectives(shape, micro, tensor, element_bytes=size, recompute=recompute)
    of_tensor = [one for one in run for _ in range(config.batch_size(data) // (micro * data))]

    owned = cost.parameters(shape, tensor)
    buckets = math.ceil(owned / bucket_size(config.ddp_bucket_size, device, data))
    of_data = cost.data_parallel_collectives(
        owned, data, gradient_bytes=4 if config.grad_reduce_in_fp32 else size, parameter_bytes=size,
        zero1=config.use_distributed_optimizer, buckets=[owned / buckets] * buckets,
    )  # fmt: skip
    return {name: found for name, found in (("tensor", of_tensor), ("data", of_data)) if found}


def forecast(
    config: TransformerTrainConfig, ranks: int, rate: float, device: torch.device, model: FittedModel | None = None
) -> Forecast:
    """The forecast for ``config``, which is valid and complete for ``ranks`` ranks. Not collective.

    rate: FLOP/s of a rank. model: of the collectives. The few positions at which a BERT predicts count as all, and the
    numbers that ranks exchange about losses and norms do not count. Raises ValueError if ``model`` lacks an operation.
    """
    tensor = config.tensor_model_parallel_size
    data = ranks // tensor
    kept = kept_tensors(config, overlap=overlapped(config.overlap_grad_reduce, device))
    shape = config.model().cost_shape(config.seq_length, config.task, tensor)
    batch, groups = config.batch_size(data), collectives(config, ranks, device)
    communication = 0.0 if not groups else None
    if groups and model is not None:
        every = (one for found in groups.values() for one in found)
        communication = sum(one.count * model.seconds(one.operation, one.size, one.ranks) for one in every)
    return Forecast(
        cost.training_bytes(shape, config.micro_batch_size, tensor, data, kept),
        cost.model_flops(shape, batch, kept.recompute) / ranks, rate, groups, communication, batch * config.seq_length,
    )  # fmt: skip


def product_rate(config: TransformerTrainConfig, comm: Communicator) -> float:
    """The FLOP/s of the slowest rank in the MLP's product, while all ranks compute. Collective."""
    dtype = _dtype(config)
    rows, columns = config.micro_batch_size * config.seq_length, config.hidden_size
    width = config.model().ffn_size // config.tensor_model_parallel_size
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


def dry_run(config: TransformerTrainConfig, comm: Communicator) -> bool:
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
        tensor = config.tensor_model_parallel_size
        print(f"--dry-run on {comm.size} ranks, tensor {tensor} x data {comm.size // tensor}: nothing is trained")
        print("\n".join(found.lines()), flush=True)

    on_rank_zero(comm, show)
    return True
