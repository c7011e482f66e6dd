"""The settings that every transformer shares in its training."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch

from commengine import UsageError, cost
from tplayers import TransformerConfig
from tplayers.attention.self_attention import DROPOUT_MASKS
from trainers import presets
from trainers.config import TrainConfig, of_other_program
from trainers.data.corpus import TextConfig
from trainers.options import (
    ABOVE_ZERO,
    FRACTION,
    HEADS,
    LAYERS,
    LENGTH,
    NOT_EMPTY,
    NOT_NEGATIVE,
    VOCABULARY,
    WIDTH,
    as_flags,
    between,
    given,
    option,
    require,
)
from trainers.weights.opening import open_other
from trainers.weights.other_model import OtherModel

from .other_models import require_same, settings_of_load
from .same_bits import SameBitsConfig


@dataclass(frozen=True)
class TransformerTrainConfig(SameBitsConfig, TextConfig, ABC):
    """A training run of a transformer on text: the settings that GPT and BERT share. A subclass gives `model`.

    task: the kind of model whose presets the run may name (`trainers.presets`).
    """

    task: ClassVar[str]

    load: str | None = option(
        None,
        "continue from the newest checkpoint of this folder, or from this iter_* folder; it is an error if there is no "
        "checkpoint, unless this is also the folder of --save: then a new run starts. hf:FOLDER or megatron:FOLDER "
        "starts a new run with the weights, the shape and the tokenizer of another program's model",
        valid=NOT_EMPTY,
        sets=settings_of_load,
    )
    hf_files: str | None = option(
        None, "folder of Hugging Face whose config.json and tokenizer the exports repeat (default: that of --load)",
        valid=NOT_EMPTY,
    )  # fmt: skip
    preset: str | None = option(
        None, "a model of the paper with its recipe; other flags and --config win. list prints them",
        sets=lambda settings, name, _: presets.settings(name, settings.task),
    )  # fmt: skip
    num_layers: int = option(12, "transformer layers", valid=LAYERS, fixed=True)
    hidden_size: int = option(768, "width of the residual stream", valid=WIDTH, fixed=True)
    num_attention_heads: int = option(12, "attention heads", valid=HEADS, fixed=True)
    ffn_hidden_size: int | None = option(
        None, "width of the feed-forward block (default 4 * hidden size)", valid=WIDTH, fixed=True
    )
    max_position_embeddings: int | None = option(
        None, "positions that the model knows (default seq-length)", valid=LENGTH, fixed=True,
        default_of="seq_length",
    )  # fmt: skip
    hidden_dropout: float = option(0.1, "dropout on the embedding and after each branch", valid=FRACTION)
    attention_dropout: float = option(0.1, "dropout on attention probabilities", valid=FRACTION)
    attention_dropout_mask: str = option(
        "position",
        "how attention dropout draws its mask: by position, the same at every parallel size, or in the fused kernel, "
        "which is faster on devices",
        choices=DROPOUT_MASKS,
    )
    pad_attention_heads: bool = option(
        False, "pad heads that the tensor-parallel size does not divide with heads of zeros"
    )
    init_method_std: float = option(
        0.02, "standard deviation of the initial weights", valid=(NOT_NEGATIVE, between(0, 1000))
    )
    norm_epsilon: float = option(1e-5, "added to the variance in all norms", valid=ABOVE_ZERO, fixed=True)
    make_vocab_size_divisible_by: int = option(
        1024, "pad the vocabulary to a multiple of this, at every TP size", valid=VOCABULARY, fixed=True
    )
    recompute_granularity: str | None = option(
        None,
        "compute again in the backward instead of keeping in memory: each whole layer, the inside of attention, or "
        "nothing (default none)",
        choices=("full", "selective", "none"),
    )

    dry_run: bool = option(False, "print the memory of a rank and the predicted time of a step, and train nothing")
    cost_model: str | None = option(
        None, "with --dry-run: a model of bench.fit or bench.study, for the time of the collectives", valid=NOT_EMPTY
    )

    @property
    def positions(self) -> int:
        """The number of positions that the model knows."""
        return self.max_position_embeddings or self.seq_length

    def validate(self, ranks: int) -> None:
        """Raise UsageError, naming the option and what is valid, unless this run is possible on ``ranks`` ranks."""
        if self.preset is not None:
            presets.require_ranks(self.preset, ranks, self.tensor_model_parallel_size)
        try:
            super().validate(ranks)
            longest = given(self, "max_position_embeddings")
            require(self.seq_length <= self.positions, f"{given(self, 'seq_length')}: must not exceed {longest}")
        except UsageError as error:
            raise UsageError(f"{error}{presets.origin(self.preset, str(error))}") from error
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
        compiles = self.attention_dropout_mask == "position" or self.attention_dropout == 0 or not self.compile
        require(
            compiles,
            f"{given(self, 'attention_dropout_mask')}: excludes --compile, because a compiled graph cannot seed the "
            "mask of each layer; leave one of them out",
        )

    def completed(self, ranks: int) -> Self:
        """The settings with the vocabulary's size. Raises UsageError if the model does not split over the ranks."""
        config = super().completed(ranks)
        if config.dry_run and config.load is not None and of_other_program(config.load):
            config.open_other().close()  # a run opens it when its trainer is made
        config.require_split(ranks)
        config.require_shards(config.model())
        config = replace(config, deterministic_shards=config.canonical_shards)
        config.require_memory(ranks)
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

    def shape(self) -> dict[str, Any]:
        """The fields of the model's configuration that all transformers have, by name. ``vocab_size`` must be known."""
        assert self.vocab_size is not None
        recompute = None if self.recompute_granularity == "none" else self.recompute_granularity
        return {
            "num_layers": self.num_layers, "hidden_size": self.hidden_size,
            "num_attention_heads": self.num_attention_heads, "vocab_size": self.vocab_size,
            "max_position_embeddings": self.positions, "ffn_hidden_size": self.ffn_hidden_size,
            "hidden_dropout": self.hidden_dropout, "attention_dropout": self.attention_dropout,
            "init_method_std": self.init_method_std, "norm_epsilon": self.norm_epsilon,
            "make_vocab_size_divisible_by": self.make_vocab_size_divisible_by,
            "sequence_parallel": self.sequence_parallel, "recompute": recompute,
            "attention_dropout_mask": self.attention_dropout_mask, "pad_attention_heads": self.pad_attention_heads,
        }  # fmt: skip

    def require_memory(self, ranks: int) -> None:
        """Raise UsageError if the parameters, or what a layer keeps of a micro-batch, exceed all memory of a machine.

        A lower bound, so that no run that is possible is refused: weights and gradients in the parameters' dtype, the
        input of each layer (of one layer with full recomputation), and nothing else. The heads of a BERT count, which
        are small, also those that it may lack.
        """
        assert self.vocab_size is not None
        tensor, element = self.tensor_model_parallel_size, 2 if self.bf16 or self.fp16 else 4
        width = self.hidden_size
        weights = cost.parameters(self.model().cost_shape(self.positions, self.task, tensor), tensor)
        kept = 1 if self.recompute_granularity == "full" else self.num_layers
        inputs = kept * self.micro_batch_size * self.seq_length * width // (tensor if self.sequence_parallel else 1)
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
