"""SameBitsConfig: the settings of runs whose bits do not depend on the layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from commengine.host.wire import Order
from tplayers import TransformerConfig
from trainers.config import TrainConfig
from trainers.options import AtLeastOne, given, option, require


@dataclass(frozen=True)
class SameBitsConfig(TrainConfig):
    """A training run that may have the same bits at every layout (``--deterministic``)."""

    deterministic: bool = option(
        False, "the same bits at every tensor-parallel and data-parallel size: see docs/same-bits.md"
    )
    deterministic_shards: AtLeastOne | None = option(
        None, "with --deterministic: shards in which the model computes, a power of two that the tensor-parallel size "
        "divides (default: the smallest one from 4 on)",
    )  # fmt: skip

    @property
    def canonical_shards(self) -> int | None:
        """See `TrainConfig.canonical_shards`."""
        if not self.deterministic:
            return None
        return self.deterministic_shards or max(4, 1 << (self.tensor_model_parallel_size - 1).bit_length())

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
            require(self.deterministic_shards is None, f"{given(self, 'deterministic_shards')}: needs --deterministic")
            return
        tensor = self.tensor_model_parallel_size
        replicas = ranks // self.replica_size
        named = f"--deterministic-shards {shards}"
        require(shards.bit_count() == 1, f"{named}: must be a power of two")
        require(
            shards % tensor == 0,
            f"{given(self, 'tensor_model_parallel_size')}: does not divide {named}, as --deterministic needs",
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
            f"--ffn-hidden-size {model.ffn_size}": model.ffn_size,
            f"--num-query-groups {model.query_groups}": model.query_groups,
            f"the padded vocabulary of {model.padded_vocab_size}": model.padded_vocab_size,
        }
        padded = "; --pad-attention-heads pads for the tensor-parallel size, and not for them"
        for name, size in sizes.items():
            more = padded if model.pad_attention_heads and "heads" in name else ""
            require(size % shards == 0, f"{name}: is not a multiple of --deterministic-shards {shards}{more}")

    def require_resumable(self, saved: Mapping[str, Any]) -> None:
        """See `TrainConfig.require_resumable`: a run of ``--deterministic`` keeps its shards."""
        before = saved.get("deterministic_shards")
        require(
            before is None or self.canonical_shards in (None, before),
            f"--deterministic-shards {self.canonical_shards}: its bits are not those of the run of --load, which has "
            f"{before}; give --deterministic-shards {before}",
        )
