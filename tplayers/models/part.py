"""ModelPart: the layers of a model that one rank has, and what comes into them from the rank before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class StageInput(NamedTuple):
    """What a forward through one chunk of a part begins with.

    chunk: its number on this rank. received: the activations of the layer before, [s, b, h], or with sequence
    parallelism this rank's shard of them; None for the chunk that has the embedding.
    """

    chunk: int = 0
    received: Tensor | None = None


@dataclass(frozen=True)
class ModelPart:
    """The layers of a rank: a pipeline stage (Narayanan et al. 2021, section 2.2).

    layers: those of the whole model. chunks: the numbers of this rank's from 0, one range for each stretch of
    neighbouring layers, at least one and in ascending order; nothing checks them. The embedding belongs to layer 0. The
    final norm, the output layer and the heads belong to the last layer, which has a copy of a tied embedding.
    """

    layers: int
    chunks: tuple[range, ...]

    @classmethod
    def whole(cls, layers: int) -> ModelPart:
        """All layers, in one chunk."""
        return cls(layers, (range(layers),))

    @property
    def numbers(self) -> list[int]:
        """The numbers of all layers, in order."""
        return [number for chunk in self.chunks for number in chunk]

    @property
    def first(self) -> bool:
        """Whether the embedding is here."""
        return self.chunks[0].start == 0

    @property
    def last(self) -> bool:
        """Whether the output layer is here."""
        return self.chunks[-1].stop == self.layers

    def chunk_of(self, name: str) -> int:
        """The number of the chunk that has the parameter ``name``, which is one of this part."""
        group, _, rest = name.partition(".")
        if group == "layers":
            number = int(rest.partition(".")[0])
            return next(chunk for chunk, numbers in enumerate(self.chunks) if number in numbers)
        return 0 if self.first else len(self.chunks) - 1

    def begins(self, at: StageInput) -> bool:
        """Whether the embedding comes first. Raises ValueError if the input is missing, or is one too many."""
        begins = self.chunks[at.chunk].start == 0
        if begins != (at.received is None):
            raise ValueError(
                "the model begins with tokens here, and has no input from a layer before"
                if begins
                else f"layer {self.chunks[at.chunk].start} needs the activations of the layer before (StageInput)"
            )
        return begins

    def ends(self, at: StageInput) -> bool:
        """Whether the output layer follows this chunk."""
        return self.chunks[at.chunk].stop == self.layers
