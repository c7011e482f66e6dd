"""Rows that go to experts, by formula: an all-to-all with unequal parts, or an all-gather and a reduce-scatter.

A layer with experts on e ranks sends k copies of each of its n rows to the ranks of k experts, and gets k results back:
two all-to-alls of k n rows. The other way gathers the n rows of all ranks, lets each rank compute with its experts, and
adds up the results: an all-gather and a reduce-scatter of e n rows. If every row costs the same, the first sends
2 k n (e - 1) / e rows and the second 2 n (e - 1), so that they are equal at k = e.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from .collectives import Cost, Link
from .fitted import FittedModel

#: bytes of a number of rows, when the ranks tell each other the counts
COUNT_BYTES = 8


def busiest(sent: Sequence[Sequence[float]]) -> float:
    """Return the bytes that the busiest rank sends to others or receives from them, whichever is more.

    sent: bytes [sending rank][receiving rank].
    """
    ranks = range(len(sent))
    out = [sum(sent[rank]) - sent[rank][rank] for rank in ranks]
    into = [sum(row[rank] for row in sent) - sent[rank][rank] for rank in ranks]
    return max(*out, *into)


def uneven_all_to_all(sent: Sequence[Sequence[float]], algorithm: str = "direct") -> Cost:
    """Return the cost of an all_to_all_v, without the exchange of the counts.

    sent: bytes [sending rank][receiving rank]. algorithm: "direct", where all messages of a rank travel at once, or
    "ring", one partner after another, where every step waits for its largest message. Raises ValueError for another
    one, or if ``sent`` is not square.
    """
    p = len(sent)
    if p < 1 or any(len(row) != p for row in sent):
        raise ValueError(f"sent must have as many columns as rows, not {[len(row) for row in sent]}")
    if p == 1:
        return Cost(0, 0, 0)
    if algorithm == "direct":
        return Cost(1, busiest(sent), 0)
    if algorithm == "ring":
        steps = [max(sent[rank][(rank + step) % p] for rank in range(p)) for step in range(1, p)]
        return Cost(p - 1, sum(steps), 0)
    raise ValueError(f"all_to_all_v has no algorithm {algorithm!r}: there are direct, ring")


def all_to_all_seconds(model: FittedModel, sent: Sequence[Sequence[float]], *, shared_memory: bool = False) -> float:
    """Return the seconds of an all_to_all_v by a model of even all-to-alls.

    It takes as long as the even one in which every rank sends as much to others as here the busiest one. shared_memory:
    every rank copies all that it receives, and its own part like any other; so it takes as long as the even one in
    which every rank receives as much as here the one that receives most.
    """
    p = len(sent)
    if p == 1:
        return 0.0
    even = max(sum(row[rank] for row in sent) for rank in range(p)) if shared_memory else busiest(sent) * p / (p - 1)
    return model.seconds("all_to_all", even, p)


def there_and_back_seconds(
    model: FittedModel, sent: Sequence[Sequence[float]], *, shared_memory: bool = False, counts: bool = True
) -> float:
    """Return the seconds for rows to experts and their results back, with the exchange of the counts.

    counts: False for a model of all-to-alls that were measured with that of their own.
    """
    back = [list(column) for column in zip(*sent, strict=True)]
    first = [[[COUNT_BYTES] * len(sent)] * len(sent)] if counts else []
    return sum(all_to_all_seconds(model, one, shared_memory=shared_memory) for one in (*first, sent, back))


def gathered_seconds(model: FittedModel, part: float, ranks: int) -> float:
    """Return the seconds of the other way: an all-gather and a reduce-scatter of ``ranks`` times ``part`` bytes."""
    whole = part * ranks
    return model.seconds("all_gather", whole, ranks) + model.seconds("reduce_scatter", whole, ranks)


def linear_crossover(ratios: Sequence[tuple[float, float]]) -> float | None:
    """Return where a ratio passes 1, between the points (x, ratio) in the order of x, on a line between two of them.

    None if it does not. The first passage from below counts.
    """
    for (low, before), (high, after) in pairwise(ratios):
        if before <= 1 < after:
            return low + (high - low) * (1 - before) / (after - before)
    return None


def link_crossover(link: Link, part: float, ranks: int) -> float:
    """Return the k from which gathering is no slower, where ``link`` joins all ranks and rows go evenly.

    part: the bytes of the n rows of a rank. It is ``ranks`` for large parts; for small ones the latency of the counts
    counts, too.
    """
    share = (ranks - 1) / ranks
    gathered = 2 * (link.alpha + part * ranks * share * link.beta)
    counts = link.alpha + COUNT_BYTES * (ranks - 1) * link.beta
    return max(0.0, (gathered - counts - 2 * link.alpha) / (2 * part * share * link.beta))
