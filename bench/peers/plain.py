"""The training step of the peers: their models, optimizer and loss, and the peer on one process.

    python -m bench.peers.plain [--task FILE]

It has as many threads as OMP_NUM_THREADS says. Its losses are the reference for all contestants.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from bench.command.parser import ProgramParser, new_program_parser
from bench.contests.serving import serve
from bench.contests.step_task import IGNORED, StepTask

from .bert import PlainBERT, bert_batch, reference_bert
from .gpt import PlainGPT, gpt_batch, reference_gpt

#: a model that the peers train
PlainModel: TypeAlias = PlainGPT | PlainBERT

#: name -> the model's class, its initial weights, its batch
_MODELS: dict[str, tuple[Callable[..., PlainModel], Callable[[StepTask], dict[str, Tensor]], Callable[..., Any]]] = {
    "gpt": (PlainGPT, reference_gpt, gpt_batch),
    "bert": (PlainBERT, reference_bert, bert_batch),
}


@dataclass(frozen=True)
class PlainBatch:
    """The arguments of the model, and for each of its outputs the targets and the factor of the sum of their losses.

    local: makes a plain tensor of a loss.
    """

    inputs: tuple[Tensor, ...]
    targets: list[tuple[Tensor, float]]
    local: Callable[[Tensor], Tensor] = lambda loss: loss

    def loss(self, outputs: tuple[Tensor, ...]) -> Tensor:
        """The loss of this rank: the mean of the ranks' losses is that of the global batch."""
        terms = [
            self.local(F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")) * factor
            for logits, (labels, factor) in zip(outputs, self.targets, strict=True)
        ]
        return terms[0] if len(terms) == 1 else torch.stack(terms).sum()


def reference_state(task: StepTask) -> dict[str, Tensor]:
    """The initial weights of all contestants."""
    return _MODELS[task.model][1](task)


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


def build(task: StepTask, packed: bool = True) -> PlainModel:
    """The unsharded model with the reference weights."""
    state = load_file(task.weights) if task.weights else reference_state(task)
    model = _MODELS[task.model][0](task, packed)
    state = state if packed else split_qkv(state)
    model.load_state_dict({**state, "head.weight": state["wte.weight"]})
    return model


def batch(task: StepTask, rank: int = 0, ranks: int = 1) -> PlainBatch:
    """This data-parallel rank's batch, contiguous."""
    return PlainBatch(*_MODELS[task.model][2](task, rank, ranks))


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
    batch: PlainBatch,
    clip: Callable[[], None],
    surroundings: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Callable[[], float]:
    """One training step; ``clip`` gets the reduced gradients. The step returns its loss.

    surroundings: the context of loss and backward.
    """

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with surroundings():
            loss = batch.loss(model(*batch.inputs))
            torch.autograd.backward(loss)
        clip()
        optimizer.step()
        return float(loss.item())

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
    options = parser("bench.peers.plain", __doc__).parse_args()
    task = read_task(options.task)
    model = build(task)
    optimizer = adamw(task, model.parameters())
    step = make_step(model, optimizer, batch(task), make_clip(task, model))
    serve(step, note=f"{torch.get_num_threads()} threads, packed QKV")


if __name__ == "__main__":
    main()
