"""Models of the literature, and the ways to spread a training step over devices."""

from __future__ import annotations

from dataclasses import dataclass

from commengine.cost import TransformerShape
from trainers.presets import PRESETS

#: models by the short names of --model: the GPTs of Shoeybi et al. 2019 (8.3b is Table 1's, with 32 heads), and GPT-3
MODELS = {
    "355m": PRESETS["gpt-355m"].shape(),
    "1.2b": PRESETS["gpt-1.2b"].shape(),
    "2.5b": PRESETS["gpt-2.5b"].shape(),
    "4.2b": PRESETS["gpt-4.2b"].shape(),
    "8.3b": PRESETS["gpt-8.3b-32-heads"].shape(),
    "175b": TransformerShape(96, 12288, 96, 2048, 51200),
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
