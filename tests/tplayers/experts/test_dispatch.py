"""Rows in the order of their experts: where they lie, and the gradients of both ways."""

import pytest
import torch

from tplayers.experts.dispatch import Dispatch


def drawn(positions=3, b=2, k=2, count=4):
    generator = torch.Generator().manual_seed(positions + b + k)
    return torch.stack([torch.randperm(count, generator=generator)[:k] for _ in range(positions * b)]), positions, b


@pytest.mark.parametrize("sizes", [(3, 2, 2, 4), (1, 1, 1, 1), (4, 3, 4, 4), (2, 5, 1, 8)])
def test_rows_stand_by_expert_sample_and_position(sizes):
    experts, positions, b = drawn(*sizes)
    dispatch = Dispatch.of(experts, positions, b, sizes[3])
    wanted = sorted(
        (expert, token % b, token // b, token) for token, mine in enumerate(experts.tolist()) for expert in mine
    )
    assert dispatch.tokens.tolist() == [token for *_, token in wanted]
    assert dispatch.counts == tuple(sum(expert == i for expert, *_ in wanted) for i in range(sizes[3]))
    for token, mine in enumerate(experts.tolist()):
        for number, expert in enumerate(mine):
            assert wanted[int(dispatch.places[token, number])][::3] == (expert, token)


def test_no_tokens():
    dispatch = Dispatch.of(torch.empty(0, 2, dtype=torch.int64), 5, 0, 4)
    assert dispatch.counts == (0, 0, 0, 0) and len(dispatch.rows(torch.empty(0, 3))) == 0


def test_gradients_of_both_ways():
    dispatch = Dispatch.of(*drawn(), 4)
    generator = torch.Generator().manual_seed(7)
    x, rows, weights = (
        torch.randn(*shape, dtype=torch.float64, generator=generator, requires_grad=True)
        for shape in ((6, 3), (12, 3), (6, 2))
    )
    assert torch.autograd.gradcheck(dispatch.rows, (x,))
    assert torch.autograd.gradcheck(dispatch.combined, (rows, weights))
    assert torch.autograd.gradgradcheck(dispatch.rows, (x,))
    assert torch.autograd.gradgradcheck(dispatch.combined, (rows, weights))
