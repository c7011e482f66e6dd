"""The plain torch.nn GPT that the peers train, its initial weights and its batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.contests.step_task import StepTask

from .layers import PlainBlock, trunk_state


class PlainGPT(nn.Module):
    """tokens [batch, sequence] -> (logits [batch * sequence, vocabulary],)."""

    def __init__(self, task: StepTask, packed: bool = True) -> None:
        super().__init__()
        self.wte = nn.Embedding(task.vocab_size, task.hidden_size)
        self.wpe = nn.Embedding(task.seq_length, task.hidden_size)
        self.h = nn.ModuleList(
            PlainBlock(task.hidden_size, task.num_attention_heads, packed=packed, causal=True, approximate="tanh")
            for _ in range(task.num_layers)
        )
        self.ln_f = nn.LayerNorm(task.hidden_size)
        self.head = nn.Linear(task.hidden_size, task.vocab_size, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> tuple[Tensor]:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        return (self.head(self.ln_f(x).flatten(0, 1)),)


def reference_gpt(task: StepTask) -> dict[str, Tensor]:
    """The initial weights of all contestants (`trunk_state`). The head is wte.weight and is not listed."""
    return trunk_state(task)


def gpt_batch(task: StepTask, rank: int, ranks: int) -> tuple[tuple[Tensor, ...], list[tuple[Tensor, float]]]:
    """The model's inputs, and for each of its outputs the targets and the factor of the sum of their losses."""
    tokens = torch.from_numpy(task.tokens()).chunk(ranks)[rank]
    targets = tokens[:, 1:].flatten()
    return (tokens[:, :-1].contiguous(),), [(targets, 1 / len(targets))]
