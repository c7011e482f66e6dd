"""The plain torch.nn BERT that the peers train, its initial weights and its batch."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.contests.step_task import IGNORED, StepTask

from .layers import PlainBlock, linear_state, norm_state, normal, trunk_state


class PlainMLMTransform(nn.Module):
    """Dense, GELU by erf and norm, before the output layer of masked tokens."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden, hidden)
        self.ln = nn.LayerNorm(hidden)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.ln(F.gelu(self.dense(x)))
        return normed


class PlainBERT(nn.Module):
    """tokens, token types [batch, sequence], mask -> (logits [rows, vocabulary], logits of the order [batch, 2]).

    mask: bool [batch, 1, 1, sequence], True where a token is real. rows: the numbers of the rows of batch * sequence at
    which the head of masked tokens runs; None for all of them.
    """

    def __init__(self, task: StepTask, packed: bool = True) -> None:
        super().__init__()
        hidden = task.hidden_size
        self.wte = nn.Embedding(task.vocab_size, hidden)
        self.wpe = nn.Embedding(task.seq_length, hidden)
        self.wtt = nn.Embedding(2, hidden)
        self.h = nn.ModuleList(
            PlainBlock(hidden, task.num_attention_heads, packed=packed, causal=False, approximate="none")
            for _ in range(task.num_layers)
        )
        self.ln_f = nn.LayerNorm(hidden)
        self.transform = PlainMLMTransform(hidden)
        self.head = nn.Linear(hidden, task.vocab_size)
        self.head.weight = self.wte.weight
        self.pooler = nn.Linear(hidden, hidden)
        self.order = nn.Linear(hidden, 2)

    def forward(self, tokens: Tensor, types: Tensor, mask: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]] + self.wtt(types)
        for block in self.h:
            x = block(x, mask)
        x = self.ln_f(x)
        flat = x.flatten(0, 1)
        logits = self.head(self.transform(flat if rows is None else flat.index_select(0, rows)))
        return logits, self.order(torch.tanh(self.pooler(x[:, 0])))


def reference_bert(task: StepTask) -> dict[str, Tensor]:
    """The initial weights of all contestants (`trunk_state`). The head's weight is wte.weight and is not listed."""
    hidden = task.hidden_size
    return {
        **trunk_state(task),
        "wtt.weight": normal(task, "wtt.weight", 2, hidden),
        **linear_state(task, "transform.dense", hidden, hidden),
        **norm_state("transform.ln", hidden),
        "head.bias": torch.zeros(task.vocab_size),
        **linear_state(task, "pooler", hidden, hidden),
        **linear_state(task, "order", 2, hidden),
    }


def bert_batch(task: StepTask, rank: int, ranks: int) -> tuple[tuple[Tensor, ...], list[tuple[Tensor, float]]]:
    """The model's inputs, and for each of its outputs the targets and the factor of the sum of their losses.

    A mean is over the global batch. The ranks average their gradients, so the factor has the number of ranks.
    """
    whole = task.bert_batch()
    counted = int((whole.labels != IGNORED).sum())

    def mine(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).chunk(ranks)[rank].contiguous()

    tokens, types, labels, positions = map(mine, (whole.tokens, whole.token_types, whole.labels, whole.positions))
    mask = (torch.arange(task.seq_length) < mine(whole.lengths)[:, None])[:, None, None, :]
    inputs: tuple[Tensor, ...] = (tokens, types, mask)
    if task.masked_positions_only:
        inputs += ((torch.arange(len(tokens))[:, None] * task.seq_length + positions).flatten(),)
        labels = labels.gather(1, positions)
    order = mine(whole.order_labels)
    return inputs, [(labels.flatten(), ranks / counted), (order, ranks / task.global_batch_size)]
