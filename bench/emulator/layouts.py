"""The training runs that are predicted and then measured on a drawn cluster: twelve layouts, and pipelines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bench.emulator.machine import EmulatedMachine
from tplayers import formulas
from trainers.settings import derived
from trainers.settings.commands import GPTSettings

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
    def stages(self) -> int:
        """The stages of its pipeline."""
        return int(self.options.get("pipeline_model_parallel_size", 1))

    @property
    def bubble(self) -> float:
        """The share of a pass in which a stage waits by the formula, if all stages have the same work."""
        config = self.config()
        replicas = self.ranks // (self.tensor * self.stages)
        microbatches = derived.batch_size(config, replicas) // (config.micro_batch_size * replicas)
        ratio = formulas.bubble(self.stages, microbatches, derived.chunks(config))
        return ratio / (1 + ratio)

    @property
    def file(self) -> str:
        """The beginning of the names of its files."""
        return re.sub("[^a-z0-9]+", "-", self.name.lower())

    @property
    def measured(self) -> tuple[str, int]:
        """The network and the ranks on which the measurements for this run are made."""
        return self.network, min(self.ranks, LARGEST_MEASURED)

    def config(self) -> GPTSettings:
        """The settings of the run. The emulator needs a stream for each direction of a pipeline's messages."""
        return settings(**self.options, overlap_p2p_communication=self.stages > 1 or None)


def settings(**options: Any) -> GPTSettings:
    """The settings of a run with these options of pretrain_gpt beside those of MODEL."""
    return GPTSettings(**{**MODEL, **options}, mock_data=True)


def part_of(drawn: EmulatedMachine, network: str, ranks: int) -> EmulatedMachine:
    """The first nodes of the cluster, with one of NETWORKS."""
    return drawn.varied(**NETWORKS[network]).part(ranks // RANKS_PER_NODE)


def _layouts() -> Iterator[LayoutRun]:
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


#: of the pipeline: a slow link between two nodes, with tensor groups inside them and across
INSIDE, ACROSS = "tensor 8 x pipeline 2, slow links", "tensor 16, slow links"


def _pipelines() -> Iterator[LayoutRun]:
    tensor, stages = "tensor_model_parallel_size", "pipeline_model_parallel_size"
    stretch = "num_layers_per_virtual_pipeline_stage"
    batch = {"global_batch_size": 32}  # 8 micro-batches
    for name, network in (("", "plain"), (", slow links", "slow")):
        yield LayoutRun(f"tensor 8 x pipeline 2{name}", 16, {tensor: 8, stages: 2, **batch}, network)
        yield LayoutRun(f"tensor 16{name}", 16, {tensor: 16, **batch}, network)
    more = {tensor: 8, stages: 2, stretch: 2, **batch}
    yield LayoutRun("tensor 8 x pipeline 2, 2 stretches, slow links", 16, more, "slow")
    for count, microbatches, each in (
        (2, 2, None), (2, 4, None), (2, 8, None), (4, 2, None), (4, 4, None), (4, 8, None), (2, 2, 2), (2, 8, 2),
        (4, 4, 1), (4, 8, 1),
    ):  # fmt: skip
        # Equal stages: a small vocabulary. All other ranks are replicas, which a pass does not wait for.
        options = {stages: count, "vocab_size": 512, "global_batch_size": 4 * microbatches * 8 // count}
        name = f"pipeline {count}, {microbatches} micro-batches"
        if each is not None:
            options[stretch] = each
            name += f", {8 // count // each} stretches"
        yield LayoutRun(name, 8, options)


RUNS = {"layouts": tuple(_layouts()), "pipelines": tuple(_pipelines())}
