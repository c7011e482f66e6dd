"""The messages of ranks that share sequences, by formula: Ulysses, the ring, and the gathered form.

    [U] Jacobs et al., DeepSpeed Ulysses, 2023: section 3
    [R] Liu, Zaharia & Abbeel, Ring Attention, 2023: section 3

s: sequence length, b: micro-batch, c: the ranks of a context group, d: the size of a head; a rank of the tensor group
has a' heads and k' heads of keys.
"""

from __future__ import annotations

import math

from .step import Collective
from .transformer import TransformerShape, require_recompute

METHODS = ("ulysses", "ring", "gather")


def context_collectives(
    shape: TransformerShape, batch: int, tensor: int, context: int, method: str, *, element_bytes: float = 2,
    recompute: str = "none", order_head: bool = True,
) -> list[Collective]:  # fmt: skip
    """Return the collectives of one micro-batch over a context group of ``context`` ranks.

    shape: with the whole sequence's length. tensor: the size of the tensor group. Of each layer:

    - "ulysses": an all-to-all of b s d / c elements for each of a' + 2 k' heads, and one for each of a' heads. The
      backward has as many [U]. Heads of keys that c does not divide are sent several times.
    - "ring": c - 1 messages of 2 k' b s d / c elements. The backward has as many, and c - 1 of the same elements in
      fp32: the gradients travel, too [R].
    - "gather": an all-gather of 2 k' b s d elements. The backward has one, too, and a reduce-scatter in fp32.

    If the layer is recomputed in full, the forward's run again. A BERT with ``order_head`` brings the first tokens to
    all ranks, for its pooler. Raises ValueError for another method.
    """
    require_recompute(recompute)
    if method not in METHODS:
        raise ValueError(f"method={method!r}: one of {', '.join(METHODS)}")
    if context == 1:
        return []
    of_head = batch * shape.seq // context * shape.head_size
    heads, groups = shape.heads // tensor, shape.groups * shape.sharing(tensor) // tensor
    passes = ["forward", "backward", *(["recompute"] if recompute == "full" else [])]

    pooler: list[Collective] = []
    if shape.model == "bert" and order_head:
        size, why = batch * shape.hidden * element_bytes, "first tokens, from the first rank's part"
        pooler = [Collective("all_reduce", size, context, 1, why, "pooler", "forward")]

    def one(operation: str, size: float, phase: str, why: str, times: int = 1) -> Collective:
        return Collective(operation, size, context, shape.layers * times, why, "layers", phase)

    if method == "ulysses":
        sent = (heads + 2 * groups * copies_of_groups(heads, groups, context)) * of_head * element_bytes
        back = heads * of_head * element_bytes
        found = [one("all_to_all", sent, phase, "positions for heads: queries, keys, values [U]") for phase in passes]
        return pooler + found + [one("all_to_all", back, phase, "heads for positions: results [U]") for phase in passes]
    block = 2 * groups * of_head
    exact = max(4.0, element_bytes)
    if method == "ring":
        why = "keys and values to the next rank [R]"
        found = [one("sendrecv", block * element_bytes, phase, why, context - 1) for phase in passes]
        of_gradients = one("sendrecv", block * exact, "backward", "their gradients to the next rank [R]", context - 1)
        return [*pooler, *found, of_gradients]
    found = [one("all_gather", context * block * element_bytes, phase, "keys and values") for phase in passes]
    return [*pooler, *found, one("reduce_scatter", context * block * exact, "backward", "gradients of keys and values")]


def copies_of_groups(heads: int, groups: int, context: int) -> int:
    """How often Ulysses sends each of ``groups`` heads of keys, so that ``context`` ranks have as many of them each."""
    times = context // math.gcd(context, groups)
    return times if (heads // groups) % times == 0 else heads // groups
