"""Sampling: how the next token is drawn from the model's logits."""

from __future__ import annotations

from dataclasses import dataclass

#: the range of what logits are divided by: far beyond all that is useful, and far from what float32 cannot hold
LEAST, MOST = 0.001, 1000.0


@dataclass(frozen=True)
class Sampling:
    """The steps from logits to a token, in this order, as `transformers` has them.

    repetition_penalty: logits above 0 of tokens that the row holds, its prompt included, are divided by this number,
        and those below 0 are multiplied by it (Keskar et al. 2019, section 4.1). 1: no penalty.
    temperature: logits are divided by it. 0: the token of the largest logit, which is greedy decoding; the two
        filters then change nothing.
    top_k: a token is kept if fewer than this many logits are larger than its own. 0: all are kept.
    top_p: of these, a token is kept if the tokens with larger logits have less than this probability together
        (Holtzman et al. 2020, section 3.1). 1: all are kept.

    Tokens of equal logits are kept or not together, so the filters do not depend on the order of the vocabulary.
    Raises ValueError, naming the field, for a value outside its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature != 0 and not LEAST <= self.temperature <= MOST:
            raise ValueError(f"temperature={self.temperature}: must be 0, or from {LEAST} to {MOST:g}")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}: must not be negative; 0 keeps all tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: must be above 0, and at most 1, which keeps all tokens")
        if not LEAST <= self.repetition_penalty <= MOST:
            raise ValueError(f"repetition_penalty={self.repetition_penalty}: must be from {LEAST} to {MOST:g}")
