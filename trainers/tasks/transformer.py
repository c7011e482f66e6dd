"""TransformerTask: what the training of every transformer makes of its settings."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch

from commengine import Communicator, ProcessGrid, Stream, UsageError
from commengine.options.declared import given, require
from commengine.rank_zero import on_every_rank
from tplayers import ContextGroup, ModelPart, Transformer, TransformerConfig, formulas, use_canonical_shards
from tplayers.formulas import TransformerShape
from trainers.data.batches import GlobalBatches
from trainers.data.corpus import Corpus, HeldOutPart, complete_corpus
from trainers.data.samples import Samples
from trainers.data.stream import SampleStream
from trainers.data.tokenizer import Tokenizer
from trainers.run.evaluation import HeldOut
from trainers.settings import derived
from trainers.settings.commands import TransformerSettings
from trainers.settings.saving import of_other_program
from trainers.training.interfaces import Objective
from trainers.training.trainer import Trainer
from trainers.weights.export import SmallFiles
from trainers.weights.opening import fill_model, open_other
from trainers.weights.other_model import OtherModel

from .fitting import require_context, require_memory, require_same, require_shards, require_split
from .training import ExportedTask, new_model

Settings = TypeVar("Settings", bound=TransformerSettings)


class TransformerTask(ExportedTask, Generic[Settings]):
    """The training of a transformer on text. All that it needs is made here, of its settings.

    A subclass says what is trained: `network_class`, `model`, `open_corpus`, `batches`, `objective` and `remarks`.
    `started` makes the corpus and the trainer; without it, a task only tells what it would make.

    config: the settings. ``vocab_size`` must be known for all methods but `completed`.
    """

    kind: ClassVar[str]
    settings: ClassVar[type[Any]]
    network_class: ClassVar[type[Any]]
    corpus: Corpus
    #: what an evaluation averages, if that is not what the run minimizes
    plain: Objective[Any] | None = None
    #: the held-out part of each source that is evaluated
    evaluated: list[HeldOutPart]

    def __init__(self, config: Settings) -> None:
        self.config = config

    @classmethod
    def started(cls, config: Settings, world: Communicator) -> Self:
        """A task with its corpus and its trainer. config: valid and complete. Collective over ``world``."""
        task = cls(config)
        task.corpus = on_every_rank(world, task.open_corpus)
        task.trainer = task.new_trainer(world, task.corpus)
        task.tokens_per_sample = config.seq_length
        task.evaluated = task.corpus.held_out(config.eval_iters, task.trainer.batches.size)
        task.held_out = []
        for part in task.evaluated:
            batches = task.new_batches(part.held_out, task.trainer.grid.data, f"--data-path {part.name}", "held-out ")
            task.held_out.append(HeldOut(part.name, part.weight, batches, part.iterations))
        return task

    def evaluation_objective(self) -> Objective[Any]:
        """See `TrainingTask.evaluation_objective`: the loss of the text, with a teacher, too."""
        return self.plain or self.trainer.objective

    # The settings

    def completed(self, ranks: int) -> Settings:
        """The settings with the tokenizer, the vocabulary and canonical sizes, valid for ``ranks`` ranks.

        It reads files. Raises UsageError or ValueError, naming the option that does not fit.
        """
        task = type(self)(complete_corpus(self.config))
        if task.config.dry_run and of_other_program(task.config.load):
            task.open_other().close()  # a run opens it when its trainer is made
        shape = task.model()
        require_split(shape, task.config, ranks)
        require_context(shape, task.config)
        require_shards(shape, task.config)
        require_memory(shape, task.config)
        return derived.with_canonical_sizes(task.config)

    @classmethod
    def of_the_model(cls) -> set[str]:
        """The names of the settings that a checkpoint needs so that its model can be built again from it alone."""
        of_data = {"global_batch_size", "seed", "split", "mock_data"}
        fixed = {item.name for item in fields(cls.settings) if item.metadata["fixed"]}
        return (fixed | {"hidden_dropout", "attention_dropout", "bf16", "fp16", "tokenizer_model"}) - of_data

    # The model

    @abstractmethod
    def model(self) -> TransformerConfig:
        """The model's shape."""

    def network(
        self, tensor: Communicator, dtype: torch.dtype, overlap: Stream | None = None, part: ModelPart | None = None,
        **groups: Any,
    ) -> Transformer:  # fmt: skip
        """A new model over a tensor group, or a part of it. Collective.

        overlap: the stream on which the backward communicates. groups: as `groups` gives them.
        """
        model: Transformer = self.network_class(
            self.model(), tensor, dtype=dtype, overlap_stream=overlap, part=part, **groups
        )
        return model

    def groups(self, grid: ProcessGrid) -> dict[str, Any]:
        """The other groups of the model's ranks, by the names of its arguments. Collective over them."""
        config = self.config
        if config.context_parallel_size == 1:
            return {"context": None}
        method: Any = derived.context_method(config)
        threaded = derived.threaded_messages(config)
        return {"context": ContextGroup(grid.context, method, causal=config.causal, threaded=threaded)}

    def stage(self, grid: ProcessGrid, dtype: torch.dtype, overlap: Stream | None = None) -> Transformer:
        """A new model: this rank's stage of it. The arguments are as for `network`. Collective."""
        return self.network(grid.tensor, dtype, overlap, self.parts()[grid.pipeline.rank], **self.groups(grid))

    def parts(self) -> list[ModelPart]:
        """The layers of each stage: stretches of the size that is asked for, or one, cut by the cost of products."""
        config, last = self.config, 0.0
        stages, chunks = config.pipeline_model_parallel_size, derived.chunks(config)
        if config.num_layers_per_virtual_pipeline_stage is None and stages > 1 and config.stacks == 1:
            last = formulas.output_layers(self.cost_shape(), config.recompute_granularity or "none")
        layers = derived.layers(config)
        cut = formulas.cut_layers(layers, stages * chunks, last)
        return [ModelPart(layers, tuple(cut[stage::stages])) for stage in range(stages)]

    def cost_shape(self) -> TransformerShape:
        """The shape of the model, for formulas."""
        config = self.config
        return self.model().cost_shape(config.seq_length, config.tensor_model_parallel_size)

    def open_other(self) -> OtherModel:
        """The model of another program that ``--load`` names. Not collective.

        Raises UsageError where it cannot be read, or a setting that changes the function is not that of the model.
        """
        config = self.config
        assert config.load is not None
        other = open_other(config.load, vocab_size=config.vocab_size, num_attention_heads=config.num_attention_heads)
        try:
            require_same(config, self.model().ffn_size, other, config.load)
        except UsageError:
            other.close()
            raise
        return other

    def new_trainer(self, world: Communicator, corpus: Corpus) -> Trainer:
        """A trainer of a new model on training samples of ``corpus``. Collective over ``world``.

        The model has its initial values, or those of ``--load hf:FOLDER``.
        """
        config = self.config

        def fresh() -> Trainer:
            samples = corpus.stream(config.seed)
            grid, model = new_model(config, world, self.stage)
            shards = derived.canonical_shards(config)
            if shards is not None:
                require(
                    world.device.type == "cpu",
                    "--deterministic: needs --device cpu; "
                    f"on {world.device} products and reductions have orders of their own",
                )
                use_canonical_shards(model, grid.tensor, shards, derived.canonical_parts(config))
            batches = self.new_batches(samples, grid.data, given(config, "data_path"))
            return Trainer(config, grid, model, self.objective(), batches)

        if config.load is None or not of_other_program(config.load):
            return fresh()
        with contextlib.closing(on_every_rank(world, self.open_other)) as other:  # before the model takes its memory
            trainer = fresh()
            model = trainer.model
            assert isinstance(model, Transformer)
            fill_model(config.load, other, model, model.config, world, partial(trainer.optimizer.fill, "master"))
        return trainer

    # The data

    @abstractmethod
    def open_corpus(self) -> Corpus:
        """The data sets of the run. Not collective. Raises ValueError, naming what does not fit."""

    @property
    @abstractmethod
    def batches(self) -> Callable[..., GlobalBatches[Any]]:
        """The class of the batches, which takes `GlobalBatches`'s arguments."""

    @abstractmethod
    def objective(self) -> Objective[Any]:
        """What the run minimizes."""

    def with_own_tokens(self, tokenizer: Tokenizer) -> Tokenizer:
        """``tokenizer`` with the tokens that the model has besides. Here: none."""
        return tokenizer

    def new_batches(
        self, samples: Samples | SampleStream, data: Communicator, path: str, kind: str = ""
    ) -> GlobalBatches[Any]:
        """The batches of ``samples`` for a rank of ``data``, the data group. path, kind: of them, for errors."""
        config = self.config
        unusable = (
            f"a {kind}token lies outside the vocabulary of {config.vocab_size}: was {path} made with another "
            "tokenizer, or is --vocab-size too small?"
        )
        return self.batches(
            samples, size=derived.batch_size(config, data.size), micro=derived.samples_at_once(config), data=data,
            vocab_size=config.vocab_size, unusable=unusable,
        )  # fmt: skip

    def small_files(self) -> SmallFiles:
        return SmallFiles(self.config.hf_files, self.config.tokenizer_model)


def shape_of(config: TransformerSettings, kind: type[Any]) -> dict[str, Any]:
    """The fields of the model's configuration ``kind`` that are settings. ValueError without ``vocab_size``."""
    if config.vocab_size is None:
        raise ValueError("vocab_size is missing")
    return model_fields(config, kind) | {"max_position_embeddings": derived.positions(config)}


def model_fields(config: Any, kind: type[TransformerConfig]) -> dict[str, Any]:
    """The fields of the model's configuration ``kind`` that are settings of the same name. They must be known."""
    found = {item.name: getattr(config, item.name) for item in fields(kind) if hasattr(config, item.name)}
    return found | {"recompute": None if config.recompute_granularity == "none" else config.recompute_granularity}
