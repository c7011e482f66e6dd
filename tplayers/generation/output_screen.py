"""OutputScreen: the largest logits of a token, found without reading the whole output layer in float32.

The output layer is the largest matrix that a new token reads: 154 of 496 MB in GPT-2. A copy of it in int8 gives each
logit with a known error, from a quarter of the bytes. A logit that cannot be among the k largest even with this error
is left out; the others are computed from the float32 weights.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

#: rows of the weight that are converted together: their float32 values stay in a core's cache meanwhile
_BLOCK = 128

#: If more than one in so many logits may be among the largest, all are computed.
_FEW = 16

#: the largest integer of the copy; the place of 0 in the unsigned integers that oneDNN takes for x
_MOST, _ZERO = 127, 128


class OutputScreen:
    """The k largest logits ``weight @ x``, from a copy of ``weight`` in int8 with a scale for each row.

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
        self._packed = _pack(integers)

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
        packed = _pack(torch.full((16, 64), _MOST, dtype=torch.int8, device="cpu"))
        ones = torch.ones(64, dtype=torch.float32, device="cpu")
        found = _product((_MOST * ones).repeat(2, 1), packed, ones[:16])
    except (AttributeError, NotImplementedError, RuntimeError):  # PyTorch was built without oneDNN
        return False
    return bool((found == 64 * _MOST * _MOST).all())


def _scale(x: Tensor) -> Tensor:
    """What an integer stands for in each row of x [b, h]: [b, 1]."""
    return (x.abs().amax(dim=1, keepdim=True) / _MOST).clamp_(min=1e-30)


def _pack(integers: Tensor) -> Tensor:
    """A copy of int8 [n, h] in the order in which oneDNN reads it."""
    packed: Tensor = torch.ops.onednn.qlinear_prepack(integers, None)
    return packed


def _product(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """Integers x [b, h] in float32, of at most 127 each, times the transposed integers of `_pack`, times ``scales``.

    The result is float32 [b, n]; scales: [n].
    """
    unsigned = x.add_(_ZERO).to(torch.uint8)
    zero = torch.zeros(1, dtype=torch.int32, device="cpu")
    product: Tensor = torch.ops.onednn.qlinear_pointwise(
        unsigned, 1.0, _ZERO, packed, scales, zero, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return product
