"""Models that other programs saved: what every reader of such files gives, and which files an option names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from tplayers import Placement, TransformerConfig


class OtherModel(Protocol):
    """A model in the files of another program.

    kind: "gpt" or "bert". settings: those of `GPTTrainConfig` or `BERTTrainConfig` that its files tell, by name.
    dtype: of its parameters, the widest if they differ.
    """

    @property
    def kind(self) -> str: ...

    @property
    def settings(self) -> dict[str, Any]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def parts(
        self, config: TransformerConfig, placements: Mapping[str, Placement]
    ) -> Mapping[str, Callable[[Tensor], None]]:
        """For each of our parameters, by name, a function that fills a host tensor with this rank's part of it.

        config: of our model. placements: of its parameters. A tensor has the local shape and any dtype and strides.
        Rows of vocabulary padding become 0. Nothing is read yet, but names and shapes are compared.

        Raises ValueError, with the names, if tensors are missing, have other shapes, or have no place in the model.
        The functions raise ValueError, naming the file, and OSError. Not collective.
        """

    def close(self) -> None:
        """Close the files."""


def fill_vocabulary(target: Tensor, placement: Placement, rows: int, fill: Callable[[Tensor, int], None]) -> None:
    """Fill this rank's rows of a tensor whose first dimension is the padded vocabulary; rows of padding become 0.

    rows: of the vocabulary without padding. fill: called with the rows of ``target`` that are no padding, and with the
    number of the first of them; not if there are none.
    """
    first = placement.index * len(target) if placement.sharded else 0
    real = max(0, min(len(target), rows - first))
    target[real:].zero_()
    if real:
        fill(target[:real], first)
