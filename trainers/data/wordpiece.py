"""WordPiece: BERT's kind of vocabulary, and how one is trained that is the same whenever it is trained."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import BertWordPieceTokenizer, trainers

from .vocabularies import CLS, MASK, PAD, SEP
from .vocabularies import SPECIAL as SPECIAL

#: the beginning of a token that continues a word
CONTINUES = "##"
#: the largest number of characters in a trained vocabulary, as in `BertWordPieceTokenizer`; others become [UNK]
_ALPHABET = 1000
#: characters of the longest word that a vocabulary is trained on: the trainers' time grows with the square of a word's
#: length, and 1 MB without a space would take minutes
LONGEST_WORD = 1000
_RUN = re.compile(r"\s+|\S+")


@dataclass(frozen=True)
class WordPieces:
    """The tokens of a WordPiece vocabulary by their use in BERT's samples.

    pad, cls, sep, mask: the ids of these tokens. continues: bool [V], whether the token of an id continues a word
    ("##..."). ordinary: int64, the ids of all tokens that text can contain, in rising order.
    """

    pad: int
    cls: int
    sep: int
    mask: int
    continues: npt.NDArray[np.bool_]
    ordinary: npt.NDArray[np.int64]

    @classmethod
    def of(cls, vocabulary: Mapping[str, int]) -> WordPieces:
        """The pieces of a vocabulary: the id of each token. Raises ValueError if a special token is not in it."""
        if missing := [token for token in SPECIAL if token not in vocabulary]:
            raise ValueError(f"the vocabulary has no {', '.join(missing)}; BERT needs {', '.join(SPECIAL)}")
        continues = np.zeros(max(vocabulary.values()) + 1, dtype=np.bool_)
        continues[[number for token, number in vocabulary.items() if token.startswith(CONTINUES)]] = True
        special = {vocabulary[token] for token in SPECIAL}
        ordinary = np.array(sorted(set(vocabulary.values()) - special), dtype=np.int64)
        if not len(ordinary):
            raise ValueError(f"the vocabulary has no token besides {', '.join(SPECIAL)}")
        pad, cls_, sep, mask = (vocabulary[token] for token in (PAD, CLS, SEP, MASK))
        return cls(pad, cls_, sep, mask, continues, ordinary)

    def continuing(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Whether each token continues a word. An id outside the vocabulary, which no model takes, is no error here."""
        return self.continues[np.clip(tokens, 0, len(self.continues) - 1)]

    @classmethod
    def mock(cls, vocab_size: int) -> WordPieces:
        """Those of mock data: the special tokens first, and then words of one token each.

        Raises ValueError unless there is room for a word.
        """
        words = {str(number): number for number in range(len(SPECIAL), vocab_size)}
        return cls.of({token: number for number, token in enumerate(SPECIAL)} | words)


def backend(vocabulary: Mapping[str, int], *, lowercase: bool) -> tokenizers.Tokenizer:
    """BERT's tokenizer of this vocabulary. Raises ValueError if a special token is not in it.

    lowercase: the text is lower-cased, and its accents are dropped, as for BERT's "uncased" vocabularies.
    """
    WordPieces.of(vocabulary)
    return _plain(BertWordPieceTokenizer(dict(vocabulary), lowercase=lowercase))


def train(texts: Callable[[], Iterable[str]], vocab_size: int, *, lowercase: bool) -> dict[str, int]:
    """A vocabulary of at most ``vocab_size`` tokens; a small corpus gives fewer. The same texts give the same one.

    texts: called twice, for the same texts. Raises ValueError if there is no room for the characters of the texts.

    The library's own trainer numbers the characters in the order of a hash table that differs from process to process,
    and breaks ties by number. So the characters are counted, ordered and numbered here, as if they were special.
    """
    untrained = _plain(BertWordPieceTokenizer(lowercase=lowercase))
    normalize, words = untrained.normalizer.normalize_str, untrained.pre_tokenizer.pre_tokenize_str
    counts: Counter[str] = Counter()
    for text in texts():
        counts.update(normalize(text))
    found = sorted((character for character in counts if not character.isspace()), key=lambda c: (-counts[c], c))
    alphabet = sorted(found[:_ALPHABET])
    # Punctuation and Chinese characters are words by themselves, so they never continue one.
    inner = [CONTINUES + character for character in alphabet if len(words(normalize(f"a{character}a"))) == 1]
    first = [*SPECIAL, *alphabet, *inner]
    if vocab_size < len(first):
        raise ValueError(f"want at least {len(first)} tokens for the characters of this text, got {vocab_size}")
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, min_frequency=2, limit_alphabet=len(alphabet), initial_alphabet=alphabet,
        special_tokens=first, continuing_subword_prefix=CONTINUES, show_progress=False,
    )  # fmt: skip
    train_on(untrained, texts(), trainer)
    vocabulary: dict[str, int] = untrained.get_vocab(with_added_tokens=False)
    return vocabulary


def train_on(backend: tokenizers.Tokenizer, texts: Iterable[str], trainer: Any) -> None:
    """Train ``backend`` with a trainer of ``tokenizers``, on words of at most LONGEST_WORD characters (`cut_words`).

    It trains on a thread of its own, so that Ctrl-C ends the wait at once: the library looks for no signal.
    """
    problems: list[BaseException] = []

    def work() -> None:
        try:
            backend.train_from_iterator(cut_words(texts), trainer)
        except BaseException as error:  # of the texts, raised where they are asked for
            problems.append(error)

    thread = threading.Thread(target=work, daemon=True)  # the process does not wait for it after Ctrl-C
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
    if problems:
        raise problems[0]


def cut_words(texts: Iterable[str], longest: int = LONGEST_WORD) -> Iterator[str]:
    """The same texts, with no run of ``longest`` characters or more that are all white space, or all not: it is cut."""
    for text in texts:
        words = text.split()
        blank = len(text) - sum(map(len, words))
        if len(text) < longest or (max(map(len, words), default=0) < longest and blank - len(words) < longest):
            yield text
            continue
        start = 0
        for found in _RUN.finditer(text):
            if len(found[0]) >= longest:
                yield text[start : found.start()]
                yield from (found[0][place : place + longest] for place in range(0, len(found[0]), longest))
                start = found.end()
        yield text[start:]


def read(lines: Sequence[str]) -> dict[str, int]:
    """The vocabulary of a vocab.txt, a token a line. Raises ValueError where a token is there twice."""
    tokens = [line.rstrip("\r\n") for line in lines]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        twice = next(token for number, token in enumerate(tokens) if vocabulary[token] != number)
        raise ValueError(f"the token {twice!r} is there twice")
    return vocabulary


def _plain(wrapped: BertWordPieceTokenizer) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(wrapped.to_str())
