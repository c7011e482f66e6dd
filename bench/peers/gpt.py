"""The plain torch.nn GPT that the peers train, its reference weights, and the peer on one process.

    python -m bench.peers.gpt [--task FILE]

It has as many threads as OMP_NUM_THREADS says. Its losses are the reference for all contestants.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from bench.command.parser import ProgramParser, new_program_parser
from bench.contests.serving import serve
from bench.contests.step_task import StepTask


class PlainAttention(nn.Module):
    """Causal self-attention.

    The number of heads follows from the width of the projections' results, so that a tensor-parallel plan may leave
    only some heads to this rank.
    """

    def __init__(self, hidden: int, heads: int, packed: bool) -> None:
        super().__init__()
        self.head_size = hidden // heads
        self.packed = packed
        if packed:
            self.c_attn = nn.Linear(hidden, 3 * hidden)
        else:
            self.q, self.k, self.v = (nn.Linear(hidden, hidden) for _ in range(3))
        self.c_proj = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.c_attn(x).chunk(3, dim=-1) if self.packed else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: Tensor = self.c_proj(y.transpose(1, 2).flatten(2))
        return projected


class PlainMLP(nn.Module):
    """Two linear layers, with four times the width in between."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(hidden, 4 * hidden)
        self.c_proj = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))
        return projected


class PlainBlock(nn.Module):
    """Pre-LN: x + attention(LN(x)), then x + MLP(LN(x))."""

    def __init__(self, hidden: int, heads: int, packed: bool) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(hidden)
        self.attn = PlainAttention(hidden, heads, packed)
        self.ln_2 = nn.LayerNorm(hidden)
        self.mlp = PlainMLP(hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        y: Tensor = x + self.mlp(self.ln_2(x))
        return y


class PlainGPT(nn.Module):
    """tokens [batch, sequence] -> logits [batch * sequence, vocabulary]."""

    def __init__(self, task: StepTask, packed: bool = True) -> None:
        super().__init__()
        self.wte = nn.Embedding(task.vocab_size, task.hidden_size)
        self.wpe = nn.Embedding(task.seq_length, task.hidden_size)
        self.h = nn.ModuleList(
            PlainBlock(task.hidden_size, task.num_attention_heads, packed) for _ in range(task.num_layers)
        )
        self.ln_f = nn.LayerNorm(task.hidden_size)
        self.head = nn.Linear(task.hidden_size, task.vocab_size, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        logits: Tensor = self.head(self.ln_f(x).flatten(0, 1))
        return logits


def reference_state(task: StepTask) -> dict[str, Tensor]:
    """The initial weights of all contestants, in torch's [out, in] layout. The head is wte.weight and is not listed.

    Weights are N(0, 0.02), and those of the two projections onto the residual stream are divided by sqrt(2 * layers).
    Biases are 0, LayerNorms 1 and 0. Each tensor is drawn from a generator that its name seeds. c_attn holds the rows
    of q, then k, then v.
    """

    def normal(name: str, *shape: int, std: float = 0.02) -> Tensor:
        digest = hashlib.sha256(f"{task.seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        return torch.randn(shape, generator=generator) * std

    hidden, residual = task.hidden_size, 0.02 / math.sqrt(2 * task.num_layers)
    state = {
        "wte.weight": normal("wte.weight", task.vocab_size, hidden),
        "wpe.weight": normal("wpe.weight", task.seq_length, hidden),
    }
    norms = ["ln_f"]
    for layer in range(task.num_layers):
        block = f"h.{layer}"
        norms += [f"{block}.ln_1", f"{block}.ln_2"]
        for name, rows, columns, std in (
            (f"{block}.attn.c_attn", 3 * hidden, hidden, 0.02),
            (f"{block}.attn.c_proj", hidden, hidden, residual),
            (f"{block}.mlp.c_fc", 4 * hidden, hidden, 0.02),
            (f"{block}.mlp.c_proj", hidden, 4 * hidden, residual),
        ):
            state[f"{name}.weight"] = normal(f"{name}.weight", rows, columns, std=std)
            state[f"{name}.bias"] = torch.zeros(rows)
    for name in norms:
        state[f"{name}.weight"], state[f"{name}.bias"] = torch.ones(hidden), torch.zeros(hidden)
    return state


def split_qkv(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights for a model with separate q, k and v."""
    split = {}
    for name, value in state.items():
        if ".c_attn." in name:
            for part, rows in zip("qkv", value.chunk(3), strict=True):
                split[name.replace("c_attn", part)] = rows.contiguous()
        else:
            split[name] = value
    return split


def build(task: StepTask, packed: bool = True) -> PlainGPT:
    """The unsharded model with the reference weights."""
    state = load_file(task.weights) if task.weights else reference_state(task)
    model = PlainGPT(task, packed)
    state = state if packed else split_qkv(state)
    model.load_state_dict({**state, "head.weight": state["wte.weight"]})
    return model


def batch(task: StepTask, rank: int = 0, ranks: int = 1) -> tuple[Tensor, Tensor]:
    """This data-parallel rank's inputs and targets, contiguous."""
    tokens = torch.from_numpy(task.tokens()).chunk(ranks)[rank]
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def adamw(task: StepTask, parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """The optimizer of all peers. Biases and norms, the parameters of one dimension, do not decay.

    The fused kernel takes a list of either tensors or DTensors, so each of the two has groups of its own.
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.dim() > 1, type(parameter.data) is Tensor), []).append(parameter)
    decay = {True: task.weight_decay, False: 0.0}
    return torch.optim.AdamW(
        [{"params": group, "weight_decay": decay[matrices]} for (matrices, _), group in groups.items()],
        lr=task.lr, fused=True,
    )  # fmt: skip


def make_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Tensor,
    targets: Tensor,
    clip: Callable[[], None],
) -> Callable[[], float]:
    """One training step; ``clip`` gets the reduced gradients. The step returns its loss."""
    labels = targets.flatten()

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(inputs), labels)
        torch.autograd.backward(loss)
        clip()
        optimizer.step()
        return loss.item()

    return step


def make_clip(task: StepTask, model: nn.Module) -> Callable[[], None]:
    """Clip by the norm of whole gradients. It does not work for a sharded model."""
    parameters = list(model.parameters())
    if not task.clip_grad:
        return lambda: None
    return lambda: void(nn.utils.clip_grad_norm_(parameters, task.clip_grad, foreach=True))


def void(_: object) -> None:
    """Drop a result."""


def parser(program: str, description: str | None) -> ProgramParser:
    """The options that every peer has."""
    options = new_program_parser(program, description)
    options.add_argument(
        "--task", type=Path, help="JSON file of a bench.contests.step_task.StepTask; default: its default"
    )
    return options


def read_task(path: Path | None) -> StepTask:
    """The task in that file, or the default task without a file."""
    return StepTask.load(path) if path else StepTask()


def main() -> None:
    """Set up, then do as the driver says."""
    options = parser("bench.peers.gpt", __doc__).parse_args()
    task = read_task(options.task)
    model = build(task)
    optimizer = adamw(task, model.parameters())
    step = make_step(model, optimizer, *batch(task), make_clip(task, model))
    serve(step, note=f"{torch.get_num_threads()} threads, packed QKV")


if __name__ == "__main__":
    main()
