"""What is predicted of a training step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PredictedStep:
    """A predicted step.

    seconds: seconds per part, without hidden communication. hidden: seconds of the gradients' reduction that run beside
    the backward. memory: bytes of a device per part. flops: FLOPs of all devices as Megatron-LM counts them, with
    recomputation and with the whole square of causal attention. computed: those of the products that the kernels
    compute; of causal attention's square a fused kernel computes a half. fullest: the stage that needs most memory,
    which ``memory`` is. The parts of a pipeline's step are those of its busiest stage, with "bubble" and
    "pipeline_communication", which it waits for other stages and for messages. "context_communication" is there if
    ranks share sequences.
    """

    seconds: dict[str, float]
    hidden: float
    memory: dict[str, float]
    flops: float
    ranks: int
    fullest: int = 0
    computed: float = 0.0

    @property
    def total(self) -> float:
        """The seconds of the step."""
        return sum(self.seconds.values())

    @property
    def flops_per_device(self) -> float:
        """FLOP/s of a device as Megatron-LM counts them, which may be more than a device can compute."""
        return self.flops / self.total / self.ranks

    @property
    def computed_per_device(self) -> float:
        """FLOP/s that a device computes."""
        return self.computed / self.total / self.ranks

    @property
    def communication(self) -> float:
        """The share of the step during which a device waits for a collective or a message."""
        waited = self.seconds["tensor_communication"] + self.seconds["data_communication"]
        more = ("context_communication", "pipeline_communication")
        return (waited + sum(self.seconds.get(part, 0.0) for part in more)) / self.total

    @property
    def memory_total(self) -> float:
        """The bytes of a device."""
        return sum(self.memory.values())
