"""The matrix products of a layer on one device, of one micro-batch forward."""

from __future__ import annotations

import math
from typing import NamedTuple

from tplayers.formulas import StepLayout, TransformerShape


class Product(NamedTuple):
    """``times`` products [m, k] @ [k, n], one after the other."""

    m: int
    n: int
    k: int
    times: int = 1


def of_layer(shape: TransformerShape, layout: StepLayout) -> list[Product]:
    """The products in their order. Tokens go to experts evenly."""
    h, t = shape.hidden, layout.tensor
    tokens = shape.seq * layout.micro_batch // layout.context
    qkv = (shape.queries + 2 * shape.keys * shape.sharing(t)) // t
    found = [Product(tokens, qkv, h), Product(tokens, h, shape.queries // t)]

    def feed_forward(rows: int, width: int, times: int = 1) -> list[Product]:
        inner = (2 if shape.gated else 1) * width // t
        return [Product(rows, inner, h, times), Product(rows, h, width // t, times)]

    if not shape.experts:
        return found + feed_forward(tokens, shape.mlp)
    # From the tokens of all ranks of the expert group.
    rows = math.ceil(tokens * layout.expert * shape.of_token / shape.experts)
    found.append(Product(tokens, shape.experts, h))
    found += feed_forward(rows, shape.mlp, shape.experts // layout.expert)
    return found + (feed_forward(tokens, shape.shared) if shape.shared else [])
