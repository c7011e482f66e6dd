"""The loss of a unigram model, whose counts all ranks make together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from commengine import Communicator
from commengine.rank_zero import on_every_rank
from trainers.data.corpus import Corpus, HeldOutPart
from trainers.data.samples import Counts, TextSamples, count_tokens, mixed_counts, unigram_cross_entropy

#: what a rank counts before it waits for the others: tokens of a text (a second's work), or samples of an evaluation.
#: It waits in a collective, whose timeout must not depend on how large a corpus is.
_TOKENS, _SAMPLES = 1 << 26, 1 << 12


def unigram_entropy(corpus: Corpus, vocab_size: int, parts: Sequence[HeldOutPart], world: Communicator) -> float:
    """The loss of a unigram model of the training data on what ``parts`` predict, in nats per predicted token.

    Both are mixtures of the sources by their weights. Collective over ``world``. Raises UsageError, on all ranks, for a
    token outside the vocabulary.
    """
    drawn = [source for source in corpus.sources if source.weight]
    known, asked = [], []
    for source in drawn:
        assert isinstance(source.training, TextSamples)
        known.append(text_counts(source.training, vocab_size, world))
    for part in parts:
        assert isinstance(part.held_out, TextSamples)
        asked.append(target_counts(part.held_out, part.samples, vocab_size, world))
    return unigram_cross_entropy(
        mixed_counts(known, [float(source.weight) for source in drawn]),
        mixed_counts(asked, [part.weight for part in parts]),
    )


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
        total += on_every_rank(world, lambda part=part: count(part))  # type: ignore[misc]
    world.all_reduce(torch.from_numpy(total))
    return total
