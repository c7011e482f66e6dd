"""The text that all contestants of ``bench.contest generation`` write: the model, the prompts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class GenerationTask:
    """Greedy text after random prompts, by a model of random weights, in fp32. The defaults are GPT-2's smallest model.

    A step continues ``batch`` prompts of ``prompt_tokens`` tokens by ``new_tokens`` tokens each. family: "gpt2", or
    "llama" with as many heads of keys as of queries. weights: the folder of the model, as
    `bench.peers.generated_text.write_model` writes it.
    """

    num_layers: int = 12
    hidden_size: int = 768
    num_attention_heads: int = 12
    vocab_size: int = 50257
    max_position_embeddings: int = 1024
    batch: int = 1
    prompt_tokens: int = 16
    new_tokens: int = 64
    seed: int = 0
    family: str = "gpt2"
    weights: str = ""

    def prompts(self) -> list[list[int]]:
        """The tokens of each prompt."""
        shape = (self.batch, self.prompt_tokens)
        found: list[list[int]] = np.random.default_rng(self.seed).integers(0, self.vocab_size, shape).tolist()
        return found


def checksum(texts: list[list[int]]) -> float:
    """A number from 0 to 1 that differs where the tokens differ: the "loss" by which a contest compares texts."""
    remainder = 0
    for token in (token for text in texts for token in text):
        remainder = (remainder * 65_599 + token + 1) % (2**31 - 1)
    return remainder / (2**31 - 1)
