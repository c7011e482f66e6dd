"""StagesConfig: the settings of runs whose model is cut into pipeline stages, and the cut."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from commengine.options.declared import given, option, require
from commengine.options.ranges import AtLeastOne, Layers
from tplayers import ModelPart, formulas
from tplayers.formulas import TransformerShape

from .layers import LayerConfig

#: graphs that torch.compile makes of one model: it compiles each stretch of layers for itself
COMPILED_CHUNKS = 8


@dataclass(frozen=True)
class StagesConfig(LayerConfig):
    """A training run of a transformer that may be cut into stages (Narayanan et al. 2021, section 2.2)."""

    num_layers: Layers = option(12, "transformer layers", fixed=True)
    pipeline_model_parallel_size: AtLeastOne = option(
        1, "pipeline stages that the layers are cut into; the ranks of a stage are a tensor group and its replicas"
    )
    num_layers_per_virtual_pipeline_stage: AtLeastOne | None = option(
        None,
        "give each stage several stretches of so many layers, which interleave (default: one stretch, cut by cost)",
    )
    overlap_p2p_communication: bool | None = option(
        None,
        "messages between stages, and those of a context group, have threads of their own (default: no; on a "
        "device they need none)",
    )  # fmt: skip

    @property
    def stages(self) -> int:
        """See `JobConfig.stages`."""
        return self.pipeline_model_parallel_size

    @property
    def chunks(self) -> int:
        """The stretches of layers of a stage."""
        each = self.num_layers_per_virtual_pipeline_stage
        return 1 if each is None else self.num_layers // (self.pipeline_model_parallel_size * each)

    def validate(self, ranks: int) -> None:
        """Raise UsageError, naming the option and what is valid, unless this run is possible on ``ranks`` ranks."""
        super().validate(ranks)
        stages, layers = self.pipeline_model_parallel_size, self.num_layers
        named = given(self, "pipeline_model_parallel_size")
        require(stages <= layers, f"{named}: must be at most {given(self, 'num_layers')}: each stage needs a layer")
        each = self.num_layers_per_virtual_pipeline_stage
        require(
            not self.overlap_p2p_communication or stages * self.context_ranks > 1,
            "--overlap-p2p-communication: needs a --pipeline-model-parallel-size or a --context-parallel-size above 1",
        )
        if each is None:
            return
        named = given(self, "num_layers_per_virtual_pipeline_stage")
        require(stages > 1, f"{named}: needs a --pipeline-model-parallel-size above 1")
        fits = [n for n in range(1, layers // stages + 1) if layers % (stages * n) == 0]
        valid = f"{', '.join(map(str, fits))} would" if fits else f"no number would, as {stages} stages do not either"
        require(each in fits, f"{named}: {stages} stages of such stretches do not divide {layers} layers; {valid}")
        require(
            not self.compile or self.chunks <= COMPILED_CHUNKS,
            f"{named}: {self.chunks} stretches a stage; --compile takes at most {COMPILED_CHUNKS}",
        )
        replicas = ranks // self.replica_size
        batch = self.global_batch_size or self.micro_batch_size * replicas
        microbatches = batch // (replicas * self.samples_at_once)
        require(
            self.chunks == 1 or microbatches >= stages,
            f"{named}: needs a micro-batch for each of the {stages} stages, and a step has {microbatches}: "
            f"--global-batch-size {stages * replicas * self.samples_at_once} would do",
        )

    @abstractmethod
    def cost_shape(self) -> TransformerShape:
        """The shape of the model, for formulas."""

    def parts(self) -> list[ModelPart]:
        """The layers of each stage: stretches of the size that is asked for, or one, cut by the cost of products."""
        stages, chunks = self.pipeline_model_parallel_size, self.chunks
        last = 0.0
        if self.num_layers_per_virtual_pipeline_stage is None and stages > 1:
            last = formulas.output_layers(self.cost_shape(), self.recompute_granularity or "none")
        cut = formulas.cut_layers(self.num_layers, stages * chunks, last)
        return [ModelPart(self.num_layers, tuple(cut[stage::stages])) for stage in range(stages)]
