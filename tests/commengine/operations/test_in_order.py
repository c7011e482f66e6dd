"""How large halves are cut over the ranks, for any size and group: without MPI."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commengine.dtypes import reduce_in_order
from commengine.operations.in_order import reduce_chunks


class Exchange:
    """Stands for the MPI communicator of one of several ranks whose inputs are all at hand."""

    def __init__(self, inputs, rank):
        self.inputs, self.rank = inputs, rank

    def Alltoallv(self, sent, received):  # noqa: N802 (mpi4py's name)
        source, counts, starts, _ = sent
        target, received_counts, places, _ = received
        assert sum(counts) == source.numel() and len(counts) == len(starts) == len(self.inputs)
        assert max(counts) - min(counts) <= 1, "the work is not shared evenly"
        for rank, part in enumerate(self.inputs):
            start, count, place = starts[self.rank], counts[self.rank], places[rank]
            assert received_counts[rank] == count
            target.view(-1)[place : place + count] = part[start : start + count]


@settings(max_examples=60, deadline=None)
@given(
    numel=st.integers(0, 40),
    size=st.integers(1, 9),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    op=st.sampled_from(["sum", "prod", "min", "max", "avg"]),
    seed=st.integers(0, 1000),
)
def test_chunks_cover_the_tensor_once_and_reduce_alike(numel, size, dtype, op, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(numel, generator=generator).to(dtype) for _ in range(size)]
    whole = torch.full((numel,), float("nan"), dtype=dtype)
    for rank in range(size):
        calls = Exchange(inputs, rank)
        wire = SimpleNamespace(rank=rank, size=size, tree="", moved=lambda tensor: (tensor, None), calls=calls)
        chunk, (_, counts, starts, _) = reduce_chunks(wire, inputs[rank], op)
        assert chunk.numel() == counts[rank]
        whole[starts[rank] : starts[rank] + counts[rank]] = chunk
    assert torch.equal(whole, reduce_in_order(inputs, op, torch.empty_like(inputs[0])))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_two_halves_add_as_any_number_does(dtype):
    """The short cut for two parts gives the bits of the general way, for every pair of exponents."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**15), 2**15, (2, 200_000), generator=generator).to(torch.int16)
    parts = bits.view(dtype)
    quick = reduce_in_order(parts, "sum", torch.empty_like(parts[0]))
    zero = torch.full((1, parts.shape[1]), -0.0, dtype=dtype)  # x + -0.0 is x, the sign of zero included
    general = reduce_in_order(torch.cat([parts, zero]), "sum", torch.empty_like(parts[0]))
    finite = ~general.isnan()
    assert torch.equal(quick.isnan(), general.isnan())
    assert torch.equal(quick[finite].view(torch.int16), general[finite].view(torch.int16))
