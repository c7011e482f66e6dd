"""Digests of a step: numbers that are equal in two runs if, and almost only if, all bits are.

They do not depend on the layout: each element's bits are multiplied by a number that follows from its place in the
global tensor, and the products are added up as 64-bit integers that wrap around. Integers have no order of addition.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from commengine.rank_zero import gather_json
from tplayers import Placement, whole_placements
from tplayers.rng import generator
from trainers.training.holders import first_copies
from trainers.training.trainer import Step, Trainer

#: the end of the names of digests in metrics.jsonl
SUFFIX = "_digest"

#: the names, in a row of metrics.jsonl that has digests, of the sizes of the groups, and the group of each. A row has
#: the last three only where they are above 1
LAYOUT = {
    "tensor_model_parallel_size": "tensor", "data_parallel_size": "data",
    "pipeline_model_parallel_size": "pipeline", "context_parallel_size": "context",
    "expert_model_parallel_size": "expert",
}  # fmt: skip

#: of a digest: every program that reads JSON keeps whole numbers of this size
BITS = 52

#: elements that are multiplied at once, in a core's cache
CHUNK = 1 << 16

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digests(trainer: Trainer, step: Step) -> dict[str, int]:
    """The digests of a step's losses and norm, and of the parameters after it, for a row of metrics.jsonl.

    Those of the parameters are 0 on all replicas but the first, and on all stages but the first. Collective over the
    trainer's tensor, expert and pipeline groups and, with ZeRO-1, over its replicas. It takes a pass over the
    parameters.
    """
    trainer.optimizer.wait_for_parameters()
    weights = weights_digest(trainer) if trainer.grid.expert_replicas.rank == 0 else 0
    return {
        f"loss{SUFFIX}": _of_text(" ".join(f"{name} {loss.hex()}" for name, loss in step.losses.items())),
        f"norm{SUFFIX}": _of_text(step.norm.hex()),
        f"weights{SUFFIX}": weights,
    }


def layout(trainer: Trainer) -> dict[str, int]:
    """The layout of the step's ranks, which stands beside the digests: a run may go on at another one."""
    sizes = {name: getattr(trainer.grid.layout, axis) for name, axis in LAYOUT.items()}
    return {name: size for name, size in sizes.items() if LAYOUT[name] in ("tensor", "data") or size > 1}


def weights_digest(trainer: Trainer) -> int:
    """The digest of all parameters, on the first stage and the first rank of an expert group; 0 elsewhere.

    Collective over the trainer's tensor, expert and pipeline groups.
    """
    model, grid = trainer.model, trainer.grid
    placed = whole_placements(model)
    mine = first_copies(model, dict(model.named_parameters()))
    sums = {name: tensor_sum(one.detach(), placed[name]) for name, one in mine.items()}
    split = torch.tensor([number if placed[name].sharded else 0 for name, number in sums.items()])
    grid.tensor.all_reduce(split)
    found = {
        name: of_all if placed[name].sharded else number
        for (name, number), of_all in zip(sums.items(), split.tolist(), strict=True)
    }
    for group in (grid.expert, grid.pipeline):
        found = {name: number for part in gather_json(group, found) for name, number in part.items()}
    return _of_text(" ".join(f"{name} {found[name]}" for name in placed)) if found else 0


def tensor_sum(part: Tensor, placement: Placement) -> int:
    """The sum of the products for this rank's ``part`` of a tensor, as a signed 64-bit integer.

    The sum of all ranks' numbers, modulo 2^64, is a digest of the global tensor.
    """
    part = part.cpu()
    if placement.padded:  # its elements have no places in a grid; it is rare
        factors = functools.reduce(torch.mul, _along(placement.view))
        factors = placement.part(factors.reshape(placement.shape))
        return int((bits(part).long() * factors).sum())
    rows = bits(part if part.dim() == 2 and part.t().is_contiguous() else part.contiguous()).view(placement.part_view)
    # In the order in which the elements lie: a weight may lie transposed.
    order = sorted(range(rows.dim()), key=rows.stride, reverse=True)
    along = [_along(placement.view)[dim].narrow(dim, placement.part_start[dim], rows.shape[dim]) for dim in order]
    *along, last = (factors.reshape(-1) for factors in along)
    of_rows = functools.reduce(lambda one, other: torch.outer(one, other).view(-1), along, last.new_ones(1))
    rows = rows.permute(order).reshape(-1, len(last))
    total = torch.zeros((), dtype=torch.int64)
    step = max(CHUNK // rows.shape[1], 1)
    for some, factors in zip(torch.split(rows, step), torch.split(of_rows, step), strict=True):
        total += ((some.long() * last).sum(dim=1) * factors).sum()
    return int(total)


def bits(tensor: Tensor) -> Tensor:
    """The bits of each element as an integer of the same size, in the memory of ``tensor``."""
    return tensor.view(_INTEGERS[tensor.itemsize])


def _along(sizes: tuple[int, ...]) -> list[Tensor]:
    """The factors of each dimension, in the shape in which they multiply: int64 [1, ..., size, ..., 1]."""
    dims = range(len(sizes))
    return [_factors(dim, size).view([size if other == dim else 1 for other in dims]) for dim, size in enumerate(sizes)]


@functools.lru_cache(maxsize=64)
def _factors(dim: int, size: int) -> Tensor:
    """Odd numbers [size], so that no bit of an element is lost in the product."""
    drawn = torch.randint(-(2**62), 2**62, (size,), generator=generator(dim, "digest"))
    return drawn * 2 + 1


def _of_text(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=math.ceil(BITS / 8)).digest()
    return int.from_bytes(digest, "little") % (1 << BITS)


def of_row(row: Mapping[str, object]) -> dict[str, object]:
    """The digests of a row of metrics.jsonl, by name."""
    return {name: value for name, value in row.items() if name.endswith(SUFFIX)}
