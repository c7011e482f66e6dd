"""The training step of the peers: their models, optimizer and loss, and the peer on one process.

It has as many threads as OMP_NUM_THREADS says. Its losses are the reference for all contestants.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from bench.programs.step_task import IGNORED, StepTask

from .models import PlainModel


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


def build(task: StepTask, packed: bool = True) -> PlainModel:
    """The unsharded model with the reference weights, with q, k and v in one layer (``packed``) or in three."""
    state = load_file(task.weights)
    for name in [name for name in state if ".c_attn." in name and not packed]:
        for part, rows in zip("qkv", state.pop(name).chunk(3), strict=True):
            state[name.replace("c_attn", part)] = rows.contiguous()
    model = PlainModel(task, packed)
    model.load_state_dict({**state, "head.weight": state["wte.weight"]})
    return model


def batch(task: StepTask, rank: int = 0, ranks: int = 1) -> PlainBatch:
    """This data-parallel rank's batch, contiguous.

    A mean is over the global batch. The ranks average their gradients, so its factor has the number of ranks.
    """

    def mine(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).chunk(ranks)[rank].contiguous()

    if task.model == "gpt":
        tokens = mine(task.tokens())
        targets = tokens[:, 1:].flatten()
        return PlainBatch((tokens[:, :-1].contiguous(),), [(targets, 1 / len(targets))])
    whole = task.bert_batch()
    tokens, types, lengths, labels, order, positions = map(mine, whole)
    mask = (torch.arange(task.seq_length) < lengths[:, None])[:, None, None, :]
    inputs: tuple[Tensor, ...] = (tokens, types, mask)
    if task.masked_positions_only:
        inputs += ((torch.arange(len(tokens))[:, None] * task.seq_length + positions).flatten(),)
        labels = labels.gather(1, positions)
    counted = int((whole.labels != IGNORED).sum())
    return PlainBatch(inputs, [(labels.flatten(), ranks / counted), (order, ranks / task.global_batch_size)])


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
    clip: Callable[[], object],
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


def make_clip(task: StepTask, model: nn.Module) -> Callable[[], object]:
    """Clip by the norm of whole gradients. It does not work for a sharded model."""
    parameters = list(model.parameters())
    if not task.clip_grad:
        return lambda: None
    return partial(nn.utils.clip_grad_norm_, parameters, task.clip_grad, foreach=True)


@contextlib.contextmanager
def contestant(task: dict[str, Any], way: str) -> Iterator[tuple[Callable[[], float], str]]:
    """The step of a `StepTask` in one process."""
    given = StepTask(**task)
    model = build(given)
    step = make_step(model, adamw(given, model.parameters()), batch(given), make_clip(given, model))
    yield step, f"{torch.get_num_threads()} threads, packed QKV"
