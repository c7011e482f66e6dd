"""Small corpora for tests: made-up paragraphs with altered copies, of which a rule keeps some; samples with names."""

import functools
import hashlib
import itertools
import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from trainers.data.samples import Samples


@functools.cache
def vocabulary(count: int) -> list[str]:
    """Distinct made-up words."""
    rng = random.Random(0)
    words: dict[str, None] = {}
    while len(words) < count:
        letters = (rng.choice("aeiou" if n % 2 else "bcdfgklmnprstvz") for n in range(rng.randint(3, 9)))
        words["".join(letters)] = None
    return list(words)


def paragraphs(count: int, words: int = 90, seed: int = 0) -> list[str]:
    """Paragraphs of about so many words, which are drawn by Zipf's law, in sentences."""
    rng = random.Random(seed)
    known = vocabulary(3000)
    weights = list(itertools.accumulate(1 / rank for rank in range(1, len(known) + 1)))
    found = []
    for _ in range(count):
        drawn = rng.choices(known, cum_weights=weights, k=rng.randint(words // 2, 3 * words // 2))
        sentences = [" ".join(drawn[at : at + 12]).capitalize() + "." for at in range(0, len(drawn), 12)]
        found.append(" ".join(sentences))
    return found


def altered(text: str, share: float, rng: random.Random) -> str:
    """The same text with about this share of its words drawn anew from it."""
    words = text.split(" ")
    return " ".join(rng.choice(words) if rng.random() < share else word for word in words)


def with_copies(count: int, seed: int = 0) -> list[str]:
    """``count`` paragraphs, and from none to four altered copies of each, some of them copies of copies; shuffled."""
    rng = random.Random(seed)
    texts = []
    for text in paragraphs(count, seed=seed):
        family = [text]
        for _ in range(rng.choice((0, 0, 1, 1, 2, 4))):
            family.append(altered(rng.choice(family), rng.choice((0.0, 0.01, 0.03, 0.05, 0.08)), rng))
        texts += family
    rng.shuffle(texts)
    return texts


def grams(text: str) -> set[str]:
    """The character 5-grams of a text."""
    return {text[at : at + 5] for at in range(len(text) - 4)}


def similarity(first: str, second: str) -> float:
    """The Jaccard similarity of two texts, by its definition."""
    one, other = grams(first), grams(second)
    return len(one & other) / len(one | other) if one | other else 0.0


def similarities(texts: Sequence[str]) -> np.ndarray:
    """The Jaccard similarities of all pairs, [texts, texts], exactly: by counting in a matrix of texts and 5-grams."""
    sets = [grams(text) for text in texts]
    numbers = {gram: number for number, gram in enumerate(sorted(set().union(*sets)))}
    holds = np.zeros((len(texts), len(numbers)), np.float32)
    for row, found in enumerate(sets):
        holds[row, [numbers[gram] for gram in found]] = 1
    shared = holds @ holds.T  # below 2^24, so exact
    sizes = np.array([len(found) for found in sets])
    return shared / np.maximum(sizes[:, None] + sizes[None, :] - shared, 1)


def in_order(texts: Iterable[str]) -> list[str]:
    """The distinct texts in the order in which documents are taken."""
    return sorted(set(texts), key=lambda text: hashlib.blake2b(text.encode(), digest_size=16).digest())


def greedy(similar: np.ndarray) -> list[int]:
    """The rows that are kept: each, in order, unless one that is kept is similar to it. similar: bool [n, n]."""
    kept: list[int] = []
    for row in range(len(similar)):
        if not similar[row, kept].any():
            kept.append(row)
    return kept


class Named(Samples):
    """Samples that say what they are: the name of their source, the epoch in which they are drawn, their index."""

    def __init__(self, name: str, count: int) -> None:
        self.name, self.count = name, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, n: int) -> Any:
        return self.draw(0, n)

    def draw(self, epoch: int, n: int) -> Any:
        return self.name, epoch, n
