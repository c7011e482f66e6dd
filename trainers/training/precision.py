"""Half precision: the dtype of parameters, and the scale of an fp16 loss."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from commengine import Communicator, UsageError


def parameter_dtype(*, bf16: bool, fp16: bool) -> torch.dtype:
    """The dtype of the model's parameters and activations."""
    return torch.bfloat16 if bf16 else torch.float16 if fp16 else torch.float32


@dataclass(frozen=True)
class LossScaler:
    """The factor of an fp16 loss, so that small gradients do not vanish: a state and its transitions.

    ``window`` good steps in a row double the scale. An overflow skips its step. The first ``hysteresis - 1`` overflows
    since the scale last grew do not change it; each later overflow halves it, but not below ``minimum`` (Micikevicius
    et al. 2018, section 3.2, with Megatron-LM's hysteresis). window: None for a constant scale.
    """

    scale: float
    window: int | None = 1000
    hysteresis: int = 2
    minimum: float = 1.0
    good_steps: int = 0
    overflows: int = 0

    def after(self, *, overflow: bool) -> LossScaler:
        """The scaler after one more step. Raises UsageError for an overflow at the smallest scale."""
        if self.window is None:
            return self
        if not overflow:
            if self.good_steps + 1 < self.window:
                return replace(self, good_steps=self.good_steps + 1)
            return replace(self, scale=2 * self.scale, good_steps=0, overflows=0)
        if self.overflows + 1 < self.hysteresis:
            return replace(self, good_steps=0, overflows=self.overflows + 1)
        if self.scale <= self.minimum:
            raise UsageError(
                f"the fp16 gradients overflow at a loss scale of {self.scale:g}, and --min-loss-scale {self.minimum:g} "
                "allows no smaller one: the run has diverged, or the model needs --bf16 or a smaller --min-loss-scale"
            )
        return replace(self, scale=max(self.scale / 2, self.minimum), good_steps=0)

    def to_json(self) -> dict[str, Any]:
        """The state, without the settings."""
        return {"scale": self.scale, "good_steps": self.good_steps, "overflows": self.overflows}

    def from_json(self, state: dict[str, Any]) -> LossScaler:
        """These settings with a saved ``state``. A constant scale does not change."""
        return self if self.window is None else replace(self, **state)


def on_any_rank(mine: bool, *groups: Communicator) -> bool:
    """Whether ``mine`` is true on any rank of a grid whose dimensions are ``groups``. Collective over each group."""
    flag = torch.tensor([int(mine)], dtype=torch.int64, device="cpu")
    for group in groups:
        group.all_reduce(flag, "max")
    return bool(flag)
