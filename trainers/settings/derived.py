"""What follows from several options of a command. An option that a command lacks counts as its default.

Each function takes the settings of a command (`commands`), or of another one with their records.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, Protocol, TypeVar

from .layout import METHODS

Settings = TypeVar("Settings", bound=Any)


class _Device(Protocol):
    """A torch.device, which this room does not import."""

    @property
    def type(self) -> str: ...


# The layout ---------------------------------------------------------------------------------------------------------


def stages(settings: Any) -> int:
    """The stages of the pipeline."""
    return getattr(settings, "pipeline_model_parallel_size", 1)


def context_ranks(settings: Any) -> int:
    """The ranks that share a sequence."""
    return getattr(settings, "context_parallel_size", 1)


def expert_ranks(settings: Any) -> int:
    """The ranks that share experts."""
    return getattr(settings, "expert_model_parallel_size", 1)


def replica_size(settings: Any) -> int:
    """The ranks that share a model and its samples. The ranks are this number times the data-parallel size."""
    return int(settings.tensor_model_parallel_size * context_ranks(settings) * stages(settings))


def layers(settings: Any) -> int:
    """The layers of all stacks."""
    return int(settings.num_layers * settings.stacks)


def chunks(settings: Any) -> int:
    """The stretches of layers of a stage."""
    each = settings.num_layers_per_virtual_pipeline_stage
    return 1 if each is None else layers(settings) // (settings.pipeline_model_parallel_size * each)


def threaded_messages(settings: Any) -> bool:
    """Whether a pipeline's messages have threads of their own."""
    return bool(getattr(settings, "overlap_p2p_communication", None))


def context_method(settings: Any) -> str:
    """The method of `tplayers.ContextGroup`."""
    return METHODS[settings.cp_comm_type or "a2a"]


# The same bits ------------------------------------------------------------------------------------------------------


def canonical_shards(settings: Any) -> int | None:
    """The shards in which the model computes the same bits at every layout; None: it does not."""
    if not getattr(settings, "deterministic", False):
        return None
    least = settings.tensor_model_parallel_size * context_ranks(settings)
    asked: int | None = settings.deterministic_shards
    return asked or max(4, 1 << (least - 1).bit_length())


def canonical_parts(settings: Any) -> int:
    """The parts of a sequence in which the model computes the same bits at every layout."""
    return settings.deterministic_parts or context_ranks(settings)


def with_canonical_sizes(settings: Settings) -> Settings:
    """The settings, with the shards and the parts of a run of ``--deterministic`` that names none."""
    shards = canonical_shards(settings)
    if shards is None:
        return settings
    return replace(settings, deterministic_shards=shards, deterministic_parts=canonical_parts(settings))


def order(settings: Any) -> Literal["tree"] | None:
    """The order of the job's reductions (`commengine.Communicator`); None: as is fastest."""
    return "tree" if getattr(settings, "deterministic", False) else None


# A teacher ----------------------------------------------------------------------------------------------------------

#: what ``--student-layers`` says for no layers, where a preset names some
NO_LAYERS = "none"


def student_layers(settings: Any) -> str | None:
    """The layers of the teacher from which a run starts; None for none."""
    asked: str | None = settings.student_layers
    return None if asked == NO_LAYERS else asked


# Steps --------------------------------------------------------------------------------------------------------------


def samples_at_once(settings: Any) -> int:
    """The samples of a micro-batch that goes through the model: one, where the bits may not depend on their number."""
    return 1 if getattr(settings, "deterministic", False) else int(settings.micro_batch_size)


def batch_size(settings: Any, replicas: int) -> int:
    """The samples of a global batch on ``replicas`` data-parallel ranks."""
    return int(settings.global_batch_size or settings.micro_batch_size * replicas)


def warmup_steps(settings: Any) -> int:
    """The steps over which the learning rate rises."""
    return settings.lr_warmup_iters or 0


def last_lr(settings: Any) -> float:
    """The learning rate at the end of the decay."""
    return float(min(1e-5, settings.lr) if settings.min_lr is None else settings.min_lr)


def least_loss_scale(settings: Any) -> float:
    """The smallest dynamic scale of the fp16 loss."""
    given = settings.min_loss_scale
    return float(min(1.0, settings.initial_loss_scale) if given is None else given)


def positions(settings: Any) -> int:
    """The number of positions that the model knows."""
    return int(settings.max_position_embeddings or settings.seq_length)


# Files --------------------------------------------------------------------------------------------------------------


def newest_kept(settings: Any) -> int | None:
    """How many of the newest checkpoints stay; None: all. A run that keeps its best one keeps one more."""
    keeps_best = getattr(settings, "keeps_best", False) and settings.save is not None
    return 1 if settings.keep_last is None and keeps_best else settings.keep_last


def writes_digests(settings: Any) -> bool:
    """Whether metrics.jsonl gets the digests of every step."""
    return settings.log_digests or canonical_shards(settings) is not None


# Defaults of a device ------------------------------------------------------------------------------------------------


def overlapped(asked: bool | None, device: _Device) -> bool:
    """Whether to communicate while computing: ``asked``, or if that is None, on devices only.

    On the host the ranks already use all cores, so overlap would take time from the computation.
    """
    return device.type != "cpu" if asked is None else asked


def traced_interval(asked: int | None, device: _Device, steps: int) -> int:
    """Each how many steps one is traced, 0 for none: ``asked``, or if that is None, one for the device.

    steps: of the run. The end of a trace waits for a device. So the device idles after each traced step, and nothing
    that the step has begun can overlap the next one.
    """
    if asked is not None:
        return asked
    return 1 if device.type == "cpu" else min(100, steps)


def bucket_size(asked: int | None, device: _Device, ranks: int) -> int:
    """The largest number of elements of a gradient bucket: ``asked``, or if that is None, one for the device.

    ranks: of the data group. A ring cuts a bucket into a piece for each of them, and a link is used well by large
    pieces only. The sizes on devices are those of Megatron-LM (its `DistributedDataParallel`).
    """
    if asked is not None:
        return asked
    return 4_000_000 if device.type == "cpu" else max(40_000_000, 1_000_000 * ranks)
