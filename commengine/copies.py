"""Whether the copies of something on several ranks are equal, by checksums."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence

from .agreement import ranks_named
from .communicator import Communicator


def difference_between(comm: Communicator, items: Sequence[tuple[str, int]]) -> str | None:
    """The first item whose value is not equal on all ranks of ``comm``, and where it differs; None if all are equal.

    items: (name, value); the values are integers of 64 bits, such as checksums. The ranks are those of the world.
    Collective over ``comm``, with the same names on every rank: an all-reduce of 16 bytes, and an all-gather of
    each value where they differ. It makes no tensor, which ``torch.func`` would wrap.
    """
    if comm.size == 1:
        return None
    values = [value for _, value in items]
    digest = hashlib.blake2b(array("q", values).tobytes(), digest_size=8).digest()
    low, high = comm.extremes([int.from_bytes(digest, "big") >> 1])  # 63 bits, so that it can be negated
    if low == high:
        return None
    every = [comm.each_number(value) for value in values]
    unequal = [n for n, of_ranks in enumerate(every) if len(set(of_ranks)) > 1]
    name, values = items[unequal[0]][0], every[unequal[0]]
    more = f" (and {len(unequal) - 1} more)" if len(unequal) > 1 else ""
    return f"{name}{more} {_parties(values, comm.world_ranks())}"


def _parties(values: Sequence[int], ranks: Sequence[int]) -> str:
    """Who has which value: "on rank 3 is not that of ranks 0, 1, 2", or all parties if no majority is there."""
    counted = Counter(values).most_common()
    parties = [[rank for rank, value in zip(ranks, values, strict=True) if value == one] for one, _ in counted]
    if len(parties) == 2 and len(parties[0]) > len(parties[1]):
        return f"on {ranks_named(parties[1])} is not that of {ranks_named(parties[0])}"
    return f"differs between {' and '.join(map(ranks_named, parties))}"
