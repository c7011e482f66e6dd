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

    def their_names(self, name: str) -> str:
        """The tensors of the files in which our parameter ``name`` lies, by their names there, for people."""

    def close(self) -> None:
        """Close the files."""
