"""WeightCopies: second copies of a model's weights, in the forms from which a few new tokens are computed fastest.

A new token of one text reads every weight once, and the host's memory sets the time. Two copies make it shorter, both
on the host and in float32 only:

====================  ===================================  ===========================================================
copy                  used                                 gain
====================  ===================================  ===========================================================
`OutputScreen`        up to 32 texts at a time, if only    the output layer is read in int8; the text does not change
                      the k largest logits count
packed weights        4 texts at a time or more            oneDNN's order: its product of 8 rows needs half of the time
                                                           of MKL's
====================  ===================================  ===========================================================
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeAlias

from torch import Tensor

from tplayers.embedding import VocabParallelEmbedding
from tplayers.linear import PACKED_ROWS, ColumnParallelLinear, RowParallelLinear, pack
from tplayers.models.gpt import GPT

from .output_screen import OutputScreen, available
from .sampling import Sampling

#: A copy is made for a call with so many tokens. If the weights are frozen, it is made for any call, and kept.
_WORTH_A_COPY = 16

#: the most texts, the most logits, and the fewest weights for which a screen gains time
_SCREENED_ROWS, _SCREENED_LOGITS, _SCREENED_WEIGHTS = 32, 256, 1 << 20

_State: TypeAlias = list[tuple[int, int]]


class WeightCopies:
    """The copies of one model's weights. They are made on first use, and again after the weights have changed.

    They are no part of the model: a copy or a pickle of the model has none.
    """

    def __init__(self) -> None:
        # A copy, the state of the weights that it was made of, and the weights: as long as they are held, no other
        # tensor can have their addresses.
        self._screen: tuple[OutputScreen, _State, list[Tensor]] | None = None
        self._packed: tuple[list[Tensor], _State, list[Tensor]] | None = None

    def __deepcopy__(self, memo: Any) -> WeightCopies:
        return WeightCopies()

    def __reduce__(self) -> tuple[type[WeightCopies], tuple[()]]:
        return WeightCopies, ()

    def screen(self, weight: Tensor, columns: int) -> OutputScreen:
        """The screen of ``weight`` [real, h], for logits [b, columns]."""
        state = _state([weight])
        if self._screen is None or self._screen[1] != state:
            self._screen = OutputScreen(weight, columns), state, [weight]
        return self._screen[0]

    def packed(self, weights: list[Tensor]) -> list[Tensor]:
        """The packed copies of ``weights``."""
        state = _state(weights)
        if self._packed is None or self._packed[1] != state:
            self._packed = [pack(weight) for weight in weights], state, weights
        return self._packed[0]


@contextlib.contextmanager
def fast_weights(model: GPT, rows: int, count: int, sampling: Sampling, real: int) -> Iterator[OutputScreen | None]:
    """A block in which ``model`` computes ``count`` new tokens of ``rows`` texts from copies of its weights.

    real: this rank's columns of the output layer that are no padding. Gives the screen of these, or None where there is
    none. The model's weights must not change in the block. It communicates nothing, and a rank's copies are its own.
    """
    weight = model.embedding.weight.detach()
    frozen = not any(parameter.requires_grad for parameter in model.parameters())
    if not available(weight) or not (frozen or count >= _WORTH_A_COPY):
        yield None
        return
    copies = vars(model).setdefault("weight_copies", WeightCopies()) if frozen else WeightCopies()
    screen = None
    layers: list[ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding] = []
    if rows <= _SCREENED_ROWS and 0 < screened(sampling) <= min(_SCREENED_LOGITS, real):
        screen = copies.screen(weight[:real], len(weight)) if weight[:real].numel() >= _SCREENED_WEIGHTS else None
    if rows >= PACKED_ROWS:
        layers = [one for one in model.modules() if isinstance(one, ColumnParallelLinear | RowParallelLinear)]
        if screen is None:
            layers.append(model.embedding)
    try:
        for layer, packed in zip(layers, copies.packed([one.weight.detach() for one in layers]), strict=True):
            layer.packed = packed
        yield screen
    finally:
        for layer in layers:
            layer.packed = None


def screened(sampling: Sampling) -> int:
    """How many of the largest logits of a rank ``sampling`` can choose from; 0 if all logits count."""
    if sampling.repetition_penalty != 1:
        return 0
    return 1 if sampling.temperature == 0 else sampling.top_k


def _state(weights: list[Tensor]) -> _State:
    """A value that differs after a weight was replaced, or changed in place."""
    return [(weight.data_ptr(), weight._version) for weight in weights]
