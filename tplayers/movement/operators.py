"""Data movement as linear operators: each differentiates, and its backward is the transposed operator.

Hewett and Grady 2020 (arXiv 2006.03108, section 3) derive them: a copy is transposed to a sum. With them the backward
of a parallel program is the transposed communication in reverse order, whatever the program computes between.

==================  ============================================  =============================
operator            forward                                       backward (transposed operator)
==================  ============================================  =============================
broadcast           every rank gets the root's tensor             sum_reduce
sum_reduce          the root gets the sum                         broadcast
all_reduce          every rank gets the sum                       all_reduce
all_gather          every rank gets all parts                     reduce_scatter
reduce_scatter      every rank gets its part of the sum           all_gather
gather              the root gets all parts                       scatter
scatter             every rank gets its part of the root's        gather
all_to_all          parts along one dimension become parts along  all_to_all, the other way
                    another one
all_to_all_v        some rows for each rank                       all_to_all_v, the other way
shift               every rank gets the block of a neighbour      shift by the opposite step
roll                the field moves, and wraps around             roll by the opposite shifts
flip                the field in reverse order                    flip
halo_exchange       strips of the neighbours surround the block   halo_accumulate
halo_accumulate     the strips are added to their origins         halo_exchange
repartition         the blocks of one decomposition become those  repartition, the other way
                    of another one
==================  ============================================  =============================

`tplayers.regions` has two more words: f, ``copy_to_tensor_parallel_region``, is a broadcast of a tensor that every rank
has already (forward: nothing; backward: all-reduce), and g is a sum whose result every rank uses in the same way
(forward: all-reduce; backward: nothing). Their gradients are right if all ranks compute one loss together, each the
same. The operators here make no such assumption: the function that is differentiated is the *sum* of the ranks' losses.

All operators take tensors of any floating-point or complex dtype, on the host or on the communicator's device; none
changes its input. They can be differentiated any number of times, and in forward mode (`torch.autograd.forward_ad`): a
solver made of them has its tangent-linear and its adjoint model. Every rank must call them, and must run the backward,
with ``create_graph=True`` on all of them or on none. A rank without an input (a rank that a root scatters to) and a
rank without an output (a rank that is gathered from) take part in both. The latter gets an empty tensor, which stands
for its part in the graph: its program calls ``torch.autograd.backward`` on this tensor with an empty gradient, or adds
``out.sum()`` to its loss. The former needs ``backward()``: ``torch.autograd.grad`` runs only what leads to the inputs
that it is given, and forward mode only what has a tangent. For these, a rank without an input passes a tensor of its
own in place of None, which goes on in its graph.

Before anything else the ranks compare dtypes and shapes in one small all-gather, and all of them raise ValueError if
these do not fit. The operators on blocks (`shift`, `roll`, `flip`, `halo_exchange`, `halo_accumulate`, `repartition`)
stand inside of steps. So they compare at their first call with the same arguments on a communicator, and raise
CollectiveMismatch on every rank; with ``Communicator(..., checked=True)`` they compare at each call. Every 64th of the
other calls compares which ones the ranks have made. `transfer` with a plan of the program's own compares only with
``checked=True``.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from commengine import Communicator, Decomposition
from tplayers.adjoint_pair import Pair, apply_pair
from tplayers.functions import outside_graphs

from .compared import Compared, compare, compare_first, placeholder, plain, taking_part
from .plan import halo_plan, repartition_plan
from .transfer import transfer, transfer_adjoint


def broadcast(x: Tensor | None, comm: Communicator, root: int = 0) -> Tensor:
    """Give every rank the tensor of rank ``root``; its gradient is the sum of all ranks' gradients.

    x: of any shape on the root; ignored on the other ranks, and usually None there. root: the same on every rank. Every
    rank calls it, and runs its backward. Raises ValueError on every rank if the root gives no tensor of a
    floating-point or complex dtype, or is not in the group.
    """
    given = compare("broadcast", x, comm, only=root, root=root)
    mine = x if comm.rank == root and x is not None else placeholder(x, (0,), given, comm)
    return apply_pair(taking_part(mine, given), *_broadcast(comm, root, given))


def sum_reduce(x: Tensor, comm: Communicator, root: int = 0) -> Tensor:
    """Give rank ``root`` the sum of all ranks' tensors; the other ranks get an empty tensor [0].

    x: of one shape, dtype and kind of device (host or CUDA) on every rank. root: the same on every rank. The gradient
    of each rank's ``x`` is that of the sum. Every rank calls it, and runs its backward.

    Raises ValueError on every rank if the tensors are not alike or have no floating-point or complex dtype, or
    ``root`` is not in the group.
    """
    given = compare("sum_reduce", x, comm, root=root)
    return apply_pair(taking_part(x, given), *_broadcast(comm, root, given)[::-1])


def all_reduce(x: Tensor, comm: Communicator) -> Tensor:
    """Give every rank the sum of all ranks' tensors, of one shape; the gradient is the sum of all gradients."""
    given = compare("all_reduce", x, comm)

    def forward(x: Tensor) -> Tensor:
        out = plain(x)
        comm.all_reduce(out)
        return out

    return apply_pair(taking_part(x, given), forward, forward)


def all_gather(x: Tensor, comm: Communicator, dim: int = 0) -> Tensor:
    """Give every rank the parts of all ranks, concatenated along ``dim`` in rank order.

    x: the parts may differ in their size along ``dim``. Its gradient is the sum of all ranks' gradients of it.
    """
    given = compare("all_gather", x, comm, along=dim, dim=dim)
    return apply_pair(taking_part(x, given), *_all_gather(comm, given, given.dim(dim)))


def reduce_scatter(x: Tensor, comm: Communicator, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """Give every rank its part, along ``dim``, of the sum of all ranks' tensors.

    x: the same shape on every rank. sizes: of the ranks' parts, the same on every rank; None: as equal as possible, as
    ``numpy.array_split`` makes them. Raises ValueError if ``sizes`` are not one of at least 0 for each rank, or do not
    add up to the size of ``x`` along ``dim``.
    """
    given = compare("reduce_scatter", x, comm, dim=dim, sizes=sizes)
    at = given.dim(dim)
    parts = replace(given, sizes=_sizes(given.shape[at], comm, sizes, "reduce_scatter"))
    return apply_pair(taking_part(x, given), *_all_gather(comm, parts, at)[::-1])


def gather(x: Tensor, comm: Communicator, root: int = 0, dim: int = 0) -> Tensor:
    """Give rank ``root`` the parts of all ranks, concatenated along ``dim`` in rank order.

    x: the parts may differ in their size along ``dim``. The other ranks get a tensor without elements, of size 0 along
    ``dim``.
    """
    given = compare("gather", x, comm, along=dim, root=root, dim=dim)
    at = given.dim(dim)
    on_root, on_ranks = _on_root(given, at, comm, root)
    return transfer(taking_part(x, given), repartition_plan(on_ranks, on_root, comm.rank), comm)


def scatter(
    x: Tensor | None, comm: Communicator, root: int = 0, dim: int = 0, sizes: Sequence[int] | None = None
) -> Tensor:
    """Give every rank its part, along ``dim``, of the tensor of rank ``root``.

    x: of any shape on the root; ignored on the other ranks, and usually None there. sizes: as of `reduce_scatter`, with
    its error.
    """
    given = compare("scatter", x, comm, only=root, root=root, dim=dim, sizes=sizes)
    at = given.dim(dim)
    parts = replace(given, sizes=_sizes(given.shape[at], comm, sizes, "scatter"))
    nothing = (*given.shape[:at], 0, *given.shape[at + 1 :])
    mine = x if comm.rank == root and x is not None else placeholder(x, nothing, given, comm)
    on_root, on_ranks = _on_root(parts, at, comm, root)
    return transfer(taking_part(mine, given), repartition_plan(on_root, on_ranks, comm.rank), comm)


def all_to_all(
    x: Tensor, comm: Communicator, split_dim: int, concat_dim: int, sizes: Sequence[int] | None = None
) -> Tensor:
    """Split ``x`` along ``split_dim``, send part r to rank r, and concatenate what arrives along ``concat_dim``.

    So a tensor of which each rank has a part along ``concat_dim`` becomes one of which each has a part along
    ``split_dim``. x: the sizes along ``concat_dim`` may differ between ranks. sizes: of the parts along ``split_dim``,
    as of `reduce_scatter`, with its error. Raises ValueError also if the two dimensions are the same.
    """
    given = compare("all_to_all", x, comm, along=concat_dim, split_dim=split_dim, concat_dim=concat_dim, sizes=sizes)
    split, concat = given.dim(split_dim), given.dim(concat_dim)
    if split == concat:
        raise ValueError(f"all_to_all: split_dim={split_dim} and concat_dim={concat_dim} are the same dimension")
    parts = _sizes(given.shape[split], comm, sizes, "all_to_all")
    whole = [(extent,) for extent in given.shape]
    source = Decomposition((*whole[:concat], given.sizes, *whole[concat + 1 :]))
    whole[concat] = (sum(given.sizes),)
    target = Decomposition((*whole[:split], parts, *whole[split + 1 :]))
    return transfer(taking_part(x, given), repartition_plan(source, target, comm.rank), comm)


@outside_graphs
def all_to_all_v(x: Tensor, comm: Communicator, input_rows: Sequence[int]) -> tuple[Tensor, tuple[int, ...]]:
    """Send ``input_rows[r]`` rows of ``x`` to rank r. Returns the rows that come, and how many from each rank.

    x: [sum of input_rows, ...]; the rows of all ranks have one shape. The result is [sum of the counts, ...], in rank
    order. The ranks tell each other the counts first. Raises ValueError on every rank if those of one do not fit.
    """
    given = compare("all_to_all_v", x, comm, along=0)
    given.dim(0)
    try:
        rows = tuple(map(operator.index, input_rows))
    except TypeError:
        rows = ()
    fits = len(rows) == comm.size and min(rows) >= 0 and sum(rows) == x.shape[0]
    sent = rows if fits else (-1,) * comm.size  # the others must not wait for a rank that raises
    received: list[int] = []

    def forward(x: Tensor) -> Tensor:
        if not received:  # in here torch.func shows plain tensors, and the counts travel in some
            received.extend(comm.exchange_counts(sent))
        if wrong := [rank for rank, count in enumerate(received) if count < 0]:
            said = f"{rows or input_rows!r} for {x.shape[0]} rows" if wrong[0] == comm.rank else "others"
            raise ValueError(
                f"all_to_all_v: input_rows must be {comm.size} numbers of at least 0, one for each rank, that add up "
                f"to the rows of x; rank {wrong[0]} gave {said}"
            )
        return _rows(x, comm, received, sent)

    out = apply_pair(taking_part(x, given), forward, lambda y: _rows(y, comm, sent, received))
    return out, tuple(received)


def exchanged_rows(x: Tensor, comm: Communicator, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """`all_to_all_v` of ranks that know the numbers: ``sent[r]`` rows go to rank r, and ``received[r]`` come from it.

    x requires grad on all ranks or on none.
    """
    return apply_pair(x, lambda x: _rows(x, comm, received, sent), lambda y: _rows(y, comm, sent, received))


@outside_graphs
def repartition(x: Tensor, comm: Communicator, source: Decomposition, target: Decomposition) -> Tensor:
    """Turn this rank's block of ``source`` into its block of ``target``: other blocks, or a grid of another shape.

    x: [..., space], with leading sizes and a dtype that are the same on every rank. The ranks of ``comm`` stand at the
    places of both grids in row-major order. A parallel Fourier transform needs it: each axis must be whole on a rank to
    be transformed.

    Every rank calls it, and runs its backward. Raises ValueError if the decompositions differ in their global shape or
    in their number of ranks, or ``x`` is not this rank's block. The ranks compare as in `halo_exchange`.
    """
    plan = repartition_plan(source, target, comm.rank)
    compare_first("repartition", x, plan.source_shape, comm, {"source": source, "target": target})
    return transfer(x, plan, comm)


# Implementation ---------------------------------------------------------------------------------------------------


def _broadcast(comm: Communicator, root: int, given: Compared) -> Pair:
    """From the root's tensor, and an empty one on other ranks, to a tensor on every rank; and the sum back."""

    def forward(x: Tensor) -> Tensor:
        out = plain(x) if comm.rank == root else given.empty(given.shape, comm)
        comm.broadcast(out, root)
        return out

    def transposed(y: Tensor) -> Tensor:
        total = plain(y)
        comm.reduce(total, root)
        return total if comm.rank == root else total.new_empty(0)

    return forward, transposed


def _all_gather(comm: Communicator, parts: Compared, dim: int) -> Pair:
    """From the parts to all of them on every rank; and the sums back. Equal parts go by the engine's collectives."""
    if len(set(parts.sizes)) > 1:
        return _all_gather_uneven(comm, parts, dim)

    def forward(x: Tensor) -> Tensor:
        front = plain(x.movedim(dim, 0))
        whole = front.new_empty((comm.size * front.shape[0], *front.shape[1:]))
        comm.all_gather(whole, front)
        return whole.movedim(0, dim).contiguous()

    def transposed(y: Tensor) -> Tensor:
        front = plain(y.movedim(dim, 0))
        part = front.new_empty((front.shape[0] // comm.size, *front.shape[1:]))
        comm.reduce_scatter(part, front)
        return part.movedim(0, dim).contiguous()

    return forward, transposed


def _all_gather_uneven(comm: Communicator, parts: Compared, dim: int) -> Pair:
    source = Decomposition((parts.sizes, *((extent,) for extent in parts.shape[dim + 1 :])))
    everything = [[(0, sum(sizes))] * len(sizes) for sizes in source.blocks]
    plan = halo_plan(source, comm.rank, everything, ["zeros"] * len(source.blocks))
    return lambda x: transfer(x, plan, comm), lambda y: transfer_adjoint(y, plan, comm)


def _rows(x: Tensor, comm: Communicator, come: Sequence[int], go: Sequence[int]) -> Tensor:
    out = x.new_empty((sum(come), *x.shape[1:]))
    comm.all_to_all_v(out, x.resolve_conj().resolve_neg().contiguous(), come, go)
    return out


def _on_root(parts: Compared, dim: int, comm: Communicator, root: int) -> tuple[Decomposition, Decomposition]:
    """Return two decompositions of ``parts`` along ``dim``: the root has all of them, and every rank has its own."""
    rest = tuple((extent,) for extent in parts.shape[dim + 1 :])
    everything = tuple(sum(parts.sizes) if rank == root else 0 for rank in range(comm.size))
    return Decomposition((everything, *rest)), Decomposition((parts.sizes, *rest))


def _sizes(extent: int, comm: Communicator, sizes: Sequence[int] | None, operation: str) -> tuple[int, ...]:
    """Return the sizes of the ranks' parts of ``extent`` rows."""
    if sizes is None:
        return Decomposition.even((extent,), (comm.size,)).blocks[0]
    if len(sizes) != comm.size or min(sizes) < 0 or sum(sizes) != extent:
        raise ValueError(
            f"{operation}: sizes={list(sizes)} must be {comm.size} sizes of at least 0, one for each rank, that add up "
            f"to {extent}"
        )
    return tuple(sizes)
