"""Tensor-parallel peer: torch's DTensor and parallelize_module over gloo.

    torchrun --nproc-per-node 2 -m bench.peers.dtensor [--task FILE] [--loss-parallel]

q, k, v and fc1 are column-parallel, the output projections row-parallel. Embedding and logits are replicated, as are
the other parts of BERT's heads; with --loss-parallel the vocabulary is split as well: row-parallel embedding,
column-parallel head (one shared parameter, sharded along the vocabulary for both uses) and torch's loss_parallel().
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
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

from bench.contests.serving import serve
from bench.contests.step_task import StepTask
from bench.peers.plain import PlainModel, adamw, batch, build, make_step, parser, read_task


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


def main() -> None:
    """Set up, then do as the driver says."""
    options = parser("bench.peers.dtensor", __doc__)
    options.add_argument("--loss-parallel", action="store_true", help="split the vocabulary as well")
    arguments = options.parse_args()
    task = read_task(arguments.task)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = build(task, packed=False)
    shard(model, mesh, arguments.loss_parallel)
    optimizer = adamw(task, model.parameters())
    clip = make_sharded_clip(task, model)
    note = "q, k, v converted once"
    surroundings: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    if arguments.loss_parallel:
        tied = model.head.weight is model.wte.weight
        note += f", vocabulary split, embedding {'tied' if tied else 'NOT TIED'}"
        surroundings = loss_parallel
    step = make_step(model, optimizer, replace(batch(task), local=local), clip, surroundings)
    serve(step, note=note)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
