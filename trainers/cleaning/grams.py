"""Character 5-grams of texts: sketches that find similar texts, and the exact Jaccard similarity.

A sketch is 25 bands of 5 minimum hashes. Two texts of Jaccard similarity J have an equal band with a probability of
about 1 - (1 - J^5)^25: 0.99 at J = 0.7, 0.54 at 0.5, 0.06 at 0.3. A text of fewer than 5 characters has no 5-gram: it
has no sketch, and its similarity to any text is 0.

Minimum hashes by one permutation (Li, Owen, Zhang 2012) take 5 passes over the 5-grams, not 125: each of 5 hash
functions puts every 5-gram into one of 25 bins, and the least hash of each bin counts. Band j has bin j of the 5
functions. An empty bin takes the value of another one (Shrivastava 2017, "Optimal Densification").
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

GRAM = 5  # characters
BANDS, ROWS = 25, 5

_PACKED = 1 << 12  # alphabets up to this size fit five times into 64 bits


def _constants(name: str, count: int, dtype: str) -> NDArray[Any]:
    """Random numbers that are the same on every rank and with every version of numpy."""
    return np.frombuffer(hashlib.shake_128(name.encode()).digest(count * np.dtype(dtype).itemsize), dtype).copy()


#: the odd multipliers that make one number of five code points
_FIRST, _SECOND, _THIRD = _constants("characters", 3, "<u4") | np.uint32(1)
#: hash function k is _FACTORS[k] * x + _OFFSETS[k] modulo 2^32: a bijection, because the factor is odd
_FACTORS = _constants("factors", ROWS, "<u4") | np.uint32(1)
_OFFSETS = _constants("offsets", ROWS, "<u4")
#: for each function and bin, all bins in a random order: the first that is not empty gives its value to an empty bin
_DONORS = _constants("donors", ROWS * BANDS * BANDS, "<u8").reshape(ROWS, BANDS, BANDS).argsort(axis=2)
_KEYS = _constants("keys", ROWS, "<u8").reshape(ROWS, 1) | np.uint64(1)
_EMPTY = np.uint32(0xFFFFFFFF)


def code_points(texts: Sequence[str]) -> NDArray[np.uint32]:
    """The code points of all texts, one text after the other. Raises UnicodeEncodeError for half of a surrogate."""
    return np.frombuffer("".join(texts).encode("utf-32-le"), np.dtype("<u4")).astype(np.uint32, copy=False)


def _hashed_grams(codes: NDArray[np.uint32]) -> NDArray[Any]:
    """A 32-bit hash of the 5-gram that begins at each code point but the last four."""
    pairs = codes[:-1] * _FIRST + codes[1:]
    hashed: NDArray[Any] = (pairs[:-3] * _SECOND + pairs[2:-1]) * _THIRD + codes[4:]
    # The finalizer of MurmurHash3: similar 5-grams get unrelated numbers.
    hashed ^= hashed >> np.uint32(16)
    hashed *= np.uint32(0x85EBCA6B)
    hashed ^= hashed >> np.uint32(13)
    hashed *= np.uint32(0xC2B2AE35)
    hashed ^= hashed >> np.uint32(16)
    return hashed


def band_keys(texts: Sequence[str]) -> NDArray[Any]:
    """The keys of each text's bands, uint64 [texts, BANDS]. Two texts whose keys of one band are equal may be similar.

    texts: each of at least `GRAM` characters. It is fastest for a few 10,000 characters, which stay in a core's cache.
    """
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    counts = lengths - GRAM + 1
    hashed = _hashed_grams(code_points(texts))
    if len(texts) > 1:  # leave out those that begin in one text and end in the next one
        inside = np.ones(len(hashed), np.bool_)
        inside[(np.cumsum(lengths)[:-1, None] - np.arange(1, GRAM)).ravel()] = False
        hashed = hashed[inside]
    first_bins = np.repeat(np.arange(len(texts)) * BANDS, counts)
    minima = np.full((ROWS, len(texts), BANDS), _EMPTY)
    for row in range(ROWS):
        values = hashed * _FACTORS[row]
        values += _OFFSETS[row]
        bins = values >> np.uint32(16)
        bins *= np.uint32(BANDS)
        bins >>= np.uint32(16)
        np.minimum.at(minima[row].reshape(-1), first_bins + bins, values)
        _fill(minima[row], _DONORS[row])
    keys: NDArray[Any] = (minima.reshape(ROWS, -1) * _KEYS).sum(axis=0, dtype=np.uint64)
    # The finalizer for 64 bits, so that the keys are spread evenly over the ranks.
    keys ^= keys >> np.uint64(33)
    keys *= np.uint64(0xFF51AFD7ED558CCD)
    keys ^= keys >> np.uint64(33)
    return keys.reshape(len(texts), BANDS)


def _fill(minima: NDArray[np.uint32], donors: NDArray[np.int64]) -> None:
    """Give every empty bin of [texts, BANDS] the value of the first of its ``donors`` [BANDS, BANDS] that has one."""
    texts, bins = np.nonzero(minima == _EMPTY)
    if not len(texts):
        return
    given = minima.copy()
    for attempt in range(BANDS):
        given[texts, bins] = minima[texts, donors[bins, attempt]]
        missing = given[texts, bins] == _EMPTY
        texts, bins = texts[missing], bins[missing]
    minima[...] = given


def gram_sets(texts: Sequence[str]) -> list[NDArray[np.int64]]:
    """The distinct 5-grams of each text as sorted numbers. Within one call equal numbers are equal 5-grams, exactly."""
    codes = code_points(texts)
    numbers = _numbered_grams(codes) if len(codes) >= GRAM else np.empty(0, np.int64)
    sets, begin = [], 0
    for text in texts:
        grams = np.sort(numbers[begin : max(begin + len(text) - GRAM + 1, begin)])
        sets.append(grams[np.concatenate(([True], grams[1:] != grams[:-1]))] if len(grams) else grams)
        begin += len(text)
    return sets


def _numbered_grams(codes: NDArray[np.uint32]) -> NDArray[Any]:
    """A number for the 5-gram that begins at each code point but the last four."""
    present = np.zeros(int(codes.max()) + 1, np.bool_)
    present[codes] = True
    letters: NDArray[Any] = (np.cumsum(present, dtype=np.int64) - 1)[codes]
    count = int(present.sum())
    if count <= _PACKED:
        pairs = (letters[:-1] << 12) | letters[1:]
        packed: NDArray[Any] = (pairs[:-3] << 36) | (pairs[2:-1] << 12) | letters[4:]
        return packed
    # A large alphabet, as of Chinese: number the distinct pairs, then the distinct fours, whose count is at most that
    # of the characters, so that four and letter fit together into 64 bits.
    pairs = _numbered(letters[:-1] * count + letters[1:])
    fours = _numbered(pairs[:-2] * len(codes) + pairs[2:])
    numbered: NDArray[Any] = fours[:-1] * count + letters[4:]
    return numbered


def _numbered(values: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.unique(values, return_inverse=True)[1]


def jaccard(first: NDArray[np.int64], second: NDArray[np.int64]) -> float:
    """The Jaccard similarity of two sets of one call of `gram_sets`; 0 if both are empty."""
    both = np.concatenate((first, second))
    both.sort()
    shared = int(np.count_nonzero(both[1:] == both[:-1]))
    return shared / (len(both) - shared) if len(both) else 0.0
