"""Passages: sequences of tokens of which the last ones are scored; a text cut into overlapping windows is many of them.

The windows are the paper's (appendix E.1, with the overlap as it is in Megatron-LM's code): window k begins at token
k * stride. The first window scores all of its targets, each later one those that the window before did not reach.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

Tokens = np.ndarray[Any, np.dtype[np.integer[Any]]]


class Passage(NamedTuple):
    """A sequence of tokens, of which a model predicts the last ones.

    tokens: integers [n], n at least 2. scored: how many of the last tokens are targets, 1 to n - 1. Each of them is
    predicted from all tokens before it.
    """

    tokens: Tokens
    scored: int


class Windows(Sequence[Passage]):
    """The windows of one text or of several, one text after the other; no window crosses the end of a text.

    texts: the tokens of each. Every token but the first of a text is a target, and is scored in exactly one window. A
    text of fewer than two tokens has no window.
    length: the most tokens that the model reads at once. stride: the targets of every window but the first of a text;
    at most ``length``. The last window may have fewer.
    """

    def __init__(self, texts: Sequence[Tokens], length: int, stride: int) -> None:
        self.length, self.stride = length, stride
        self._texts = [tokens for tokens in texts if len(tokens) > 1]
        counts = (max(-(-(len(tokens) - 1 - length) // stride), 0) + 1 for tokens in self._texts)
        self._ends = list(accumulate(counts))
        #: the targets of all windows together
        self.targets = sum(len(tokens) - 1 for tokens in self._texts)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, n: int) -> Passage:  # type: ignore[override]
        """Window n; from the end if it is negative. Raises IndexError."""
        n = range(len(self))[n]
        which = bisect_right(self._ends, n)
        tokens, k = self._texts[which], n - (self._ends[which - 1] if which else 0)
        begin = k * self.stride
        end = min(begin + self.length, len(tokens) - 1)  # of the tokens that are read; the last target stands there
        before = begin - self.stride + self.length if k else 0  # targets of the windows before
        return Passage(tokens[begin : end + 1], end - before)
