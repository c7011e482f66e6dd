"""How often each token occurs, counted by all ranks together."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from commengine import Communicator
from commengine.rank_zero import on_every_rank

from .samples import Counts, TextSamples, count_tokens

#: what a rank counts before it waits for the others: tokens of a text (a second's work), or samples of an evaluation.
#: It waits in a collective, whose timeout must not depend on how large a corpus is.
_TOKENS, _SAMPLES = 1 << 26, 1 << 12


def text_counts(samples: TextSamples, vocab_size: int, world: Communicator) -> Counts:
    """`TextSamples.token_counts`, on every rank. Collective over ``world``; raises its ValueError as UsageError."""
    text = samples.text
    if text is None:
        return samples.token_counts(vocab_size)

    def count(part: slice) -> npt.NDArray[np.int64]:
        return count_tokens(samples.name, text[part], vocab_size)

    return _sum(count, len(text), _TOKENS, vocab_size, world)


def target_counts(samples: TextSamples, size: int, vocab_size: int, world: Communicator) -> npt.NDArray[np.int64]:
    """How often each id occurs in the targets of the first ``size`` samples: [vocab_size], on every rank.

    Collective over ``world``.
    """

    def count(part: slice) -> npt.NDArray[np.int64]:
        found = np.zeros(vocab_size, dtype=np.int64)
        for n in range(part.start, part.stop):
            found += np.bincount(samples.targets(n), minlength=vocab_size)
        return found

    return _sum(count, size, _SAMPLES, vocab_size, world)


def _sum(
    count: Callable[[slice], npt.NDArray[np.int64]], items: int, at_once: int, vocab_size: int, world: Communicator
) -> npt.NDArray[np.int64]:
    """The sum of what ``count`` gives for the parts of ``items``: in each round, a part for each rank. Collective."""
    share = min(at_once, -(-items // world.size))
    total = np.zeros(vocab_size, dtype=np.int64)
    for first in range(0, items, max(share, 1) * world.size):
        begin = min(first + world.rank * share, items)
        part = slice(begin, min(begin + share, items))
        if part.start < part.stop:
            total += on_every_rank(world, lambda part=part: count(part))  # type: ignore[misc]
        else:
            on_every_rank(world, lambda: None)
    world.all_reduce(torch.from_numpy(total))
    return total
