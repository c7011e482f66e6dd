"""CanonicalShards: the shards in which layers compute at every tensor-parallel size, and sums over them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from commengine import Communicator
from commengine.compiled_ops import all_reduced


@dataclass(frozen=True)
class CanonicalShards:
    """``count`` shards of every split tensor, of which each rank of the tensor group ``comm`` has ``own`` neighbours.

    count: a power of two that ``comm.size`` divides (else ValueError). A group of several ranks must reduce in a tree
    (``Communicator(order="tree")``, else ValueError).
    """

    count: int
    comm: Communicator

    def __post_init__(self) -> None:
        require_count(self.count, self.comm.size)
        if self.comm.size > 1 and self.comm.order != "tree":
            raise ValueError(f"canonical shards need a tensor group with order='tree', not {self.comm.order!r}")

    @property
    def own(self) -> int:
        """The shards of this rank."""
        return self.count // self.comm.size

    @property
    def first(self) -> int:
        """The number of this rank's first shard."""
        return self.comm.rank * self.own

    def blocks(self, rows: int, *, split: bool) -> int:
        """The blocks of this rank's ``rows`` rows of tokens. split: each rank has its rows of the sequence.

        They are ``count`` over the whole sequence. A sequence of another length is one block; it cannot be split
        (ValueError).
        """
        if split:
            if rows % self.own:
                whole = rows * self.comm.size
                raise ValueError(f"a sequence of {whole} does not divide into {self.count} canonical shards")
            return self.own
        return self.count if rows % self.count == 0 else 1

    def sum_of_rows(self, *values: Tensor, split: bool) -> Tensor:
        """The sums over all tokens of each of ``values`` [s, ..., n], in a tree over blocks of rows, side by side.

        split: ``values`` are this rank's rows of the sequence. Then it is one all-reduce over the tensor group.
        """
        number = self.blocks(values[0].shape[0], split=split)
        blocks = zip(*(one.chunk(number) for one in values), strict=True)
        total = tree_sum(torch.cat([part.reshape(-1, part.shape[-1]).sum(dim=0) for part in block]) for block in blocks)
        if split and self.comm.size > 1:
            total, _ = all_reduced(total, self.comm)
        return total


def require_count(count: int, tensor: int) -> None:
    """Raise ValueError unless ``count`` canonical shards fit a tensor group of ``tensor`` ranks."""
    if count < 1 or count.bit_count() != 1:
        raise ValueError(f"canonical shards: {count} is not a power of two")
    if count % tensor:
        fitting = [2**k for k in range(count.bit_length())]
        raise ValueError(
            f"canonical shards: a tensor group of {tensor} ranks does not divide {count}; sizes that would: {fitting}"
        )


def tree_sum(parts: Iterable[Tensor]) -> Tensor:
    """The sum of ``parts``, of which the number is a power of two, in a binary tree over neighbours.

    It changes the parts, which nobody else may need. It takes them one after the other, and keeps no more than one for
    each level of the tree.
    """
    waiting: list[tuple[int, Tensor]] = []
    for part in parts:
        level, total = 0, part
        while waiting and waiting[-1][0] == level:
            total = waiting.pop()[1].add_(total)
            level += 1
        waiting.append((level, total))
    ((_, total),) = waiting
    return total


def stacked(x: Tensor, own: int) -> Tensor:
    """The ``own`` shards of ``x`` [..., own * n]: [own, ..., n], so that each is contiguous."""
    return torch.stack(x.tensor_split(own, dim=-1))


def unstacked(parts: Tensor) -> Tensor:
    """``parts`` [k, ..., n] side by side: [..., k * n]."""
    return torch.cat(parts.unbind(), dim=-1)
