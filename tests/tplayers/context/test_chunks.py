"""SequenceChunks: who has which positions, and how much each rank computes."""

import pytest
import torch

from tplayers.context.blockwise import Blockwise
from tplayers.context.chunks import SequenceChunks


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_every_position_once(ranks, zigzag):
    chunks = SequenceChunks(ranks, zigzag)
    s = 2 * ranks * 3
    found = [chunks.positions(rank, s) for rank in range(ranks)]
    assert sorted(torch.cat(found).tolist()) == list(range(s))
    assert {len(part) for part in found} == {s // ranks}
    assert all((part.diff() > 0).all() for part in found)
    whole = torch.randn(2, s, 3)
    for rank, part in enumerate(found):
        assert torch.equal(chunks.take(whole, rank, 1), whole[:, part])
    if zigzag and ranks > 1:
        assert found[0].tolist()[:3] == [0, 1, 2] and found[0].tolist()[3:] == list(range(s - 3, s))


def test_a_sequence_that_does_not_fit():
    with pytest.raises(ValueError, match="sequence_length=12 has no 8 equal chunks, 2 for each of the 4 ranks"):
        SequenceChunks(4, zigzag=True).positions(0, 12)
    assert len(SequenceChunks(4).positions(0, 12)) == 3


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_zigzag_balances_the_products_of_a_causal_mask(ranks):
    """Scores that each rank computes, step by step, against what the mask lets through; contiguous parts do not."""
    size = 32
    s = 2 * ranks * size
    chunks = SequenceChunks(ranks, zigzag=True)
    totals = []
    covered = torch.zeros(s, s, dtype=torch.int64)
    for rank in range(ranks):
        way = Blockwise(chunks, rank, lambda: None, True, 0.0)
        mine, products = chunks.positions(rank, s), 0
        for owner in range(ranks):
            rows, columns = way.seen(owner, 2 * size)
            at, of = mine[rows], chunks.positions(owner, s)[columns]
            visible = (of <= at[:, None]).sum().item()
            if owner != rank:
                assert visible == len(at) * len(of) == 2 * size**2
            covered[at[:, None], of] += 1
            products += visible
        totals.append(products)
    assert max(totals) <= 1.05 * min(totals)
    assert torch.equal(covered.tril(), torch.ones(s, s, dtype=torch.int64).tril())
    contiguous = [sum(range(r * 2 * size, (r + 1) * 2 * size)) for r in range(ranks)]
    assert max(contiguous) > 2 * min(contiguous)
