"""The settings of the training commands: the records that each has, the last one first in its help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from .data import CorpusOptions
from .distillation import DistillationOptions
from .job import JobOptions
from .layout import ComputationOptions, ContextOptions, StageOptions
from .model import (
    DecoderOptions,
    EncoderDecoderOptions,
    EncoderOptions,
    LayerOptions,
    MixtureOptions,
    TransformerOptions,
)
from .precision import PrecisionOptions, ReductionOptions
from .same_bits import SameBitsOptions
from .saving import CheckOptions, SavingOptions
from .steps import OptimizerOptions, StepOptions


@dataclass(frozen=True)
class TrainSettings(
    CheckOptions, SavingOptions, ReductionOptions, PrecisionOptions, OptimizerOptions, StepOptions, ComputationOptions,
    JobOptions,
):  # fmt: skip
    """What every training command has. kind: of its runs, which their checkpoints say."""

    kind: ClassVar[str | None] = None
    stacks: ClassVar[int] = 1


@dataclass(frozen=True)
class GPTSettings(
    DistillationOptions, DecoderOptions, TransformerOptions, SameBitsOptions, ContextOptions, StageOptions,
    LayerOptions, CorpusOptions,
    MixtureOptions, TrainSettings,
):  # fmt: skip
    """The settings of `trainers.pretrain_gpt`."""

    kind: ClassVar[str] = "gpt"
    causal: ClassVar[bool] = True


@dataclass(frozen=True)
class BERTSettings(
    DistillationOptions, EncoderOptions, TransformerOptions, SameBitsOptions, ContextOptions, StageOptions,
    LayerOptions, CorpusOptions,
    TrainSettings,
):  # fmt: skip
    """The settings of `trainers.pretrain_bert`."""

    kind: ClassVar[str] = "bert"
    causal: ClassVar[bool] = False


@dataclass(frozen=True)
class T5Settings(
    EncoderDecoderOptions, TransformerOptions, SameBitsOptions, ContextOptions, StageOptions, LayerOptions,
    CorpusOptions, TrainSettings,
):  # fmt: skip
    """The settings of `trainers.pretrain_t5`."""

    kind: ClassVar[str] = "t5"
    causal: ClassVar[bool] = False
    stacks: ClassVar[int] = 2


#: kind: of the model. causal: a position sees the earlier ones only. stacks: of ``num_layers`` layers each
TransformerSettings: TypeAlias = GPTSettings | BERTSettings | T5Settings
