"""The training step that every contestant of bench.step_contest makes: sizes, tokens, optimizer, weights."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class StepTask:
    """One GPT training step, described completely. fp32, no dropout, learned positions, tied embedding.

    Pre-LN blocks with a final LN (eps 1e-5), biases everywhere but in the head, GELU(tanh); AdamW with torch's default
    betas and eps, weight decay on all parameters but biases and norms; the loss is the mean over all tokens.
    """

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
    weights: str = ""  # safetensors file of bench.peers.gpt.reference_state(); "": draw them

    def tokens(self) -> np.ndarray:
        """The tokens, int64 [global batch, sequence + 1], the same at every step.

        Inputs are [:, :-1], and targets [:, 1:].
        """
        shape = (self.global_batch_size, self.seq_length + 1)
        return np.random.default_rng(self.seed).integers(0, self.vocab_size, shape)

    def save(self, path: Path | str) -> None:
        Path(path).write_text(json.dumps(asdict(self), indent=1))

    @staticmethod
    def load(path: Path | str) -> StepTask:
        return StepTask(**json.loads(Path(path).read_text()))
