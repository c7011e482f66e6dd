"""A mixture of experts against the formula, token by token in float64: results and all gradients, at any layout."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import tplayers
from commengine import ProcessGrid
from tplayers.experts.losses import RouterLosses
from tplayers.experts.moe import ExpertOptions, MoE

HIDDEN, FFN, SEQUENCE = 12, 8, 4
LARGE = 1e3


def draw(*shape, seed):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def one_expert(x, first, down, options):
    """FFN_i of a token."""
    y = first @ x
    if options.swiglu:
        gate, up = y.chunk(2)
        return down @ (F.silu(gate) * up)
    return down @ F.gelu(y, approximate="tanh")


def reference(x, weights, options, balance, z):
    """The result for x [s, b, h], and the losses of its sequences, from the papers' formulas."""
    s, b, _ = x.shape
    count, k = options.num_experts, options.router_topk
    first = "gate_up" if options.swiglu else "up"
    y, losses = torch.zeros_like(x), x.new_zeros(())
    for sample in range(b):
        logits = x[:, sample] @ weights["router"].t()
        probabilities = torch.softmax(logits, -1)
        chosen = [sorted(range(count), key=lambda i, row=row: -row[i].item())[:k] for row in logits]
        for token, experts in enumerate(chosen):
            of_chosen = probabilities[token, experts]
            factors = of_chosen if options.router_pre_softmax else of_chosen / of_chosen.sum()
            for factor, i in zip(factors, experts, strict=True):
                names = (f"experts.{i}.{first}.weight", f"experts.{i}.down.weight")
                y[token, sample] += factor * one_expert(x[token, sample], *(weights[name] for name in names), options)
            if options.shared_expert_size is not None:
                names = (f"shared_expert.{first}.weight", "shared_expert.down.weight")
                more = one_expert(x[token, sample], *(weights[name] for name in names), options)
                gate = torch.sigmoid(weights["shared_gate"] @ x[token, sample]) if options.shared_expert_gate else 1.0
                y[token, sample] += gate * more
        share = torch.tensor([sum(i in one for one in chosen) / s for i in range(count)], dtype=torch.float64)
        losses = losses + balance * count / k * (share * probabilities.mean(0)).sum()
        losses = losses + z * torch.logsumexp(logits, -1).square().mean()
    return y, losses


#: what the router prefers: nothing, no token for expert 1, all tokens for expert 2
PREFERENCES = ("drawn", "none for one", "all for one")
OPTIONS = {
    "one": ExpertOptions(4, 1, FFN, router_pre_softmax=True),
    "two": ExpertOptions(4, 2, FFN),
    "all": ExpertOptions(4, 4, FFN, router_pre_softmax=True),
    "shared": ExpertOptions(8, 3, FFN, shared_expert_size=4, shared_expert_gate=True),
    "gelu": ExpertOptions(4, 2, FFN, swiglu=False, shared_expert_size=4),
}


def layouts(size):
    """(Tensor ranks, whether sequences are split over them) for a job."""
    return [(t, split) for t in (1, 2, 4) if size % t == 0 for split in ((False, True) if t > 1 else (False,))]


@pytest.mark.mpi(min_size=1)
@pytest.mark.sizes(1, 2, 4)
@pytest.mark.parametrize("name", OPTIONS)
def test_results_and_gradients_are_those_of_the_formula(world, alone, name):
    options = OPTIONS[name]
    cases = list(itertools.product(layouts(world.size), PREFERENCES if name in ("one", "two") else PREFERENCES[:1]))
    for number, ((tensor, split), preference) in enumerate(cases):
        with ProcessGrid(world, tensor=tensor) as grid:
            losses = RouterLosses(0.3, 0.05)
            moe = MoE(
                HIDDEN, options, grid.tensor, expert_group=grid.data, losses=losses, sequence_parallel=split,
                init=tplayers.Normal(0.5), output_init=tplayers.Normal(0.5), dtype=torch.float64,
            )  # fmt: skip
            tplayers.initialize(moe, number)
            # The whole layer's parameters, which each rank of the reference has.
            whole = MoE(
                HIDDEN, options, alone.comm, init=tplayers.Normal(0.5), output_init=tplayers.Normal(0.5),
                dtype=torch.float64,
            )  # fmt: skip
            tplayers.initialize(whole, number)
            for one in (moe, whole):
                with torch.no_grad():
                    if preference == "none for one":
                        one.router[1, 0] = -LARGE
                    elif preference == "all for one":
                        one.router[2, 0] = LARGE
            weights = {name: p.detach().clone().requires_grad_() for name, p in whole.named_parameters()}
            # Another number of sequences on each rank of the expert group, and none on the second one of four.
            batches = [(2, 0, 1, 3)[rank] if grid.data.size == 4 else 1 + rank for rank in range(grid.data.size)]
            inputs = [draw(SEQUENCE, b, HIDDEN, seed=10 * number + at) for at, b in enumerate(batches)]
            for x in inputs:
                x[..., 0] = 1.0
            given = [draw(*x.shape, seed=10 * number + at + 5) for at, x in enumerate(inputs)]
            expected = [x.clone().requires_grad_() for x in inputs]
            of_all = [reference(x, weights, options, 0.3, 0.05) for x in expected]
            total = sum((y * grad).sum() + 0.25 * added for (y, added), grad in zip(of_all, given, strict=True))
            total.backward()

            losses.scale = 0.25
            me, rows = grid.data.rank, SEQUENCE // tensor if split else SEQUENCE
            mine = slice(grid.tensor.rank * rows, (grid.tensor.rank + 1) * rows) if split else slice(None)
            x = inputs[me][mine].clone().requires_grad_()
            with losses.collected() as collected:
                y = moe(x)
            y.backward(given[me][mine])
            case = f"{tensor=} {split=} experts={grid.data.size} {preference}"
            close(y, of_all[me][0][mine], case)
            close(x.grad, expected[me].grad[mine] if batches[me] else x, case)
            (terms,) = collected.losses
            assert collected.tokens == [moe.counts]
            if split:
                grid.tensor.all_reduce(terms)
            close(terms.sum(), of_all[me][1], case)
            assert sum(moe.counts) == SEQUENCE * batches[me] * options.router_topk
            if preference == "none for one":
                assert moe.counts[1] == 0 or options.router_topk == options.num_experts
            elif preference == "all for one":
                assert moe.counts[2] == SEQUENCE * batches[me]
            placed = tplayers.placements(moe)
            tplayers.sum_partial_gradients(moe, grid.tensor)
            for name, parameter in moe.named_parameters():
                if not name.startswith("experts."):
                    grid.data.all_reduce(parameter.grad)
                whole_gradient = weights[name].grad
                if whole_gradient is None:  # of an expert without tokens, to the reference
                    whole_gradient = torch.zeros_like(weights[name])
                close(parameter.grad, placed[name].part(whole_gradient), f"{name}, {case}")
            assert len(list(moe.named_parameters())) == len(weights) - (len(weights_of_experts(weights)) * (
                grid.data.size - 1) // grid.data.size)  # fmt: skip


def weights_of_experts(weights):
    return [name for name in weights if name.startswith("experts.")]


def close(found, expected, case):
    torch.testing.assert_close(
        found.detach(), expected.detach(), rtol=1e-10, atol=1e-10, msg=lambda text: f"{case}: {text}"
    )
