"""Tensor-parallel peer of ``bench.contest step``: torch's DTensor and parallelize_module over gloo.

q, k, v and fc1 are column-parallel, the output projections row-parallel. Embedding and logits are replicated, as are
the other parts of BERT's heads; in the way "loss-parallel" the vocabulary is split as well: row-parallel embedding,
column-parallel head (one shared parameter, sharded along the vocabulary for both uses) and torch's loss_parallel().
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from bench.peers.group import process_group
from bench.peers.models import PlainModel
from bench.peers.plain import adamw, batch, build, make_step
from bench.programs.step_task import StepTask


def shard(model: PlainModel, mesh: DeviceMesh, split_vocabulary: bool) -> None:
    """Apply the tensor-parallel plan to the model, in place."""
    plan: dict[str, ParallelStyle] = {}
    for layer in range(len(model.h)):
        block = f"h.{layer}"
        # One conversion of the attention's input, not one in each of q, k and v: their three partial input
        # gradients are then added before they are all-reduced, once instead of three times.
        layouts = (Replicate(), None)  # the mask stays as it is
        plan[f"{block}.attn"] = PrepareModuleInput(input_layouts=layouts, desired_input_layouts=layouts)
        for part in "qkv":
            plan[f"{block}.attn.{part}"] = ColwiseParallel()
        plan[f"{block}.attn.c_proj"] = RowwiseParallel()
        plan[f"{block}.mlp.c_fc"] = ColwiseParallel()
        plan[f"{block}.mlp.c_proj"] = RowwiseParallel()
    if split_vocabulary:
        plan["wte"] = RowwiseParallel(input_layouts=Replicate())
        plan["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, plan)
    if split_vocabulary:  # each style made a parameter of its own; both are Shard(0), so tie them again
        model.head.weight = model.wte.weight


def local(tensor: Tensor) -> Tensor:
    """This rank's part of the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_sharded(parameter: Tensor) -> bool:
    """Whether other ranks hold other parts of the parameter."""
    return isinstance(parameter, DTensor) and any(placement.is_shard() for placement in parameter.placements)


def make_sharded_clip(task: StepTask, model: nn.Module) -> Callable[[], None]:
    """Clip by the global norm with one all-reduce of one number.

    clip_grad_norm_ on DTensors redistributes the norm of each parameter separately; this function works on local
    shards.
    """
    parameters = list(model.parameters())

    def square(chosen: list[nn.Parameter]) -> Tensor:
        gradients = [local(p.grad) for p in chosen if p.grad is not None]
        return nn.utils.get_total_norm(gradients, foreach=True) ** 2

    sharded = [p for p in parameters if is_sharded(p)]
    replicated = [p for p in parameters if not is_sharded(p)]

    def clip() -> None:
        total = square(sharded)
        dist.all_reduce(total)
        total += square(replicated)
        scale = (task.clip_grad / (total.sqrt() + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([local(p.grad) for p in parameters if p.grad is not None], scale)

    return clip if task.clip_grad else lambda: None


@contextlib.contextmanager
def contestant(task: dict[str, Any], way: str) -> Iterator[tuple[Callable[[], float], str]]:
    """The step of a `StepTask`. way: "loss-parallel" splits the vocabulary as well."""
    given, split_vocabulary = StepTask(**task), way == "loss-parallel"
    with process_group():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model = build(given, packed=False)
        shard(model, mesh, split_vocabulary)
        note = "q, k, v converted once"
        surroundings: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        if split_vocabulary:
            tied = model.head.weight is model.wte.weight
            note += f", vocabulary split, embedding {'tied' if tied else 'NOT TIED'}"
            surroundings = loss_parallel
        mine, clip = replace(batch(given), local=local), make_sharded_clip(given, model)
        yield make_step(model, adamw(given, model.parameters()), mine, clip, surroundings), note
