"""Models that other programs saved: what every reader of such files gives, and which files an option names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from tplayers import BERTConfig, GPTConfig, Placement


class OtherModel(Protocol):
    """A model in the files of another program.

    config: its shape; the vocabulary may be padded otherwise. dtype: of its parameters, the widest if they differ.
    """

    config: GPTConfig | BERTConfig
    dtype: torch.dtype

    def parts(
        self, config: GPTConfig | BERTConfig, placements: Mapping[str, Placement]
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


#: the words with which an option names files of another program: ``hf:FOLDER``
PREFIXES = ("hf", "megatron")


def named(option: str) -> tuple[str, Path] | None:
    """("hf", FOLDER) for ``hf:FOLDER``; None for a path without such a word."""
    word, colon, path = option.partition(":")
    return (word, Path(path)) if colon and word in PREFIXES else None
