"""The training step of ``bench.contest pipelining``: sizes, tokens, stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tplayers import GPT, GPTConfig, ModelPart, initialize


@dataclass(frozen=True)
class PipelineTask:
    """One step of a GPT on pipeline stages with equal numbers of layers. fp32, no dropout, AdamW, clipping at 1."""

    vocab_size: int = 8192
    hidden_size: int = 512
    num_layers: int = 4
    num_attention_heads: int = 8
    seq_length: int = 256
    micro_batch_size: int = 2
    microbatches: int = 8
    lr: float = 1e-4
    seed: int = 0

    def tokens(self) -> Tensor:
        """The samples of every step: int64 [micro-batches * micro-batch size, sequence + 1]."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.microbatches * self.micro_batch_size, self.seq_length + 1)
        return torch.randint(self.vocab_size, shape, generator=generator)

    def model(self, comm: Any, stage: int, stages: int) -> GPT:
        """The layers of a stage, with the values that they have in the whole model. comm: its tensor group."""
        each = self.num_layers // stages
        part = ModelPart(self.num_layers, (range(stage * each, (stage + 1) * each),))
        config = GPTConfig(
            self.num_layers, self.hidden_size, self.num_attention_heads, self.vocab_size, self.seq_length,
            hidden_dropout=0.0, attention_dropout=0.0, make_vocab_size_divisible_by=1,
        )  # fmt: skip
        model = GPT(config, comm, part=part)
        initialize(model, self.seed)
        return model
