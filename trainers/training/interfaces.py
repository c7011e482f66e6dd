"""The interfaces of what a trainer trains: an objective, and a source of batches.

A `trainers.training.trainer.Trainer` trains any ``nn.Module``. Parameters that layers of tplayers added know which part
of a global tensor they hold (`tplayers.Placement`); all other parameters are replicated, and must have the same values
on every rank. Everything else that the trainer needs to know stands in the two interfaces here, an `Objective` and a
`BatchSource`. `trainers.tasks.gpt` is an example of both. `require_same_settings` compares what stands in two places.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from commengine import ProcessGrid
from commengine.dtypes import HALF_TYPES
from commengine.rank_zero import on_every_rank
from tplayers import Randomness, TransformerConfig
from tplayers.canonical.shards import CanonicalShards
from trainers.settings import derived
from trainers.settings.commands import TrainSettings

from .precision import parameter_dtype


class Microbatch(Protocol):
    """The samples that one rank takes through the model at once."""

    @property
    def numbers(self) -> Sequence[int]:
        """The global number of each sample, from 0 over the whole run. Dropout masks are a function of it."""

    @property
    def counts(self) -> Sequence[int]:
        """For each term of the objective, the items of this microbatch that the term sums over. May be 0."""

    @property
    def usable(self) -> bool:
        """Whether the model can take these samples. If not, `BatchSource.unusable` says what is wrong."""

    def to(self, device: torch.device) -> Self:
        """The same microbatch with its tensors on ``device``."""


AnyMicrobatch = TypeVar("AnyMicrobatch", bound=Microbatch, contravariant=True)
SourceMicrobatch = TypeVar("SourceMicrobatch", bound=Microbatch, covariant=True)


class BatchSource(Protocol[SourceMicrobatch]):
    """The global batches of a run, cut into this rank's microbatches.

    All ranks of a tensor group get the same microbatches. Each rank of the data group gets its own, and all of them get
    the same number of microbatches, at least one: a rank that has no samples left gets microbatches that count nothing.
    """

    @property
    def size(self) -> int:
        """Samples of a global batch, over all ranks of the data group."""

    @property
    def unusable(self) -> str:
        """What is wrong if a microbatch is not usable, and what to do: an error message. It names no step."""

    def __call__(self, k: int) -> Iterable[SourceMicrobatch]:
        """This rank's microbatches of global batch ``k``, from 0: the same whenever they are asked for."""


@runtime_checkable
class ResumableBatchSource(Protocol):
    """A batch source whose batches depend on more than their number, such as on how much was read of each data set.

    Checkpoints keep what it records. A `BatchSource` may leave these methods out.
    """

    def record(self, k: int) -> dict[str, Any]:
        """What `continue_from` needs to go on after ``k`` global batches, as JSON types."""

    def continue_from(self, k: int, record: Mapping[str, Any]) -> list[str]:
        """Go on after ``k`` global batches. Every rank calls it with the same arguments.

        Returns lines for the user. Raises ValueError if the record is damaged.
        """


class FiniteBatchSource(BatchSource[SourceMicrobatch], Protocol[SourceMicrobatch]):
    """A source whose samples end, for evaluation: each sample is counted in one global batch, once."""

    def __len__(self) -> int:
        """Global batches that have samples."""


class Objective(Protocol[AnyMicrobatch]):
    """What a run minimizes: a sum of one or more mean losses, the terms.

    The mean of a term is taken over all its items in the global batch, wherever they are. The caller therefore gets the
    losses of a microbatch, adds them up, and divides by the count over the whole data group (`Microbatch.counts`); the
    mean of the ranks' means would be another number where the counts of the ranks differ, as those of masked tokens do.
    """

    @property
    def names(self) -> Sequence[str]:
        """The name of each term, as it stands in metrics.jsonl: ("lm_loss",) for GPT."""

    @property
    def unit(self) -> str:
        """The unit of the loss in messages and reports, such as "nats/token". The word after "/" is what is counted."""

    def __call__(self, model: Any, batch: AnyMicrobatch, randomness: Randomness | None) -> Sequence[Tensor]:
        """For each term its losses on ``batch``: a tensor of any shape, whose elements the caller adds up.

        An item that does not count has the loss 0. A scalar tensor, which is a sum already, is allowed.

        model: the module to call: the trainer's model, or in training its compiled form.
        randomness: what dropout draws from; None in evaluation.

        Every parameter must get a gradient in every backward, also from a microbatch that counts nothing (its gradient
        is 0). Every rank of the tensor group makes this call with the same arguments, and must get the same losses.
        """


def require_same_settings(config: TrainSettings, model: nn.Module, size: int, grid: ProcessGrid) -> None:
    """Raise UsageError, on all ranks, unless ``config`` and ``grid`` say of a model and its batches what these are.

    Compared are the fields that the configuration of a transformer shares with ``config``, such as
    ``sequence_parallel``; its groups and its part of the layers with ``grid``; the dtype of half-precision parameters;
    the canonical shards; and ``size``, the samples of a global batch. A setting of ``config`` that is None says
    nothing. Collective over the grid's world.
    """
    found = itertools.chain(_contradictions(config, model, size), _other_groups(model, grid))
    on_every_rank(grid.world, lambda: _raise_first(found))


def _raise_first(problems: Iterator[str]) -> None:
    for problem in problems:
        raise ValueError(problem)


def _contradictions(config: TrainSettings, model: nn.Module, size: int) -> Iterator[str]:
    own = getattr(model, "config", None)
    if isinstance(own, TransformerConfig):
        settings = {item.name: getattr(config, item.name) for item in fields(config)}
        for item in fields(own):
            asked, found = settings.get(item.name), getattr(own, item.name)
            if asked is not None and asked != found:
                yield f"{item.name}: {asked!r} in the settings of the run, and {found!r} in those of the model"
    wanted = parameter_dtype(bf16=config.bf16, fp16=config.fp16)
    for name, parameter in model.named_parameters():
        dtype = parameter.dtype
        if dtype != wanted and HALF_TYPES & {dtype, wanted} and dtype.is_floating_point:
            yield f"{name} is of {_name(dtype)}, and bf16={config.bf16}, fp16={config.fp16} need {_name(wanted)}"
    canonical = (getattr(module, "canonical", None) for module in model.modules())
    shards = {one.count for one in canonical if isinstance(one, CanonicalShards)}
    asked = derived.canonical_shards(config)
    of_run = set() if asked is None else {asked}
    if shards != of_run:
        shown = [", ".join(map(str, sorted(some))) or "none" for some in (of_run, shards)]
        yield f"canonical shards: {shown[0]} in the settings of the run, and {shown[1]} in the model"
    if config.global_batch_size not in (None, size):
        yield f"global_batch_size: {config.global_batch_size} in the settings of the run, and {size} in its batches"


def _other_groups(model: nn.Module, grid: ProcessGrid) -> Iterator[str]:
    if not isinstance(getattr(model, "config", None), TransformerConfig):
        return
    context, part, stages = getattr(model, "context", None), getattr(model, "part", None), grid.pipeline
    groups = {
        "tensor": (getattr(model, "comm", None), grid.tensor),
        "context": (None if context is None else context.comm, grid.context),
        "expert": (getattr(model, "expert_group", None), grid.expert),
    }
    for axis, (own, there) in groups.items():
        if own is not None and (own.size, own.rank) != (there.size, there.rank):
            said = f"rank {own.rank} of {own.size} in the model, and rank {there.rank} of {there.size} in the grid"
            yield f"the {axis} group: {said}"
    if part is not None and (part.first, part.last) != (stages.rank == 0, stages.rank == stages.size - 1):
        yield f"part: of layers {part.numbers} of {part.layers}, on stage {stages.rank} of {stages.size} of the grid"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
