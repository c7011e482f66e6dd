"""The GPT and the BERT that the peers train, in plain torch.nn, and their initial weights."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.programs.step_task import StepTask


class PlainAttention(nn.Module):
    """Self-attention, causal or with a mask.

    The number of heads follows from the width of the projections' results, so that a tensor-parallel plan may leave
    only some heads to this rank.
    """

    def __init__(self, hidden: int, heads: int, packed: bool, causal: bool) -> None:
        super().__init__()
        self.head_size = hidden // heads
        self.packed = packed
        self.causal = causal
        if packed:
            self.c_attn = nn.Linear(hidden, 3 * hidden)
        else:
            self.q, self.k, self.v = (nn.Linear(hidden, hidden) for _ in range(3))
        self.c_proj = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        qkv = self.c_attn(x).chunk(3, dim=-1) if self.packed else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in qkv)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal)
        projected: Tensor = self.c_proj(y.transpose(1, 2).flatten(2))
        return projected


class PlainBlock(nn.Module):
    """Pre-LN: x + attention(LN(x)), then x + MLP(LN(x)), whose GELU is by erf in BERT and by tanh in GPT."""

    def __init__(self, task: StepTask, packed: bool) -> None:
        super().__init__()
        hidden, bert = task.hidden_size, task.model == "bert"
        self.ln_1 = nn.LayerNorm(hidden)
        self.attn = PlainAttention(hidden, task.num_attention_heads, packed, causal=not bert)
        self.ln_2 = nn.LayerNorm(hidden)
        layers = {
            "c_fc": nn.Linear(hidden, 4 * hidden),
            "gelu": nn.GELU("none" if bert else "tanh"),
            "c_proj": nn.Linear(4 * hidden, hidden),
        }
        self.mlp = nn.Sequential(OrderedDict(layers))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), mask)
        y: Tensor = x + self.mlp(self.ln_2(x))
        return y


class PlainModel(nn.Module):
    """GPT: tokens [batch, sequence] -> (logits [batch * sequence, vocabulary],).

    BERT: tokens, token types [batch, sequence], mask -> (logits [rows, vocabulary], logits of the order [batch, 2]).
    mask: bool [batch, 1, 1, sequence], True where a token is real. rows: the numbers of the rows of batch * sequence at
    which the head of masked tokens runs; None for all of them.
    """

    def __init__(self, task: StepTask, packed: bool = True) -> None:
        super().__init__()
        hidden, self.bert = task.hidden_size, task.model == "bert"
        self.wte = nn.Embedding(task.vocab_size, hidden)
        self.wpe = nn.Embedding(task.seq_length, hidden)
        self.h = nn.ModuleList(PlainBlock(task, packed) for _ in range(task.num_layers))
        self.ln_f = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, task.vocab_size, bias=self.bert)
        self.head.weight = self.wte.weight
        if self.bert:
            self.wtt = nn.Embedding(2, hidden)
            transform = {"dense": nn.Linear(hidden, hidden), "gelu": nn.GELU(), "ln": nn.LayerNorm(hidden)}
            self.transform = nn.Sequential(OrderedDict(transform))
            self.pooler = nn.Linear(hidden, hidden)
            self.order = nn.Linear(hidden, 2)

    def forward(
        self, tokens: Tensor, types: Tensor | None = None, mask: Tensor | None = None, rows: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        if self.bert:
            x = x + self.wtt(types)
        for block in self.h:
            x = block(x, mask)
        x = self.ln_f(x)
        flat = x.flatten(0, 1)
        if not self.bert:
            return (self.head(flat),)
        logits = self.head(self.transform(flat if rows is None else flat.index_select(0, rows)))
        return logits, self.order(torch.tanh(self.pooler(x[:, 0])))


def reference_state(task: StepTask) -> dict[str, Tensor]:
    """The initial weights of all contestants, in torch's [out, in] layout. The head's weight is wte.weight.

    Weights are N(0, 0.02), and those of the two projections onto the residual stream are divided by sqrt(2 * layers).
    Each is drawn from a generator that its name seeds. Biases are 0, LayerNorms 1 and 0. c_attn holds the rows of q,
    then k, then v.
    """
    state = {}
    for name, parameter in PlainModel(task).named_parameters():
        if parameter.dim() == 1:
            state[name] = torch.zeros_like(parameter) if name.endswith("bias") else torch.ones_like(parameter)
            continue
        digest = hashlib.sha256(f"{task.seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        std = 0.02 / math.sqrt(2 * task.num_layers) if name.endswith("c_proj.weight") else 0.02
        state[name] = torch.randn(parameter.shape, generator=generator) * std
    return state
