"""Ulysses: the ranks of a context group exchange positions for heads (Jacobs et al. 2023, arXiv 2309.14509)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from commengine import Communicator
from tplayers.adjoint_pair import apply_pair
from tplayers.formulas import copies_of_groups


def whole_sequences(
    q: Tensor, k: Tensor, v: Tensor, comm: Communicator, core: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """``core`` of whole sequences and some heads, where each rank has all heads of its part of the sequences.

    q [b, heads, s / comm.size, d]; k, v [b, groups, s / comm.size, d] -> [b, heads, s / comm.size, d]. ``comm.size``
    must divide the heads (else ValueError). Groups that it does not divide are sent several times, as few as possible.
    core: q [b, heads / comm.size, s, d], k, v of as many heads or of groups of them -> as q. Two all-to-alls forward
    and two backward, of 2 * heads + 2 * groups heads together each. Every rank must call it and run its backward.
    """
    size, heads, groups = comm.size, q.shape[1], k.shape[1]
    if heads % size:
        fitting = [ranks for ranks in range(1, heads + 1) if heads % ranks == 0]
        raise ValueError(
            f"a context group of {size} ranks does not divide attention_heads_of_a_rank={heads}; sizes that would "
            f"work: {fitting}, and any with context_method='ring'"
        )
    times = copies_of_groups(heads, groups, size)
    if times > 1:  # or a rank's queries would begin inside of a group
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    # [b, heads, s, d] -> [receiver, its heads, b, s, d]
    parts = [one.unflatten(1, (size, -1)).permute(1, 2, 0, 3, 4) for one in (q, k, v)]  # type: ignore[no-untyped-call]
    arrived = _exchanged(torch.cat(parts, 1), comm)
    whole = arrived.permute(2, 1, 0, 3, 4).flatten(2, 3)  # [b, heads, s, d], of all ranks' positions
    result = core(*torch.split(whole, [part.shape[1] for part in parts], 1))
    # [b, heads, s, d] -> [receiver, heads, b, its positions, d]
    back = result.unflatten(2, (size, -1)).permute(2, 1, 0, 3, 4).contiguous()  # type: ignore[no-untyped-call]
    returned: Tensor = _exchanged(back, comm)
    return returned.flatten(0, 1).transpose(0, 1)


def shards_for_rows(x: Tensor, comm: Communicator) -> Tensor:
    """Some shards of whole sequences, for a rank's part of all shards: x [own, s / c, ...] -> [own / c, s, ...].

    c: ``comm.size``, which must divide the shards. One all-to-all forward, and one backward. Every rank must call it.
    """
    parts: Tensor = _exchanged(x.unflatten(0, (comm.size, -1)).contiguous(), comm)  # type: ignore[no-untyped-call]
    return parts.transpose(0, 1).flatten(1, 2)


def rows_for_shards(x: Tensor, comm: Communicator) -> Tensor:
    """The way back of `shards_for_rows`."""
    parts = x.unflatten(1, (comm.size, -1)).transpose(0, 1).contiguous()  # type: ignore[no-untyped-call]
    found: Tensor = _exchanged(parts, comm)
    return found.flatten(0, 1)


def _exchanged(x: Tensor, comm: Communicator) -> Tensor:
    """Row r of x [ranks, ...] to rank r. The transposed operator is the same one."""

    def exchange(x: Tensor) -> Tensor:
        x = x.contiguous()
        received = torch.empty_like(x)
        comm.all_to_all(received, x)
        return received

    return apply_pair(x, exchange, exchange)
