"""Models of the literature, and the ways to spread a training step over devices."""

from __future__ import annotations

from dataclasses import dataclass

from commengine.cost import TransformerShape

MODELS = {
    "355m": TransformerShape(24, 1024, 16, 1024, 51200),  # Shoeybi et al. 2019, Table 2
    "1.2b": TransformerShape(40, 1536, 16, 1024, 51200),  # Table 1
    "2.5b": TransformerShape(54, 1920, 20, 1024, 51200),
    "4.2b": TransformerShape(64, 2304, 24, 1024, 51200),
    "8.3b": TransformerShape(72, 3072, 32, 1024, 51200),
    "175b": TransformerShape(96, 12288, 96, 2048, 51200),  # GPT-3
}


@dataclass(frozen=True)
class Layout:
    """How a step is spread over tensor x data ranks, and what it keeps.

    Each rank runs ``micro_batches`` x ``micro_batch`` samples. hidden_dropout, attention_dropout: whether there is such
    dropout. position_mask: attention dropout draws its mask as a function of position, so no fused kernel computes
    attention (``--attention-dropout-mask position``).
    """

    tensor: int = 1
    data: int = 1
    micro_batch: int = 8
    micro_batches: int = 1
    recompute: str = "none"
    sequence_parallel: bool = False
    zero1: bool = False
    hidden_dropout: bool = True
    attention_dropout: bool = True
    position_mask: bool = False

    @property
    def ranks(self) -> int:
        """The number of devices."""
        return self.tensor * self.data

    @property
    def batch(self) -> int:
        """The sequences of a step, over all devices."""
        return self.data * self.micro_batch * self.micro_batches
