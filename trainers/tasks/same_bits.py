"""SameBitsConfig: the settings of runs whose bits do not depend on the layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from commengine.host.wire import Order
from commengine.options.declared import flag_of, given, option, require
from commengine.options.ranges import AtLeastOne
from tplayers import TransformerConfig
from trainers.config import TrainConfig


@dataclass(frozen=True)
class SameBitsConfig(TrainConfig):
    """A training run that may have the same bits at every layout (``--deterministic``)."""

    deterministic: bool = option(False, "the same bits at every layout of the ranks: see docs/same-bits.md")
    deterministic_shards: AtLeastOne | None = option(
        None, "with --deterministic: shards in which the model computes, a power of two that the tensor-parallel size "
        "divides (default: the smallest one from 4 on); with context groups that the product of both sizes divides",
    )  # fmt: skip
    deterministic_parts: AtLeastOne | None = option(
        None, "with --deterministic: parts of each sequence in which the model computes, a power of two that the "
        "context-parallel size divides (default: that size)",
    )  # fmt: skip

    @property
    def canonical_shards(self) -> int | None:
        """See `TrainConfig.canonical_shards`."""
        if not self.deterministic:
            return None
        least = self.tensor_model_parallel_size * self.context_ranks
        return self.deterministic_shards or max(4, 1 << (least - 1).bit_length())

    @property
    def canonical_parts(self) -> int:
        """The parts of a sequence in which the model computes the same bits at every layout."""
        return self.deterministic_parts or self.context_ranks

    def with_canonical_sizes(self) -> Self:
        """These settings, with the shards and the parts of a run of ``--deterministic`` that names none."""
        if self.canonical_shards is None:
            return self
        return replace(self, deterministic_shards=self.canonical_shards, deterministic_parts=self.canonical_parts)

    @property
    def order(self) -> Order | None:
        """See `JobConfig.order`."""
        return "tree" if self.deterministic else None

    @property
    def samples_at_once(self) -> int:
        """See `TrainConfig.samples_at_once`: one, where the bits may not depend on their number."""
        return 1 if self.deterministic else self.micro_batch_size

    def validate(self, ranks: int) -> None:
        """Raise UsageError, naming the option and what is valid, unless this run is possible on ``ranks`` ranks."""
        super().validate(ranks)
        shards = self.canonical_shards
        if shards is None:
            for name in ("deterministic_shards", "deterministic_parts"):
                require(getattr(self, name) is None, f"{given(self, name)}: needs --deterministic")
            return
        tensor = self.tensor_model_parallel_size
        replicas = ranks // self.replica_size
        named = f"--deterministic-shards {shards}"
        require(shards.bit_count() == 1, f"{named}: must be a power of two")
        require(
            shards % tensor == 0,
            f"{given(self, 'tensor_model_parallel_size')}: does not divide {named}, as --deterministic needs",
        )
        context, parts = self.context_ranks, self.canonical_parts
        require(
            shards % (tensor * context) == 0,
            f"--context-parallel-size {context}: times {given(self, 'tensor_model_parallel_size')} it does not divide "
            f"{named}, as --deterministic needs",
        )
        require(
            parts.bit_count() == 1,
            f"--deterministic-parts {parts}: must be a power of two that --context-parallel-size {context} divides",
        )
        require(
            parts % context == 0, f"--context-parallel-size {context}: does not divide --deterministic-parts {parts}"
        )
        require(
            not self.sequence_parallel or tensor == 1 or parts == context,
            f"--deterministic-parts {parts}: excludes --sequence-parallel, unless it is the --context-parallel-size",
        )
        require(replicas.bit_count() == 1, f"--deterministic: {replicas} data-parallel ranks are not a power of two")
        require(not self.compile, "--deterministic: excludes --compile, which orders sums as it likes")
        require(
            self.global_batch_size is not None,
            "--deterministic: needs --global-batch-size, because the default depends on the number of ranks",
        )

    def require_shards(self, model: TransformerConfig) -> None:
        """Raise UsageError unless the canonical shards divide the sizes of ``model``."""
        shards = self.canonical_shards
        if shards is None:
            return
        sizes = {
            f"--num-attention-heads {model.num_attention_heads}": model.num_attention_heads,
            **{f"{flag_of(name)} {width}": width for name, width in model.ffn_widths.items()},
            f"--num-query-groups {model.query_groups}": model.query_groups,
            f"the padded vocabulary of {model.padded_vocab_size}": model.padded_vocab_size,
        }
        padded = "; --pad-attention-heads pads for the tensor-parallel size, and not for them"
        for name, size in sizes.items():
            more = padded if model.pad_attention_heads and "heads" in name else ""
            require(size % shards == 0, f"{name}: is not a multiple of --deterministic-shards {shards}{more}")

    def require_resumable(self, saved: Mapping[str, Any]) -> None:
        """See `TrainConfig.require_resumable`: a run of ``--deterministic`` keeps its shards and its parts."""
        if self.canonical_shards is None:
            return
        now = {"deterministic_shards": self.canonical_shards, "deterministic_parts": self.canonical_parts}
        for name, value in now.items():
            # A run of before there were parts has one.
            before = saved.get(name) or (1 if saved.get("deterministic_shards") else None)
            require(
                before in (None, value),
                f"{flag_of(name)} {value}: its bits are not those of the run of --load, which has {before}; give "
                f"{flag_of(name)} {before}",
            )
