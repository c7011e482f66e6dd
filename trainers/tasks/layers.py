"""LayerConfig: the settings of the layers of a transformer, however it is trained."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

from commengine.options.declared import given, option, require
from commengine.options.ranges import NOT_NEGATIVE, Share, between
from tplayers import TransformerConfig
from tplayers.attention.self_attention import DROPOUT_MASKS
from trainers.config import TrainConfig


@dataclass(frozen=True)
class LayerConfig(TrainConfig):
    """A training run of a transformer. A subclass has the sizes of the model, too."""

    hidden_dropout: Share = option(0.1, "dropout on the embedding, after each branch, and on a pooled vector")
    attention_dropout: Share = option(0.1, "dropout on attention probabilities")
    attention_dropout_mask: str = option(
        "position",
        "how attention dropout draws its mask: by position, the same at every parallel size, or in the fused kernel, "
        "which is faster on devices",
        choices=DROPOUT_MASKS,
    )
    pad_attention_heads: bool = option(
        False, "pad heads that the tensor-parallel size does not divide with heads of zeros"
    )
    init_method_std: Annotated[float, NOT_NEGATIVE, between(0, 1000)] = option(
        0.02, "standard deviation of the initial weights"
    )
    recompute_granularity: str | None = option(
        None,
        "compute again in the backward instead of keeping in memory: each whole layer, the inside of attention, or "
        "nothing (default none)",
        choices=("full", "selective", "none"),
    )

    def validate(self, ranks: int) -> None:
        """Raise UsageError, naming the option and what is valid, unless this run is possible on ``ranks`` ranks."""
        super().validate(ranks)
        require(
            self.attention_dropout_mask == "position" or self.attention_dropout == 0 or not self.compile,
            f"{given(self, 'attention_dropout_mask')}: excludes --compile, because a compiled graph cannot seed the "
            "mask of each layer; leave one of them out",
        )

    def model_fields(self, kind: type[TransformerConfig]) -> dict[str, Any]:
        """The fields of the model's configuration ``kind`` that are settings of the same name. They must be known."""
        found = {item.name: getattr(self, item.name) for item in fields(kind) if hasattr(self, item.name)}
        return found | {"recompute": None if self.recompute_granularity == "none" else self.recompute_granularity}
