"""The twelve training runs that are predicted and then measured, on 8 to 64 ranks of a drawn cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bench.emulator.machine import EmulatedMachine
from trainers.tasks.gpt import GPTTrainConfig

NODES, RANKS_PER_NODE = 8, 8
#: the largest job that measures; larger ones are predicted from its measurements
LARGEST_MEASURED = 32
MODEL = {
    "num_layers": 8, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 512, "vocab_size": 8192,
    "micro_batch_size": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
#: networks between the nodes, as the arguments of `EmulatedMachine.varied`
NETWORKS: dict[str, dict[str, Any]] = {"plain": {}, "slow": {"slower": 4.0}, "two levels": {"two_levels": True}}


@dataclass(frozen=True)
class LayoutRun:
    """A training run. options: of pretrain_gpt, beside those of MODEL. network: one of NETWORKS."""

    name: str
    ranks: int
    options: dict[str, Any] = field(default_factory=dict)
    network: str = "plain"

    @property
    def tensor(self) -> int:
        """The size of a tensor group."""
        return int(self.options.get("tensor_model_parallel_size", 1))

    @property
    def file(self) -> str:
        """The beginning of the names of its files."""
        return re.sub("[^a-z0-9]+", "-", self.name.lower())

    @property
    def measured(self) -> tuple[str, int]:
        """The network and the ranks on which the measurements for this run are made."""
        return self.network, min(self.ranks, LARGEST_MEASURED)

    def config(self) -> GPTTrainConfig:
        """The settings of the run."""
        return settings(**self.options)


def settings(**options: Any) -> GPTTrainConfig:
    """The settings of a run with these options of pretrain_gpt beside those of MODEL."""
    return GPTTrainConfig(**{**MODEL, **options}, mock_data=True)


def part_of(drawn: EmulatedMachine, network: str, ranks: int) -> EmulatedMachine:
    """The first nodes of the cluster, with one of NETWORKS."""
    return drawn.varied(**NETWORKS[network]).part(ranks // RANKS_PER_NODE)


def _runs() -> Iterator[LayoutRun]:
    tensor = "tensor_model_parallel_size"
    zero1, overlap = {"use_distributed_optimizer": True}, {"overlap_grad_reduce": True}
    sequence = {"sequence_parallel": True}
    yield LayoutRun("data 8", 8)
    yield LayoutRun("tensor 2 x data 4, full recomputation", 8, {tensor: 2, "recompute_granularity": "full"})
    yield LayoutRun("tensor 8", 8, {tensor: 8})
    yield LayoutRun("tensor 8, sequence parallel", 8, {tensor: 8, **sequence})
    yield LayoutRun("data 16", 16)
    yield LayoutRun("data 16, ZeRO-1", 16, zero1)
    yield LayoutRun("data 16, overlap, 4 micro-batches", 16, {"global_batch_size": 256, **overlap})
    yield LayoutRun("tensor 4 x data 4, sequence parallel, ZeRO-1", 16, {tensor: 4, **sequence, **zero1})
    yield LayoutRun("tensor 4 x data 8, slow links", 32, {tensor: 4, "micro_batch_size": 8}, "slow")
    yield LayoutRun("data 32, two levels, 2 micro-batches", 32, {"global_batch_size": 256}, "two levels")
    yield LayoutRun("tensor 8 x data 8", 64, {tensor: 8, "micro_batch_size": 8})
    yield LayoutRun("tensor 8 x data 8, sequence parallel, overlap", 64, {tensor: 8, **sequence, **overlap})


RUNS = tuple(_runs())
