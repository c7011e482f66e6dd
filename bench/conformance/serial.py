"""Serial definitions of the usual collectives: from the tensors of all ranks to the results of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Serial = Callable[[Sequence[Tensor]], list[Tensor]]


def all_reduce(xs: Sequence[Tensor]) -> list[Tensor]:
    """Every rank gets the sum."""
    return [torch.stack(list(xs)).sum(0)] * len(xs)


def all_reduce_max(xs: Sequence[Tensor]) -> list[Tensor]:
    """Every rank gets the largest of all ranks' elements."""
    return [torch.stack(list(xs)).amax(0)] * len(xs)


def all_reduce_product(xs: Sequence[Tensor]) -> list[Tensor]:
    """Every rank gets the product."""
    return [torch.stack(list(xs)).prod(0)] * len(xs)


def all_reduce_mean(xs: Sequence[Tensor]) -> list[Tensor]:
    """Every rank gets the mean."""
    return [torch.stack(list(xs)).mean(0)] * len(xs)


def all_gather(xs: Sequence[Tensor]) -> list[Tensor]:
    """Every rank gets all rows."""
    return [torch.cat(list(xs))] * len(xs)


def parts(x: Tensor, ranks: int) -> list[Tensor]:
    """Rows for each rank, as equal as possible: the first ranks have one more."""
    return list(torch.tensor_split(x, ranks))


def reduce_scatter(xs: Sequence[Tensor]) -> list[Tensor]:
    """Every rank gets its rows of the sum."""
    return parts(torch.stack(list(xs)).sum(0), len(xs))


def scatter(xs: Sequence[Tensor]) -> list[Tensor]:
    """Every rank gets its rows of rank 0's tensor."""
    return parts(xs[0], len(xs))


def scatter_own(xs: Sequence[Tensor]) -> list[Tensor]:
    """Every rank takes its rows of a tensor that all hold."""
    return [parts(x, len(xs))[rank] for rank, x in enumerate(xs)]


def broadcast(xs: Sequence[Tensor]) -> list[Tensor]:
    """Every rank gets rank 0's tensor."""
    return [xs[0]] * len(xs)


def reduce(xs: Sequence[Tensor]) -> list[Tensor]:
    """Rank 0 gets the sum."""
    return on_root(torch.stack(list(xs)).sum(0), len(xs))


def gather(xs: Sequence[Tensor]) -> list[Tensor]:
    """Rank 0 gets all rows."""
    return on_root(torch.cat(list(xs)), len(xs))


def all_to_all(xs: Sequence[Tensor]) -> list[Tensor]:
    """Every rank sends a part of its rows to each rank, and gets the rows for it in rank order."""
    return [torch.cat([parts(x, len(xs))[rank] for x in xs]) for rank in range(len(xs))]


def same(xs: Sequence[Tensor]) -> list[Tensor]:
    """Every rank gets what it has."""
    return list(xs)


def neighbours(step: int) -> Serial:
    """Every rank gets the tensor of the rank ``step`` before it, in a ring."""
    return lambda xs: [xs[(rank - step) % len(xs)] for rank in range(len(xs))]


def on_root(x: Tensor, ranks: int) -> list[Tensor]:
    """``x`` on rank 0, and nothing on the others."""
    return [x, *[x.new_empty(0)] * (ranks - 1)]
