"""Copies of a model, and of its weights, from which a few new tokens are computed fastest. Only generation uses them.

`fast_model` makes a copy of the model whose modules are called without the work that `torch.nn.Module` does for each
call. A new token of one text reads every weight once, and the host's memory sets the time. Second copies of the weights
make it shorter, all on the host and in float32 only:

====================  ===================================  ===========================================================
copy                  used                                 gain
====================  ===================================  ===========================================================
`OutputScreen`        up to 32 texts at a time, if only    the output layer is read in int8; the text does not change
                      the k largest logits count
packed weights        4 texts at a time or more            oneDNN's order: its product of 8 rows needs half of the time
                                                           of MKL's
columns together      one text, frozen weights             the product of one row reads them 5% faster
====================  ===================================  ===========================================================

The screen and the packed weights use private operators of PyTorch's oneDNN.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tplayers.embedding import VocabParallelEmbedding
from tplayers.linear import ColumnParallelLinear, RowParallelLinear
from tplayers.models.transformer import Transformer
from tplayers.regions import reduce_own_from_tensor_parallel_region

from .sampling import Sampling

#: A copy is made for a call with so many tokens. If the weights are frozen, it is made for any call, and kept.
_WORTH_A_COPY = 16

#: the most texts, the most logits, and the fewest weights for which a screen gains time
_SCREENED_ROWS, _SCREENED_LOGITS, _SCREENED_WEIGHTS = 32, 256, 1 << 20

#: values of a weight that are compared
_SAMPLE = 64

#: the fewest rows for which a product with a packed weight is faster
PACKED_ROWS = 4

#: rows of the weight that are converted together: their float32 values stay in a core's cache meanwhile
_BLOCK = 128

#: If more than one in so many logits may be among the largest, all are computed.
_FEW = 16

#: the largest integer of the copy; the place of 0 in the unsigned integers that oneDNN takes for x
_MOST, _ZERO = 127, 128

Made = TypeVar("Made")
Model = TypeVar("Model", bound=nn.Module)
Kind = TypeVar("Kind", bound=Transformer)


def fast_model(model: Kind, rows: int, count: int, sampling: Sampling, real: int) -> tuple[Kind, OutputScreen | None]:
    """An `inference_copy` of ``model`` that computes ``count`` new tokens of ``rows`` texts from copies of its weights.

    real: this rank's columns of the output layer that are no padding. The second value is the screen of these, or None
    where there is none. The result must not be used after the model's weights have changed. It communicates nothing,
    and a rank's copies are its own.
    """
    fast, weight = inference_copy(model), model.output_layer.weight.detach()
    frozen = not any(parameter.requires_grad for parameter in model.parameters())
    if not (available(weight) and (frozen or count >= _WORTH_A_COPY)) or torch.is_autocast_enabled("cpu"):
        return fast, None
    copies = vars(model).setdefault("weight_copies", WeightCopies()) if frozen else WeightCopies()
    screen, large = None, weight[:real].numel() >= _SCREENED_WEIGHTS
    if rows <= _SCREENED_ROWS and large and 0 < screened(sampling) <= min(_SCREENED_LOGITS, real):
        screen = copies.of([weight[:real]], "screen", lambda found: OutputScreen(found[0], len(weight)))
    if screen is None and rows >= PACKED_ROWS:
        (packed,) = copies.of([weight], "output", _packed)
        _pack(fast.output_layer, packed)
    # Exactly these classes: another, such as that of canonical shards, computes in its own way.
    kinds = (ColumnParallelLinear, RowParallelLinear)
    both = zip(model.layers.named_modules(), fast.layers.modules(), strict=True)
    # Experts compute from the weights themselves (`MLP.part`).
    layers: list[Any] = [mine for (name, one), mine in both if type(one) in kinds and ".experts." not in name]
    weights = [one.weight for one in layers]
    if rows >= PACKED_ROWS:
        for layer, packed in zip(layers, copies.of(weights, "layers", _packed), strict=True):
            _pack(layer, packed)
    elif rows == 1 and frozen:
        for layer, copy in zip(layers, copies.of(weights, "columns", _columns_first), strict=True):
            vars(layer)["weight"] = copy
    return fast, screen


def screened(sampling: Sampling) -> int:
    """How many of the largest logits of a rank ``sampling`` can choose from; 0 if all logits count."""
    if sampling.repetition_penalty != 1:
        return 0
    return 1 if sampling.temperature == 0 else sampling.top_k


def inference_copy(model: Model) -> Model:
    """A copy of ``model`` in evaluation mode and without sequence parallelism, for passes without gradients.

    It shares all tensors with ``model``, which does not change, and runs the same ``forward`` methods. It is valid
    until a tensor of ``model`` is replaced.

    A token of GPT-2 takes 1 ms less with it. Each product of a new token replaces what the core's caches hold, so every
    line of Python after it costs several times as much as in a loop. A module of the copy has its tensors and modules
    as plain attributes, and a call of it is a call of its ``forward``. A module with forward hooks is called as ever,
    but hooks that are registered for all modules do not run.

    Sequence parallelism changes none of the numbers, and a new token alone cannot be split over the ranks. Use the copy
    for its forward passes alone: it cannot be trained, moved or saved.
    """
    tensors = {
        name: None if tensor is None else tensor.detach()
        for name, tensor in (*model._parameters.items(), *model._buffers.items())
    }
    modules = {name: None if child is None else inference_copy(child) for name, child in model._modules.items()}
    kind: Any = type(model)
    if not (model._forward_hooks or model._forward_pre_hooks):
        kind = _directly_called(kind)
    copied: Model = object.__new__(kind)
    attributes = vars(copied)
    attributes.update(vars(model), **tensors, **modules)
    attributes.update(_parameters={}, _buffers=tensors, _modules=modules, _compiled_call_impl=None, training=False)
    if "sequence_parallel" in attributes:
        attributes["sequence_parallel"] = False
    return copied


@functools.cache
def _directly_called(kind: Any) -> Any:
    """A subclass of which a call is a call of ``forward``."""
    return type(kind.__name__, (kind,), {"__call__": kind.forward})


# Packed weights ---------------------------------------------------------------------------------------------------


def _packed(weights: Sequence[Tensor]) -> list[Tensor]:
    """Copies of weights [out, in] in the order in which oneDNN's product with a few rows reads them."""
    return [torch.ops.mkldnn._reorder_linear_weight(weight, 8) for weight in weights]


def _columns_first(weights: Sequence[Tensor]) -> list[Tensor]:
    """Copies of weights [out, in] that lie transposed in memory."""
    return [weight.t().contiguous().t() for weight in weights]


def _pack(layer: nn.Module, packed: Tensor) -> None:
    """Let ``layer`` of an `inference_copy` compute from a packed copy of its weight."""
    kind: Any = next(one for plain, one in _PACKED.items() if isinstance(layer, plain))
    layer.__class__ = kind if layer._forward_hooks or layer._forward_pre_hooks else _directly_called(kind)
    vars(layer)["packed"] = packed


class _PackedColumns(ColumnParallelLinear):
    packed: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if _few(x) else _of_packed(x, self.packed, self.bias)


class _PackedRows(RowParallelLinear):
    packed: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if _few(x):
            return super().forward(x)
        y = reduce_own_from_tensor_parallel_region(_of_packed(x, self.packed, None), self.comm)
        return y if self.bias is None else y.add_(self.bias)


class _PackedEmbedding(VocabParallelEmbedding):
    packed: Tensor

    def logits(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return super().logits(x, bias) if _few(x) else _of_packed(x, self.packed, bias)


_PACKED: dict[type[nn.Module], type[nn.Module]] = {
    ColumnParallelLinear: _PackedColumns, RowParallelLinear: _PackedRows, VocabParallelEmbedding: _PackedEmbedding
}  # fmt: skip


def _few(x: Tensor) -> bool:
    return x.numel() < PACKED_ROWS * x.shape[-1]


def _of_packed(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return y


# Copies that are kept ---------------------------------------------------------------------------------------------


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


def _state(weight: Tensor) -> tuple[int, int, bytes]:
    """A value that differs after the weight was replaced or changed in place.

    PyTorch counts the changes that it makes itself. A collective and a read from a file write into the memory without a
    count; the values of some places tell these.
    """
    values = weight.reshape(-1)
    return weight.data_ptr(), weight._version, values[:: max(1, len(values) // _SAMPLE)].numpy().tobytes()


# The screen -------------------------------------------------------------------------------------------------------


class OutputScreen:
    """The k largest logits ``weight @ x``, from a copy of ``weight`` in int8 with a scale for each row.

    The output layer is the largest matrix that a new token reads: 154 of 496 MB in GPT-2. The copy gives each logit
    with a known error, from a quarter of the bytes. A logit that cannot be among the k largest even with this error is
    left out; the others are computed from the float32 weights.

    weight: float32 [n, h] on the host. It must not change as long as the screen is used. The copy has n * (h + 8)
    bytes. columns: of the logits that `logits` returns; those from n on are -inf.

    x becomes a sum of two vectors of integers, each with a scale; the second one holds the rounding of the first. The
    products of integers are exact, so the error in a logit is at most |x| |w - copy of w| (Cauchy-Schwarz) and a little
    for the rest of x and for rounding. This bound, divided by |x|, is kept for each row.
    """

    def __init__(self, weight: Tensor, columns: int) -> None:
        rows, hidden = weight.shape
        self._weight, self._columns = weight, columns
        integers = torch.empty((rows, hidden), dtype=torch.int8, device="cpu")
        self._scales, self._errors = weight.new_empty(rows), weight.new_empty(rows)
        # The rest of x is at most half of the second scale in each of its h numbers; float32 rounds every sum.
        little = math.sqrt(hidden) / (2 * _MOST * 2 * _MOST) + 2.0**-22 * hidden
        for first in range(0, rows, _BLOCK):
            part = slice(first, first + _BLOCK)
            exact = weight[part]
            scales = _scale(exact)
            copy = (exact / scales).round_().clamp_(-_MOST, _MOST)
            integers[part], self._scales[part] = copy, scales.squeeze(1)
            norms = torch.linalg.vector_norm(copy.mul_(scales), dim=1)
            self._errors[part] = torch.linalg.vector_norm(copy.sub_(exact), dim=1) + little * norms
        self._packed = _prepacked(integers)

    def logits(self, x: Tensor, k: int) -> Tensor | None:
        """Float32 [b, columns]: every logit of x that may be among the k largest of its row, and -inf for the others.

        x: float32 [b, h]. None if so many logits may be among the largest that the product with all is better; a NaN or
        an infinity in ``x`` or ``weight`` leads there.
        """
        unit = torch.linalg.vector_norm(x, torch.inf, dim=1, keepdim=True).clamp_(min=1e-30).div_(_MOST * 2 * _MOST)
        whole = x.div(unit).round_()  # x = whole * unit, and whole = first * 2 * _MOST + second
        first = whole.div(2 * _MOST).round_()
        second = whole.sub_(first, alpha=2 * _MOST)
        products = _product(torch.cat((first, second)), self._packed, self._scales)
        # From here on, all logits are divided by unit.
        found = products[len(x) :].add_(products[: len(x)], alpha=2 * _MOST)
        length = torch.linalg.vector_norm(x, dim=1, keepdim=True).div_(unit)
        low = torch.addcmul(found, self._errors, length, value=-1)
        least = low.amax(dim=1, keepdim=True) if k == 1 else low.topk(k).values[:, -1:]
        high = found.addcmul_(self._errors, length)
        row, column = torch.nonzero(high.lt(least).logical_not_(), as_tuple=True)
        if len(row) * _FEW > found.numel():
            return None
        logits = x.new_full((len(x), self._columns), -torch.inf)
        logits[row, column] = torch.linalg.vecdot(self._weight[column], x[row])
        return logits


def available(weight: Tensor) -> bool:
    """Whether ``weight`` can have a screen: in float32, on a host whose products of integers are exact."""
    return weight.is_cpu and weight.dtype == torch.float32 and _exact_products()


@functools.cache
def _exact_products() -> bool:
    """Whether `_product` is right. Processors without VNNI instructions add pairs of products in 16 bits."""
    try:
        packed = _prepacked(torch.full((16, 64), _MOST, dtype=torch.int8, device="cpu"))
        ones = torch.ones(64, dtype=torch.float32, device="cpu")
        found = _product((_MOST * ones).repeat(2, 1), packed, ones[:16])
    except (AttributeError, NotImplementedError, RuntimeError):  # PyTorch was built without oneDNN
        return False
    return bool((found == 64 * _MOST * _MOST).all())


def _scale(x: Tensor) -> Tensor:
    """What an integer stands for in each row of x [b, h]: [b, 1]."""
    return (x.abs().amax(dim=1, keepdim=True) / _MOST).clamp_(min=1e-30)


def _prepacked(integers: Tensor) -> Tensor:
    """A copy of int8 [n, h] in the order in which oneDNN reads it."""
    packed: Tensor = torch.ops.onednn.qlinear_prepack(integers, None)
    return packed


def _product(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """Integers x [b, h] in float32, of at most 127 each, times the transposed integers of `_prepacked`, times scales.

    The result is float32 [b, n]; scales: [n].
    """
    unsigned = x.add_(_ZERO).to(torch.uint8)
    zero = torch.zeros(1, dtype=torch.int32, device="cpu")
    product: Tensor = torch.ops.onednn.qlinear_pointwise(
        unsigned, 1.0, _ZERO, packed, scales, zero, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return product
