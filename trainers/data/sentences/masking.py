"""BERT's masks: whole words, in runs of up to three, as ALBERT and Megatron-LM choose them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainers.data.wordpiece import WordPieces

#: the longest run of words that is masked at once
LARGEST_RUN = 3
#: shares of masked tokens that are replaced by [MASK], and by [MASK] or left as they are; the others become random
REPLACED, REPLACED_OR_KEPT = 0.8, 0.9

Tokens = npt.NDArray[np.int64]


class Masks(NamedTuple):
    """The masked tokens of one sample.

    tokens: int64, the sample's tokens with the masks in them. positions: int64 [m], rising, of the masked ones.
    labels: int64 [m], the tokens that stood there. drawn: int64 [words], the number of words, 1 to 3, that was drawn
    for the run which begins with each word of the sample, before anything else shortened or refused it.
    """

    tokens: Tokens
    positions: Tokens
    labels: Tokens
    drawn: Tokens


def budget(length: int, target: int, mask_prob: float) -> int:
    """The largest number of masked tokens in a sample of ``length`` tokens, the special ones included.

    target: what its parts could have together. Megatron-LM's rule: min(0.15 target, round(0.15 length)), at least 1
    where the first allows it.
    """
    return int(min(mask_prob * target, max(1, round(mask_prob * length))))


def mask_words(
    tokens: Tokens, parts: tuple[tuple[int, int], ...], count: int, pieces: WordPieces, random: np.random.Philox
) -> Masks:
    """Mask at most ``count`` tokens of ``tokens``: only whole words, and only inside of ``parts``.

    parts: the (begin, end) of each run of text; a word or a run of words never reaches over an end, so special tokens
    must lie outside. The words are visited in random order. For each one, a run of n words that begins with it is
    drawn, with p(n) proportional to 1/n for the n that its part has room for. The run is shortened until it fits
    ``count``, and left out if it does not fit or meets a word that is masked already. Each masked token becomes [MASK]
    (80%), stays (10%) or becomes any ordinary token (10%).

    The result is a function of the state of ``random``. Sources: `create_masked_lm_predictions` of Megatron-LM (2020);
    Lan et al. 2020, section 3.1.
    """
    begins, ends, room = _words(tokens, parts, pieces)
    words = len(begins)
    order = np.argsort(random.random_raw(words), kind="stable").tolist()
    drawn = _drawn(random.random_raw(words), room)
    starts, stops, lengths = begins.tolist(), ends.tolist(), drawn.tolist()
    taken = bytearray(words)
    left = count
    for word in order:
        if left < 1:
            break
        n = lengths[word]
        while n and stops[word + n - 1] - starts[word] > left:
            n -= 1
        if not n or any(taken[word : word + n]):
            continue
        taken[word : word + n] = b"\1" * n
        left -= stops[word + n - 1] - starts[word]
    chosen = np.flatnonzero(np.frombuffer(taken, dtype=np.uint8))
    inside = np.zeros(len(tokens) + 1, dtype=np.int64)  # +1 where a masked word begins, -1 after its end
    np.add.at(inside, begins[chosen], 1)
    np.add.at(inside, ends[chosen], -1)
    positions = np.flatnonzero(np.cumsum(inside[:-1]))
    labels = tokens[positions]
    kind = uniform(random.random_raw(len(positions)))
    any_token = pieces.ordinary[(random.random_raw(len(positions)) % np.uint64(len(pieces.ordinary))).astype(np.int64)]
    masked = tokens.copy()
    masked[positions] = np.where(kind < REPLACED, pieces.mask, np.where(kind < REPLACED_OR_KEPT, labels, any_token))
    return Masks(masked, positions, labels, drawn)


def uniform(raw: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) of raw random bits."""
    numbers: npt.NDArray[np.float64] = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def _words(tokens: Tokens, parts: tuple[tuple[int, int], ...], pieces: WordPieces) -> tuple[Tokens, Tokens, Tokens]:
    """Begin and end of each word, and how many words, itself included, are left in its part."""
    begins, ends, room = ([np.empty(0, dtype=np.int64)] for _ in range(3))
    for begin, end in parts:
        if begin == end:
            continue
        starts = ~pieces.continuing(tokens[begin:end])
        starts[0] = True
        found = begin + np.flatnonzero(starts)
        begins.append(found)
        ends.append(np.append(found[1:], end))
        room.append(np.arange(len(found), 0, -1))
    return np.concatenate(begins), np.concatenate(ends), np.concatenate(room)


def _drawn(raw: npt.NDArray[np.uint64], room: Tokens) -> Tokens:
    """The length of a run from each word: n with a probability proportional to 1/n, 1 <= n <= min(3, room)."""
    weights = 1 / np.arange(1, LARGEST_RUN + 1)
    # Row r: the probabilities of n <= 1, n <= 2, ... for a room of r words.
    below = np.array(
        [np.minimum(np.cumsum(weights) / max(weights[:r].sum(), 1.0), 1.0) for r in range(LARGEST_RUN + 1)]
    )
    draws = uniform(raw)[:, None]
    drawn: Tokens = 1 + (draws >= below[np.minimum(room, LARGEST_RUN), : LARGEST_RUN - 1]).sum(axis=1)
    return drawn
