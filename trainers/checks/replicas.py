"""Whether copies that must be equal are equal: replicas, and what a tensor group holds more than once.

Copies part for good when a bit flips in memory, when a rank computes something else, or when a collective gives ranks
different results. Nothing in a step compares them again.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch
import xxhash
from torch import Tensor, nn

from commengine import Communicator, ProcessGrid
from commengine.agreement import raise_together
from commengine.rank_zero import broadcast_json
from tplayers import placements
from trainers.training.module_buffers import copy_from_rank_zero
from trainers.training.trainer import Trainer

#: bytes of a device's tensor that are copied to the host at once
BLOCK = 1 << 26


def checksum(tensor: Tensor) -> int:
    """XXH3 of 64 bits of the tensor's values, as a signed integer. It waits for a device."""
    hashed = xxhash.xxh3_64()
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    for start in range(0, flat.numel(), BLOCK):
        hashed.update(flat[start : start + BLOCK].cpu().numpy().data)
    return int.from_bytes(hashed.digest(), "big", signed=True)


def difference(trainer: Trainer) -> str | None:
    """What differs between copies on several ranks, and where, or None. Collective over the trainer's world.

    Compared over the data group: parameters, and masters and AdamW's moments where they are not sharded (ZeRO-1). Over
    the tensor group: the same of parameters that are not split. The ranks of a group get the same answer; groups do
    not. It costs one pass over these tensors and two collectives of 16 bytes. To be called between steps.
    """
    trainer.optimizer.wait_for_parameters()
    placed = placements(trainer.model)
    state = ((name, name.partition(".")[2], tensor) for name, tensor in trainer.optimizer.unsharded())
    parameters = ((name, name, parameter) for name, parameter in trainer.model.named_parameters())
    return differing(
        trainer.grid, [(name, tensor, placed[of].sharded) for name, of, tensor in itertools.chain(parameters, state)]
    )


def differing(grid: ProcessGrid, held: Iterable[tuple[str, Tensor, bool]]) -> str | None:
    """What differs between the ranks of this rank's data group or tensor group, and where, or None.

    held: (name, tensor, whether the ranks of a tensor group hold different parts). Collective over both groups.
    """
    hashed = [(name, checksum(tensor), sharded) for name, tensor, sharded in held]
    every = [(name, value) for name, value, _ in hashed]
    whole = [(name, value) for name, value, sharded in hashed if not sharded]
    told = [_compare(grid.data, every), _compare(grid.tensor, whole)]  # every rank takes part in both
    return told[0] or told[1]


def require_same_structure(world: Communicator, module: nn.Module) -> None:
    """Raise CollectiveError on every rank unless ``module`` has the same parameters and buffers on every rank.

    Names, global shapes, dtypes, kinds of devices, and which parameters require a gradient are compared; values are
    not. Collective.
    """
    mine = dict(_structure(module))
    first: dict[str, str] = broadcast_json(world, mine)
    problem = None
    for name in [*first, *mine]:
        if (one := mine.get(name, "missing")) != (other := first.get(name, "missing")):
            problem = f"the module differs between ranks: {name} is {one}, and on rank 0 it is {other}"
            break
    if problem is None and list(mine) != list(first):
        problem = "the module differs between ranks: it has the parameters of rank 0 in another order"
    raise_together(world.mpi, problem)


def begin_equal(grid: ProcessGrid, module: nn.Module, *, copy: bool) -> None:
    """Give all replicas the values of the first one. Collective over the grid's world.

    copy: False: raise CollectiveError on every rank instead, if the values differ; it names the first one that does.
    Parameters that a tensor group holds more than once are treated likewise. Its ranks may have buffers of their own.
    """
    placed = placements(module)
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    if copy:
        copy_from_rank_zero([p for name, p in parameters.items() if not placed[name].sharded], grid.tensor)
        copy_from_rank_zero([*parameters.values(), *buffers.values()], grid.data)
        return
    held = [(name, p, placed[name].sharded) for name, p in parameters.items()]
    problem = differing(grid, [*held, *((name, buffer, True) for name, buffer in buffers.items())])
    raise_together(grid.world.mpi, problem and f"make_equal=False, and the replicas differ: {problem}")


def _structure(module: nn.Module) -> Iterator[tuple[str, str]]:
    placed = placements(module)
    for name, parameter in module.named_parameters():
        frozen = "a parameter" if parameter.requires_grad else "a frozen parameter"
        yield name, f"{frozen} of {_described(parameter)} {list(placed[name].shape)}"
    for name, buffer in module.named_buffers():
        yield name, f"a buffer of {_described(buffer)} {list(buffer.shape)}"


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device.type}"


def _compare(comm: Communicator, items: Sequence[tuple[str, int]]) -> str | None:
    """The first item that is not equal on all ranks of ``comm``, or None. Collective over ``comm``."""
    if comm.size == 1:
        return None
    mine = torch.tensor([value for _, value in items], dtype=torch.int64)
    of_all = checksum(mine) >> 1  # a bit less, so that it can be negated
    ends = torch.tensor([of_all, -of_all])
    comm.all_reduce(ends, "max")
    if int(ends[0]) == -int(ends[1]):
        return None
    every = mine.new_empty(comm.size, len(items))
    comm.all_gather(every, mine.unsqueeze(0))
    unequal = [n for n in range(len(items)) if len(set(every[:, n].tolist())) > 1]
    name, values = items[unequal[0]][0], every[:, unequal[0]].tolist()
    more = f" (and {len(unequal) - 1} more)" if len(unequal) > 1 else ""
    return f"{name}{more} {_parties(values, comm.world_ranks())}"


def _parties(values: Sequence[int], ranks: Sequence[int]) -> str:
    """Who has which value: "on rank 3 is not that of ranks 0, 1, 2", or all parties if no majority is there."""
    counted = Counter(values).most_common()
    parties = [[rank for rank, value in zip(ranks, values, strict=True) if value == one] for one, _ in counted]
    if len(parties) == 2 and len(parties[0]) > len(parties[1]):
        return f"on {_named(parties[1])} is not that of {_named(parties[0])}"
    return f"differs between {' and '.join(map(_named, parties))}"


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
