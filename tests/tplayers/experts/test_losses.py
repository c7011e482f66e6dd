"""The losses of a router: what they are for even and for uneven experts, and how they enter a backward."""

import pytest
import torch

from tplayers.experts.losses import RouterLosses, balance_losses, z_losses
from tplayers.experts.routing import Routing, route

E = 4


def of(logits, k=1):
    """The routing of logits [positions * b, E]."""
    return route(logits, torch.eye(E, dtype=logits.dtype), k)


def test_even_experts_cost_one_and_one_expert_costs_most():
    even = 20 * torch.eye(E, dtype=torch.float64).repeat(2, 1)  # 8 positions of one sequence
    torch.testing.assert_close(balance_losses(of(even), 8, 1), torch.ones(1, dtype=torch.float64))
    all_to_one = 20 * torch.eye(E, dtype=torch.float64)[[0] * 8]
    torch.testing.assert_close(balance_losses(of(all_to_one), 8, 1), torch.full((1,), float(E), dtype=torch.float64))
    torch.testing.assert_close(balance_losses(of(even, E), 8, 1), torch.ones(1, dtype=torch.float64))


def test_sequences_are_balanced_each_by_itself():
    """Two sequences that have one expert each are as uneven as one, although both together have two."""
    logits = 20 * torch.eye(E, dtype=torch.float64)[[0, 1] * 8]  # [8, 2]: sequence 0 has expert 0
    torch.testing.assert_close(balance_losses(of(logits), 8, 2), torch.full((2,), float(E), dtype=torch.float64))


def test_z_is_the_mean_of_squares():
    logits = torch.randn(6, E, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = logits.exp().sum(-1).log().square().view(3, 2).mean(0)
    torch.testing.assert_close(z_losses(of(logits), 3, 2), expected)


@pytest.mark.parametrize("scale", [0.0, 2.5])
def test_a_backward_through_the_weights_has_their_gradient(scale):
    logits = torch.randn(6, E, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    losses = RouterLosses(0.3, 0.1)
    losses.scale = scale
    routing = of(logits, 2)
    with losses.collected() as collected:
        weights = losses.attach(routing, 3, 2, [])
    losses.attach(routing, 3, 2, [])  # as a recomputation does, outside of the block
    (found,) = torch.autograd.grad(weights.square().sum(), logits, retain_graph=True)
    (alone,) = torch.autograd.grad(routing.weights.square().sum(), logits, retain_graph=True)
    terms = 0.3 * balance_losses(routing, 3, 2).sum(), 0.1 * z_losses(routing, 3, 2).sum()
    (of_losses,) = torch.autograd.grad(sum(terms), logits)
    torch.testing.assert_close(found, alone + scale * of_losses)
    assert len(collected.losses) == 1 and not collected.losses[0].requires_grad
    torch.testing.assert_close(collected.losses[0], torch.stack(terms).detach())


def test_no_coefficients_cost_nothing():
    routing = Routing(*(torch.ones(2, 2) for _ in range(4)))
    assert RouterLosses().attach(routing, 1, 2, []) is routing.weights


def test_blocks_give_back_what_was_there_before_them():
    losses = RouterLosses(0.3, 0.1)
    routing = of(torch.randn(6, E, dtype=torch.float64))
    with losses.collected() as outer, losses.counted(2.0):
        with losses.collected() as inner:
            losses.attach(routing, 3, 2, [])
        with pytest.raises(KeyError), losses.counted(3.0):
            raise KeyError
        assert losses.scale == 2.0
        losses.attach(routing, 3, 2, [])
    assert (len(outer.losses), len(inner.losses), losses.scale) == (1, 1, 0.0)
    assert losses.attach(routing, 3, 2, []) is routing.weights


def test_no_positions():
    routing = of(torch.empty(0, E))
    assert balance_losses(routing, 0, 2).tolist() == z_losses(routing, 0, 2).tolist() == [0.0, 0.0]
