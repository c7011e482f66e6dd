"""Whether copies that must be equal are equal, by checksums: replicas, and what a tensor group holds more than once.

Copies part for good when a bit flips in memory, when a rank computes something else, or when a collective gives ranks
different results. Nothing in a step compares them again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
import xxhash
from torch import Tensor

from commengine import Communicator
from tplayers import placements
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
    grid = trainer.grid
    trainer.optimizer.wait_for_parameters()
    held = list(_held(trainer))
    placed = placements(trainer.model)
    whole = [(name, value) for name, parameter, value in held if not placed[parameter].sharded]
    found = None
    for comm, items in ((grid.data, [(name, value) for name, _, value in held]), (grid.tensor, whole)):
        told = _compare(comm, items)  # every rank takes part in both
        found = found or told
    return found


def _held(trainer: Trainer) -> Iterator[tuple[str, str, int]]:
    """(Name, its parameter's name, checksum) of everything that each rank of the data group holds."""
    for name, parameter in trainer.model.named_parameters():
        yield name, name, checksum(parameter)
    for name, tensor in trainer.optimizer.unsharded():
        yield name, name.partition(".")[2], checksum(tensor)


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
