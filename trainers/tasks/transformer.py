"""The settings that every transformer shares in its training."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import torch

from commengine import Communicator, ProcessGrid, Stream, UsageError
from commengine.options.declared import as_flags, given, option, require
from commengine.options.ranges import Heads, Length, Positive, Text, Vocabulary, Width
from tplayers import BERT, GPT, ModelPart, TransformerConfig, formulas
from trainers import presets
from trainers.config import LOAD, TrainConfig, of_other_program
from trainers.data.batches import GlobalBatches
from trainers.data.corpus import Corpus, TextConfig
from trainers.data.samples import Samples
from trainers.data.stream import SampleStream
from trainers.training.interfaces import Objective
from trainers.weights.opening import open_other
from trainers.weights.other_model import OtherModel

from .context import ContextConfig
from .other_models import require_same, settings_of_load
from .same_bits import SameBitsConfig


@dataclass(frozen=True)
class TransformerTrainConfig(SameBitsConfig, ContextConfig, TextConfig, ABC):
    """A training run of a transformer on text: the settings that GPT and BERT share.

    A subclass says what is trained: `model`, `network`, `open_corpus`, `batches` and `objective`.

    task: the kind of model whose presets the run may name (`trainers.presets`).
    """

    task: ClassVar[str]

    load: Text | None = option(
        None, f"{LOAD}. hf:FOLDER or megatron:FOLDER starts a new run with the weights, the shape and the tokenizer of "
        "another program's model", sets=settings_of_load,
    )  # fmt: skip
    hf_files: Text | None = option(
        None, "folder of Hugging Face whose config.json and tokenizer the exports repeat (default: that of --load)"
    )
    preset: str | None = option(
        None, "a model of the paper with its recipe; other flags and --config win. list prints them",
        sets=lambda settings, name, _: presets.settings(name, settings.task),
    )  # fmt: skip
    hidden_size: Width = option(768, "width of the residual stream", fixed=True)
    num_attention_heads: Heads = option(12, "attention heads", fixed=True)
    ffn_hidden_size: Width | None = option(
        None, "width of the feed-forward block (default 4 * hidden size)", fixed=True
    )
    max_position_embeddings: Length | None = option(
        None, "positions that the model knows (default seq-length)", fixed=True, default_of="seq_length"
    )
    norm_epsilon: Positive = option(1e-5, "added to the variance in all norms", fixed=True)
    make_vocab_size_divisible_by: Vocabulary = option(
        1024, "pad the vocabulary to a multiple of this, at every TP size", fixed=True
    )

    dry_run: bool = option(False, "print the memory of a rank and the predicted time of a step, and train nothing")
    cost_model: Text | None = option(None, "with --dry-run: a model of bench.study, for the time of the collectives")

    @property
    def positions(self) -> int:
        """The number of positions that the model knows."""
        return self.max_position_embeddings or self.seq_length

    def validate(self, ranks: int) -> None:
        """Raise UsageError, naming the option and what is valid, unless this run is possible on ``ranks`` ranks."""
        super().validate(ranks)
        longest = given(self, "max_position_embeddings")
        require(self.seq_length <= self.positions, f"{given(self, 'seq_length')}: must not exceed {longest}")
        require(self.dry_run or self.cost_model is None, f"{given(self, 'cost_model')}: goes with --dry-run")
        require(
            self.attention_dropout_mask == "position" or self.attention_dropout == 0 or not self.deterministic,
            f"{given(self, 'attention_dropout_mask')}: excludes --deterministic, because the mask depends on the ranks",
        )
        require(
            not self.sequence_parallel or self.seq_length % (self.canonical_shards or 1) == 0,
            f"{given(self, 'seq_length')}: must be a multiple of --deterministic-shards {self.canonical_shards} with "
            "--sequence-parallel",
        )
        require(
            self.canonical_shards is None
            or self.canonical_parts == 1
            or self.seq_length % max(self.canonical_shards, self.canonical_parts) == 0,
            f"{given(self, 'seq_length')}: must be a multiple of --deterministic-shards {self.canonical_shards} and of "
            f"--deterministic-parts {self.canonical_parts}",
        )

    def completed(self, ranks: int) -> Self:
        """The settings with the vocabulary's size. Raises UsageError if the model does not split over the ranks."""
        config = super().completed(ranks)
        if config.dry_run and config.load is not None and of_other_program(config.load):
            config.open_other().close()  # a run opens it when its trainer is made
        config.require_split(ranks)
        config.require_context(config.model(), config.seq_length)
        config.require_shards(config.model())
        config = config.with_canonical_sizes()
        config.require_memory()
        return config

    def require_split(self, ranks: int) -> None:
        """Raise UsageError, with the sizes that would work, unless the model splits over ``ranks`` ranks as it should.

        ``vocab_size`` must be known.
        """
        require_split(self.model(), self, ranks)

    @classmethod
    def of_the_model(cls) -> set[str]:
        """The names of the settings that a checkpoint needs so that its model can be built again from it alone."""
        of_data = ("global_batch_size", "seed", "split", "mock_data")
        fixed = {item.name for item in fields(cls) if item.metadata["fixed"]}
        return (fixed | {"hidden_dropout", "attention_dropout", "bf16", "fp16", "tokenizer_model"}) - set(of_data)

    def open_other(self) -> OtherModel:
        """The model of another program that ``--load`` names. Not collective.

        Raises UsageError where it cannot be read, or a setting that changes the function is not that of the model.
        """
        assert self.load is not None
        other = open_other(self.load, vocab_size=self.vocab_size, num_attention_heads=self.num_attention_heads)
        try:
            require_same(self, other, self.load)
        except UsageError:
            other.close()
            raise
        return other

    @abstractmethod
    def model(self) -> TransformerConfig:
        """The model's shape. ``vocab_size`` must be known."""

    @abstractmethod
    def network(
        self, tensor: Communicator, dtype: torch.dtype, overlap: Stream | None = None, part: ModelPart | None = None,
        **groups: Any,
    ) -> GPT | BERT:  # fmt: skip
        """A new model over a tensor group, or a part of it. Collective.

        overlap: the stream on which the backward communicates. groups: as `groups` gives them.
        """

    def groups(self, grid: ProcessGrid) -> dict[str, Any]:
        """The other groups of the model's ranks, by the names of its arguments. Collective over them."""
        return {"context": self.context_group(grid)}

    def stage(self, grid: ProcessGrid, dtype: torch.dtype, overlap: Stream | None = None) -> GPT | BERT:
        """A new model: this rank's stage of it. The arguments are as for `network`. Collective."""
        return self.network(grid.tensor, dtype, overlap, self.parts()[grid.pipeline.rank], **self.groups(grid))

    def cost_shape(self) -> formulas.TransformerShape:
        """See `StagesConfig.cost_shape`. ``vocab_size`` must be known."""
        return self.model().cost_shape(self.seq_length, self.task, self.tensor_model_parallel_size)

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

    def new_batches(
        self, samples: Samples | SampleStream, data: Communicator, path: str, kind: str = ""
    ) -> GlobalBatches[Any]:
        """The batches of ``samples`` for a rank of ``data``, the data group. path, kind: of them, for errors."""
        unusable = (
            f"a {kind}token lies outside the vocabulary of {self.vocab_size}: was {path} made with another tokenizer, "
            "or is --vocab-size too small?"
        )
        return self.batches(
            samples, size=self.batch_size(data.size), micro=self.samples_at_once, data=data,
            vocab_size=self.vocab_size, unusable=unusable,
        )  # fmt: skip

    def shape(self, kind: type[Any]) -> dict[str, Any]:
        """The fields of the model's configuration ``kind`` that are settings. ValueError without ``vocab_size``."""
        if self.vocab_size is None:
            raise ValueError("vocab_size is missing")
        return self.model_fields(kind) | {"max_position_embeddings": self.positions}

    def require_memory(self) -> None:
        """Raise UsageError if the parameters, or what a layer keeps of a micro-batch, exceed all memory of a machine.

        A lower bound, so that no run that is possible is refused: weights and gradients in the parameters' dtype, the
        input of each layer (of one layer with full recomputation), and nothing else. The heads of a BERT count, which
        are small, also those that it may lack. Stages of a pipeline count as equal.
        """
        assert self.vocab_size is not None
        tensor, element = self.tensor_model_parallel_size, 2 if self.bf16 or self.fp16 else 4
        width = self.hidden_size
        stages = self.pipeline_model_parallel_size
        shape = self.model().cost_shape(self.positions, self.task, tensor)
        weights = formulas.parameters(shape, tensor, expert=self.expert_ranks) / stages
        kept = 1 if self.recompute_granularity == "full" else self.num_layers // stages
        shares = self.context_parallel_size * (tensor if self.sequence_parallel else 1)
        inputs = kept * self.micro_batch_size * self.seq_length * width // shares
        there = machine_memory(self.device)
        for needed, what in (
            (2 * element * weights, f"weights and gradients of {weights:.3g} parameters: --hidden-size {width}, "
             f"--num-layers {self.num_layers}, --vocab-size {self.vocab_size}, --max-position-embeddings "
             f"{self.positions}"),
            (element * inputs, f"the inputs of its layers, for --micro-batch-size {self.micro_batch_size} times "
             f"--seq-length {self.seq_length} tokens of --hidden-size {width}"),
        ):  # fmt: skip
            message = f"the model needs {needed / 1e9:,.1f} GB a rank for {what}; the machine has {there / 1e9:,.1f} GB"
            require(needed <= there, message)

    def batch_size(self, replicas: int) -> int:
        """The samples of a global batch on ``replicas`` data-parallel ranks."""
        return self.global_batch_size or self.micro_batch_size * replicas


def require_split(shape: TransformerConfig, settings: TrainConfig, ranks: int) -> None:
    """Raise UsageError, with the sizes that would work, unless a model of ``shape`` splits over ``ranks`` ranks.

    settings: of the command, which have the tensor-parallel size and the options that the message names.
    """
    try:
        shape.require_parallel(settings.tensor_model_parallel_size, ranks=ranks)
    except ValueError as error:
        words = str(error).replace("tensor-model-parallel size", "--tensor-model-parallel-size")
        padded = "--vocab-size, padded to a multiple of --make-vocab-size-divisible-by: "
        words = words.replace("padded_vocab_size=", padded).replace("ranks=", "ranks: ")
        fits = shape.pad_attention_heads or shape.num_attention_heads % settings.tensor_model_parallel_size == 0
        hint = "" if fits else "; --pad-attention-heads adds heads of zeros"
        raise UsageError(as_flags(words, type(settings)) + hint) from error


def machine_memory(device: str | None) -> int:
    """The bytes of memory of this machine, or of its first CUDA device; the larger if ``device`` leaves the choice."""
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if device == "cpu" or not torch.cuda.is_available():
        return host
    there = int(torch.cuda.get_device_properties(0).total_memory)
    return there if device is not None else max(there, host)
