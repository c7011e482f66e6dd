"""CanonicalShards: the shards in which layers compute at every tensor-parallel size, and sums over them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from commengine import Communicator
from commengine.compiled_ops import all_reduced
from tplayers.functions import one_derivative


@dataclass(frozen=True)
class CanonicalShards:
    """``count`` shards of every split tensor, of which each rank of the tensor group ``comm`` has ``own`` neighbours.

    count: a power of two that ``comm.size`` divides (else ValueError). A group of several ranks must reduce in a tree
    (``Communicator(order="tree")``, else ValueError). context: the ranks that share each sequence, or None; each has
    some of a rank's shards in attention, so that ``comm.size * context.size`` must divide ``count``. parts: of each
    sequence, a power of two that the ranks of ``context`` divide: products are computed for each part apart.
    """

    count: int
    comm: Communicator
    context: Communicator | None = None
    parts: int = 1

    def __post_init__(self) -> None:
        require_count(self.count, self.comm.size * self.sharing)
        for group in (self.comm, self.context):
            if group is not None and group.size > 1 and group.order != "tree":
                raise ValueError(f"canonical shards need a {group.name} group with order='tree', not {group.order!r}")
        if self.parts.bit_count() != 1 or self.parts % self.sharing:
            raise ValueError(f"canonical parts: {self.parts} is no power of two that {self.sharing} ranks divide")

    @property
    def sharing(self) -> int:
        """The ranks that share a sequence."""
        return 1 if self.context is None else self.context.size

    @property
    def own(self) -> int:
        """The shards of this rank."""
        return self.count // self.comm.size

    @property
    def first(self) -> int:
        """The number of this rank's first shard."""
        return self.comm.rank * self.own

    def cut(self, x: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
        """``x`` by this rank's parts of a sequence along ``dim``; as it is if they do not divide its rows."""
        own = self.parts // self.sharing
        return x.chunk(own, dim) if x.shape[dim] % own == 0 else (x,)

    def blocks(self, rows: int, *, split: bool) -> int:
        """The blocks of this rank's ``rows`` rows of tokens. split: each rank has its rows of the sequence.

        They are ``count`` over the whole sequence. A sequence of another length is one block; it cannot be split, nor
        shared (ValueError).
        """
        number = (self.own if split else self.count) // self.sharing
        if rows % number == 0:
            return number
        if split or self.sharing > 1:
            whole = rows * self.sharing * (self.comm.size if split else 1)
            raise ValueError(f"a sequence of {whole} does not divide into {self.count} canonical shards")
        return 1

    def sum_of_rows(self, *values: Tensor, split: bool) -> Tensor:
        """The sums over all tokens of each of ``values`` [s, ..., n], in a tree over blocks of rows, side by side.

        split: ``values`` are this rank's rows of the sequence. Then it is one all-reduce over the tensor group. Ranks
        that share a sequence run one more.
        """
        number = self.blocks(values[0].shape[0], split=split)
        blocks = zip(*(one.chunk(number) for one in values), strict=True)
        total = tree_sum(torch.cat([part.reshape(-1, part.shape[-1]).sum(dim=0) for part in block]) for block in blocks)
        if split and self.comm.size > 1:
            total, _ = all_reduced(total, self.comm)
        return self.of_all_rows(total)

    def of_all_rows(self, total: Tensor) -> Tensor:
        """The sum over the ranks that share a sequence of each one's ``total``, which is changed."""
        if self.context is None or self.context.size == 1:
            return total
        if total.is_contiguous():
            return all_reduced(total, self.context)[0]
        return all_reduced(total.t().contiguous(), self.context)[0].t()  # a weight may lie transposed

    def uses(self, parameter: Tensor, count: int) -> tuple[Tensor, ...]:
        """``parameter`` once for each of ``count`` parts of this rank.

        Its gradient is the sum over all parts of all ranks.
        """
        if self.parts == 1:
            return (parameter,)
        found: tuple[Tensor, ...] = _Uses.apply(parameter, self, count)  # type: ignore[no-untyped-call]
        return found


class _Uses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, shards: CanonicalShards, count: int) -> tuple[Tensor, ...]:
        ctx.shards = shards
        return tuple(parameter.view_as(parameter) for _ in range(count))

    @staticmethod
    @one_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.shards.of_all_rows(tree_sum(grads)), None, None


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
