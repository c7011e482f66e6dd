"""Whether copies that must be equal are equal: replicas, and what a tensor group holds more than once.

Copies part for good when a bit flips in memory, when a rank computes something else, or when a collective gives ranks
different results. Nothing in a step compares them again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch
import xxhash
from torch import Tensor, nn

from commengine import Communicator, ProcessGrid
from commengine.copies import difference_between
from commengine.rank_zero import broadcast_json
from tplayers import placements
from tplayers.experts.moe import expert_parameters
from trainers.training.layout import unusable
from trainers.training.module_state import copy_from_rank_zero
from trainers.training.trainer import Trainer

#: bytes of a device's tensor that are copied to the host at once
BLOCK = 1 << 26
#: relative difference of gradients that ranks may have, because they round differently
_TOLERANCE = 1e-3


def checksum(tensor: Tensor) -> int:
    """XXH3 of 64 bits of the tensor's values, as a signed integer. It waits for a device."""
    hashed = xxhash.xxh3_64()
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    for start in range(0, flat.numel(), BLOCK):
        hashed.update(flat[start : start + BLOCK].cpu().numpy().data)
    return int.from_bytes(hashed.digest(), "big", signed=True)


def difference(trainer: Trainer) -> str | None:
    """What differs between copies on several ranks, and where, or None. Collective over the trainer's world.

    Compared over the replicas, which are the data and the context ranks: parameters, and masters and AdamW's moments
    where they are not sharded (ZeRO-1); those of experts over the replicas that have the same experts. Over the tensor
    group: the same of parameters that are not split. Between the first and the last stage of a pipeline: a tied weight.
    The ranks of a group get the same answer; groups do not. It costs one pass over these tensors and two collectives of
    16 bytes, and one more for experts and for a tied weight. To be called between steps.
    """
    trainer.optimizer.wait_for_parameters()
    placed, experts = placements(trainer.model), expert_parameters(trainer.model)
    state = ((name, name.partition(".")[2], tensor) for name, tensor in trainer.optimizer.unsharded())
    parameters = ((name, name, parameter) for name, parameter in trainer.model.named_parameters())
    every = [*parameters, *state]
    found = differing(
        trainer.grid, [(name, tensor, placed[of].sharded) for name, of, tensor in every],
        {name for name, of, _ in every if of in experts},
    )  # fmt: skip
    tied = trainer.tied
    if tied is not None and tied.ends is not None:
        of_copies = difference_between(tied.ends, [(tied.name, checksum(trainer.gradients.named[tied.name]))])
        found = found or of_copies
    return found


def differing(
    grid: ProcessGrid, held: Iterable[tuple[str, Tensor, bool]], experts: Collection[str] = ()
) -> str | None:  # fmt: skip
    """The first difference between this rank's replicas or in its tensor group, and where it is; None without one.

    held: (name, tensor, whether the ranks of a tensor group hold different parts). experts: the names that only the
    ranks of ``grid.expert_replicas`` hold. Collective over these groups.
    """
    hashed = [(name, checksum(tensor), sharded) for name, tensor, sharded in held]
    of_all = [(name, value) for name, value, _ in hashed if name not in experts]
    of_experts = [(name, value) for name, value, _ in hashed if name in experts]
    whole = [(name, value) for name, value, sharded in hashed if not sharded]
    # Every rank takes part in all of them.
    told = [difference_between(grid.replicas, of_all), difference_between(grid.tensor, whole)]
    if experts:
        told.append(difference_between(grid.expert_replicas, of_experts))
    return next((one for one in told if one is not None), None)


def require_same_structure(world: Communicator, module: nn.Module) -> None:
    """Raise CollectiveError on every rank unless ``module`` has the same parameters and buffers on every rank.

    Names, global shapes, dtypes, kinds of devices, and which parameters require a gradient are compared; values and
    the order of elements in memory are not. Raises it, too, if a parameter's values cannot be shared, as those of an
    expanded one. Collective.
    """
    mine = dict(_structure(module))
    first: dict[str, str] = broadcast_json(world, mine)
    problem = next((f"{name} {why}" for name, p in module.named_parameters() if (why := unusable(p))), None)
    for name in [*first, *mine]:
        if (one := mine.get(name, "missing")) != (other := first.get(name, "missing")):
            problem = problem or f"the module differs between ranks: {name} is {one}, and on rank 0 it is {other}"
            break
    if problem is None and list(mine) != list(first):
        problem = "the module differs between ranks: it has the parameters of rank 0 in another order"
    world.compare("the module", problem)


def begin_equal(grid: ProcessGrid, module: nn.Module, *, copy: bool) -> None:
    """Give all replicas the values of the first one. Collective over the grid's world.

    copy: False: raise CollectiveError on every rank instead, if the values differ; it names the first one that does.
    Parameters that a tensor group holds more than once are treated likewise. Its ranks may have buffers of their own.
    """
    placed = placements(module)
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    if copy:
        copy_from_rank_zero([p for name, p in parameters.items() if not placed[name].sharded], grid.tensor)
        copy_from_rank_zero([*parameters.values(), *buffers.values()], grid.replicas)
        return
    held = [(name, p, placed[name].sharded) for name, p in parameters.items()]
    problem = differing(grid, [*held, *((name, buffer, True) for name, buffer in buffers.items())])
    grid.world.compare("the values", problem and f"make_equal=False, and the replicas differ: {problem}")


def require_equal_gradients(grid: ProcessGrid, module: nn.Module) -> None:
    """Raise CollectiveError on every rank unless a tensor group has one gradient for what its ranks all hold.

    Such a parameter is not split: each rank holds all of it, and must compute all of its gradient. A layer that is not
    of tplayers, in a network on split fields, computes the term of this rank's block only. Norms are compared with a
    tolerance of 0.1%, because ranks may round differently. Collective over the grid's world.
    """
    placed = placements(module)
    whole = [(name, p) for name, p in module.named_parameters() if p.requires_grad and not placed[name].sharded]
    mine = torch.zeros((1, len(whole)), dtype=torch.float64)
    for number, (_, parameter) in enumerate(whole):
        if parameter.grad is not None:
            mine[0, number] = torch.linalg.vector_norm(parameter.grad.detach(), dtype=torch.float64)
    norms = mine.new_empty((grid.tensor.size, len(whole)))
    grid.tensor.all_gather(norms, mine)
    apart = norms.amax(0) - norms.amin(0) > _TOLERANCE * norms.amax(0)
    apart &= norms.isfinite().all(0)  # what is not finite may be a loss scale that is too large
    found = [
        f"{name} (norms {', '.join(f'{norm:.4g}' for norm in norms[:, number].tolist())})"
        for number, (name, _) in enumerate(whole)
        if apart[number]
    ]
    problem = None
    if found:
        problem = (
            f"the ranks of a tensor group have different gradients of parameters that each of them holds: "
            f"{', '.join(found)}. In a network on split fields each layer with parameters must be one of tplayers, "
            "such as FieldConv with kernel_size=1, because another layer's gradient is that of this rank's block only"
        )
    grid.world.compare("the gradients", problem)


def _structure(module: nn.Module) -> Iterator[tuple[str, str]]:
    placed = placements(module)
    for name, parameter in module.named_parameters():
        frozen = "a parameter" if parameter.requires_grad else "a frozen parameter"
        yield name, f"{frozen} of {_described(parameter)} {list(placed[name].shape)}"
    for name, buffer in module.named_buffers():
        yield name, f"a buffer of {_described(buffer)} {list(buffer.shape)}"


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device.type}"
