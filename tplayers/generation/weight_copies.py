"""WeightCopies: second copies of a model's weights, in the forms from which a few new tokens are computed fastest.

A new token of one text reads every weight once, and the host's memory sets the time. Three copies make it shorter, all
on the host and in float32 only:

====================  ===================================  ===========================================================
copy                  used                                 gain
====================  ===================================  ===========================================================
`OutputScreen`        up to 32 texts at a time, if only    the output layer is read in int8; the text does not change
                      the k largest logits count
packed weights        4 texts at a time or more            oneDNN's order: its product of 8 rows needs half of the time
                                                           of MKL's
columns together      one text, frozen weights             the product of one row reads them 5% faster
====================  ===================================  ===========================================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from tplayers.linear import ColumnParallelLinear, RowParallelLinear
from tplayers.models.gpt import GPT
from tplayers.products import PACKED_ROWS, columns_first, pack

from .inference_copy import inference_copy
from .output_screen import OutputScreen, available
from .sampling import Sampling

#: A copy is made for a call with so many tokens. If the weights are frozen, it is made for any call, and kept.
_WORTH_A_COPY = 16

#: the most texts, the most logits, and the fewest weights for which a screen gains time
_SCREENED_ROWS, _SCREENED_LOGITS, _SCREENED_WEIGHTS = 32, 256, 1 << 20

#: values of a weight that are compared
_SAMPLE = 64

Made = TypeVar("Made")


class WeightCopies:
    """The copies of one model's weights. They are made on first use, and again after the weights have changed.

    They are no part of the model: a copy or a pickle of the model has none.
    """

    def __init__(self) -> None:
        # The state of the weights, the weights, and what was made of them. As long as the weights are held, no other
        # tensor can have their addresses.
        self._kept: dict[str, tuple[list[tuple[int, int, bytes]], Sequence[Tensor], Any]] = {}

    def __deepcopy__(self, memo: Any) -> WeightCopies:
        return WeightCopies()

    def __reduce__(self) -> tuple[type[WeightCopies], tuple[()]]:
        return WeightCopies, ()

    def of(self, weights: Sequence[Tensor], kind: str, make: Callable[[Sequence[Tensor]], Made]) -> Made:
        """The result of ``make(weights)``. It is made if ``kind`` has none, or was made of other values."""
        state = [_state(weight) for weight in weights]
        if kind not in self._kept or self._kept[kind][0] != state:
            self._kept[kind] = state, weights, make(weights)
        made: Made = self._kept[kind][2]
        return made


def fast_model(model: GPT, rows: int, count: int, sampling: Sampling, real: int) -> tuple[GPT, OutputScreen | None]:
    """An `inference_copy` of ``model`` that computes ``count`` new tokens of ``rows`` texts from copies of its weights.

    real: this rank's columns of the output layer that are no padding. The second value is the screen of these, or None
    where there is none. The result must not be used after the model's weights have changed. It communicates nothing,
    and a rank's copies are its own.
    """
    fast, weight = inference_copy(model), model.output_layer.weight.detach()
    frozen = not any(parameter.requires_grad for parameter in model.parameters())
    if not available(weight) or not (frozen or count >= _WORTH_A_COPY):
        return fast, None
    copies = vars(model).setdefault("weight_copies", WeightCopies()) if frozen else WeightCopies()
    screen, large = None, weight[:real].numel() >= _SCREENED_WEIGHTS
    if rows <= _SCREENED_ROWS and large and 0 < screened(sampling) <= min(_SCREENED_LOGITS, real):
        screen = copies.of([weight[:real]], "screen", lambda found: OutputScreen(found[0], len(weight)))
    linear = (one for one in fast.layers.modules() if isinstance(one, ColumnParallelLinear | RowParallelLinear))
    layers = [one for one in linear if one.canonical is None]  # canonical products have the bits of their own order
    weights = [one.weight for one in layers]
    if rows >= PACKED_ROWS:
        for layer, copy in zip(layers, copies.of(weights, "layers", _packed), strict=True):
            layer.packed = copy
        if screen is None:
            (fast.output_layer.packed,) = copies.of([weight], "output", _packed)
    elif rows == 1 and frozen:
        for layer, copy in zip(layers, copies.of(weights, "columns", _columns_first), strict=True):
            vars(layer)["weight"] = copy
    return fast, screen


def _packed(weights: Sequence[Tensor]) -> list[Tensor]:
    return [pack(weight) for weight in weights]


def _columns_first(weights: Sequence[Tensor]) -> list[Tensor]:
    return [columns_first(weight) for weight in weights]


def screened(sampling: Sampling) -> int:
    """How many of the largest logits of a rank ``sampling`` can choose from; 0 if all logits count."""
    if sampling.repetition_penalty != 1:
        return 0
    return 1 if sampling.temperature == 0 else sampling.top_k


def _state(weight: Tensor) -> tuple[int, int, bytes]:
    """A value that differs after the weight was replaced or changed in place.

    PyTorch counts the changes that it makes itself. A collective and a read from a file write into the memory without a
    count; the values of some places tell these.
    """
    values = weight.reshape(-1)
    return weight.data_ptr(), weight._version, values[:: max(1, len(values) // _SAMPLE)].numpy().tobytes()
