"""The training step that every contestant of ``bench.contest step`` makes: sizes, tokens, optimizer, weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

#: the models that can be trained
MODELS = ("gpt", "bert")

#: the share of a BERT sample's real tokens that is masked
MASKED = 0.15

#: a label that does not count
IGNORED = -100


class BERTBatch(NamedTuple):
    """A global batch of BERT. lengths: the real tokens of each sample; labels: -100 where a token is not masked.

    positions: of the masked tokens of each sample, [global batch, most masked tokens]; position 0, whose label is -100,
    fills the rows.
    """

    tokens: np.ndarray  # int64 [global batch, sequence], as are token_types and labels
    token_types: np.ndarray
    lengths: np.ndarray  # int64 [global batch], as is order_labels
    labels: np.ndarray
    order_labels: np.ndarray
    positions: np.ndarray


@dataclass(frozen=True)
class StepTask:
    """One training step, described completely. fp32, no dropout, learned positions, tied embedding, pre-LN (eps 1e-5).

    AdamW has torch's default betas and eps, and weight decay on all parameters but biases and norms.

    gpt: causal attention, GELU by tanh, no bias in the head; the loss is the mean over all tokens. bert: token types,
    padding that attention leaves out, GELU by erf, both heads, with a bias; the loss is the mean over the masked tokens
    of the global batch plus that of the order of sentences over its samples.
    """

    model: str = "gpt"
    masked_positions_only: bool = False  # BERT's head of masked tokens runs at the masked positions, not at all
    vocab_size: int = 8192
    hidden_size: int = 512
    num_layers: int = 4
    num_attention_heads: int = 8
    seq_length: int = 256
    global_batch_size: int = 4
    lr: float = 1e-4
    weight_decay: float = 0.01
    clip_grad: float = 1.0  # global gradient norm; 0 turns clipping off
    seed: int = 0
    weights: str = ""  # safetensors file of bench.peers.models.reference_state()

    def tokens(self) -> np.ndarray:
        """The tokens, int64 [global batch, sequence + 1], the same at every step.

        Inputs are [:, :-1], and targets [:, 1:].
        """
        shape = (self.global_batch_size, self.seq_length + 1)
        return np.random.default_rng(self.seed).integers(0, self.vocab_size, shape)

    def bert_batch(self) -> BERTBatch:
        """The global batch of a BERT, the same at every step. Samples have from half of the sequence to all of it."""
        random = np.random.default_rng(self.seed)
        shape = (self.global_batch_size, self.seq_length)
        tokens = random.integers(0, self.vocab_size, shape)
        lengths = random.integers(self.seq_length // 2, self.seq_length + 1, shape[0])
        cuts = random.integers(1, lengths)
        labels = np.full(shape, IGNORED)
        positions = np.zeros((shape[0], round(MASKED * self.seq_length)), dtype=np.int64)
        for sample, length in enumerate(lengths):
            chosen = np.sort(random.choice(np.arange(1, length), round(MASKED * length), replace=False))
            labels[sample, chosen] = random.integers(0, self.vocab_size, len(chosen))
            positions[sample, : len(chosen)] = chosen
        types = (np.arange(self.seq_length) >= cuts[:, None]).astype(np.int64)
        return BERTBatch(tokens, types, lengths, labels, random.integers(0, 2, shape[0]), positions)
