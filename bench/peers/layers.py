"""The plain torch.nn layers of the models that the peers train, and their initial weights."""

from __future__ import annotations

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.contests.step_task import StepTask


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


class PlainMLP(nn.Module):
    """Two linear layers, with four times the width in between. approximate: torch's name for the form of GELU."""

    def __init__(self, hidden: int, approximate: str) -> None:
        super().__init__()
        self.approximate = approximate
        self.c_fc = nn.Linear(hidden, 4 * hidden)
        self.c_proj = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.c_proj(F.gelu(self.c_fc(x), approximate=self.approximate))
        return projected


class PlainBlock(nn.Module):
    """Pre-LN: x + attention(LN(x)), then x + MLP(LN(x))."""

    def __init__(self, hidden: int, heads: int, *, packed: bool, causal: bool, approximate: str) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(hidden)
        self.attn = PlainAttention(hidden, heads, packed, causal)
        self.ln_2 = nn.LayerNorm(hidden)
        self.mlp = PlainMLP(hidden, approximate)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), mask)
        y: Tensor = x + self.mlp(self.ln_2(x))
        return y


def normal(task: StepTask, name: str, *shape: int, std: float = 0.02) -> Tensor:
    """Initial values N(0, std^2), drawn from a generator that the tensor's name seeds."""
    digest = hashlib.sha256(f"{task.seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randn(shape, generator=generator) * std


def trunk_state(task: StepTask) -> dict[str, Tensor]:
    """The initial weights of the two embeddings, the blocks and the last norm, in torch's [out, in] layout.

    Weights are N(0, 0.02), and those of the two projections onto the residual stream are divided by sqrt(2 * layers).
    Biases are 0, LayerNorms 1 and 0. c_attn holds the rows of q, then k, then v.
    """
    hidden, residual = task.hidden_size, 0.02 / math.sqrt(2 * task.num_layers)
    state = {
        "wte.weight": normal(task, "wte.weight", task.vocab_size, hidden),
        "wpe.weight": normal(task, "wpe.weight", task.seq_length, hidden),
        **norm_state("ln_f", hidden),
    }
    for layer in range(task.num_layers):
        block = f"h.{layer}"
        state |= norm_state(f"{block}.ln_1", hidden) | norm_state(f"{block}.ln_2", hidden)
        state |= linear_state(task, f"{block}.attn.c_attn", 3 * hidden, hidden)
        state |= linear_state(task, f"{block}.attn.c_proj", hidden, hidden, residual)
        state |= linear_state(task, f"{block}.mlp.c_fc", 4 * hidden, hidden)
        state |= linear_state(task, f"{block}.mlp.c_proj", hidden, 4 * hidden, residual)
    return state


def linear_state(task: StepTask, name: str, rows: int, columns: int, std: float = 0.02) -> dict[str, Tensor]:
    """Initial weight and bias of a linear layer."""
    return {f"{name}.weight": normal(task, f"{name}.weight", rows, columns, std=std), f"{name}.bias": torch.zeros(rows)}


def norm_state(name: str, hidden: int) -> dict[str, Tensor]:
    """Initial weight and bias of a norm."""
    return {f"{name}.weight": torch.ones(hidden), f"{name}.bias": torch.zeros(hidden)}
