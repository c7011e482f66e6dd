"""How unequally ranks send: the numbers of elements that each rank sends to each rank in an `all_to_all_v`.

They are those of a mixture of experts. The experts lie on the ranks in blocks, and each rank sends as many elements,
split by how often its tokens choose each expert.

| name    | how often an expert is chosen                                      |
|---------|--------------------------------------------------------------------|
| uniform | all equally often                                                  |
| zipf    | number i, from 1, in proportion to 1 / i                           |
| hot     | the first one by half of all tokens, the others equally often      |
| a file  | JSON, [rank][expert]: the tokens that each rank sent to each expert |
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from commengine.files.reading import fault_in, read_json

NAMES = ("uniform", "zipf", "hot")
#: the experts of the skews that have a name, or twice as many as ranks if that is more
EXPERTS = 8

#: [sending rank][receiving rank]
Matrix = tuple[tuple[int, ...], ...]


def shares(name: str, ranks: int) -> list[list[float]]:
    """The share of each rank's elements that goes to each rank: [ranks][ranks].

    name: one of NAMES, or a file. Raises UsageError for a file that is no such table of as many ranks.
    """
    if name in NAMES:
        experts = max(EXPERTS, 2 * ranks)
        experts += -experts % ranks
        weights = {
            "uniform": [1.0] * experts,
            "zipf": [1 / (number + 1) for number in range(experts)],
            "hot": [experts - 1.0] + [1.0] * (experts - 1),
        }[name]
        table = [weights] * ranks
    else:
        table = _recorded(Path(name), ranks)
    each = len(table[0]) // ranks
    return [
        [sum(weights[rank * each : (rank + 1) * each]) / sum(weights) for rank in range(ranks)] for weights in table
    ]


def _recorded(path: Path, ranks: int) -> list[list[float]]:
    table = read_json(path)
    with fault_in(f"{path}: not the tokens of each rank and expert"):
        found = [[float(count) for count in row] for row in table]
        if len(found) != ranks or len({len(row) for row in found}) != 1 or len(found[0]) % ranks:
            raise ValueError(f"want a row for each of {ranks} ranks, and as many experts on each of them")
        if any(min(row) < 0 or sum(row) <= 0 for row in found):
            raise ValueError("a rank has tokens, and no expert fewer than 0")
    return found


def matrix(name: str, ranks: int, largest: int) -> Matrix:
    """The elements that each rank sends to each rank, so that the largest buffer of a rank has about ``largest``.

    Each rank sends equally many elements, at least one; the ranks of the popular experts receive more.
    """
    split = shares(name, ranks)
    widest = max(1.0, *(sum(row[rank] for row in split) for rank in range(ranks)))
    return of_tokens(name, ranks, max(1, int(largest / widest)))


def of_tokens(name: str, ranks: int, each: int) -> Matrix:
    """The elements, or the rows, that each rank sends to each rank when every rank sends ``each``."""
    return tuple(_rounded([share * each for share in row], each) for row in shares(name, ranks))


def parts(name: str, ranks: int, total: int) -> tuple[int, ...]:
    """The elements of each rank in an all_gather_v of ``total``: those that experts on it got from all ranks."""
    split = shares(name, ranks)
    return _rounded([sum(row[rank] for row in split) / ranks * total for rank in range(ranks)], total)


def _rounded(parts: Sequence[float], total: int) -> tuple[int, ...]:
    """Whole numbers near ``parts`` that add up to ``total``: the bounds between them are rounded."""
    bounds, reached = [0], 0.0
    for part in parts:
        reached += part
        bounds.append(round(reached))
    bounds[-1] = total
    return tuple(high - low for low, high in pairwise(bounds))
