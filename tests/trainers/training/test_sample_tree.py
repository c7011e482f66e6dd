"""Sums over samples in one tree: the same on one rank as on several that have neighbouring samples."""

import pytest
import torch
from torch import nn

from tests.support.exact import in_pairs
from tplayers import placements
from trainers.training import sample_tree
from trainers.training.layout import BucketLayout
from trainers.training.sample_tree import SampleTree, run_length, tree_of_samples


class Group:
    """Of the data group the layout needs these alone."""

    size, rank = 1, 0


def values_of(samples):
    generator = torch.Generator().manual_seed(samples)
    return [torch.randn(6, generator=generator) * 3.0 ** (n % 7) for n in range(samples)]


def expected(values, run):
    leaves = []
    for start in range(0, len(values), run):
        total = values[start]
        for value in values[start + 1 : start + run]:
            total = total + value
        leaves.append(total)
    return in_pairs(leaves)


@pytest.mark.parametrize(("samples", "run"), [(1, 1), (8, 1), (12, 3), (7, 7), (40, 5)])
def test_runs_are_the_odd_factor(samples, run):
    assert run_length(samples) == run


@pytest.mark.parametrize("samples", [1, 2, 8, 12, 20, 7])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_have_subtrees(samples, ranks):
    if samples % ranks:
        return
    values, run = values_of(samples), run_length(samples)
    each = samples // ranks
    parts = [tree_of_samples(values[rank * each : (rank + 1) * each], run) for rank in range(ranks)]
    assert torch.equal(in_pairs(parts), expected(values, run))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("samples", [1, 2, 3, 8, 12, 16, 20])
@pytest.mark.parametrize("turned", [False, True])
def test_gradients_of_a_bucket(samples, dtype, turned, monkeypatch):
    """Three steps. The sum is in the bucket's buffer, and no more sums are kept than the tree has levels."""
    monkeypatch.setattr(sample_tree, "PIECE", 3)
    module = nn.Linear(2, 2, dtype=dtype)
    if turned:
        module.weight.data = module.weight.data.t().contiguous().t()
    named = list(module.named_parameters())
    layout = BucketLayout(named, placements(module), Group(), shard=False, flat=True)
    result = torch.zeros(layout.size)
    run = run_length(samples)
    tree, most = SampleTree(layout, result, run), 0
    for _ in range(3):
        values = [value.to(dtype) for value in values_of(samples)]
        tree.clear()
        for number, value in enumerate(values):
            tree.begin(last=number + 1 == samples)
            for (_, parameter), part in zip(named, (value[:4].view(2, 2), value[4:]), strict=True):
                tree.put(parameter, torch.empty_like(parameter).detach().copy_(part))
            tree.end()
            most = max(most, len(tree._waiting))
        right = expected([value.float() for value in values], run)
        of_weight = layout.view(result, named[0][1])
        assert of_weight.stride() == module.weight.stride() and torch.equal(of_weight.flatten(), right[:4])
        assert torch.equal(layout.view(result, named[1][1]), right[4:])
    assert most <= (samples // run).bit_length()


def test_a_step_that_failed_leaves_nothing():
    module = nn.Linear(1, 1, bias=False)
    layout = BucketLayout(list(module.named_parameters()), placements(module), Group(), shard=False, flat=True)
    tree = SampleTree(layout, result := torch.zeros(layout.size), 1)
    for number, last in ((1.0, False), (2.0, False), (5.0, True)):
        if last:
            tree.clear()
        tree.begin(last=last)
        tree.put(module.weight, torch.tensor([[number]]))
        tree.end()
    assert result[0] == 5


def test_a_negative_zero_becomes_positive():
    module = nn.Linear(1, 1, bias=False)
    layout = BucketLayout(list(module.named_parameters()), placements(module), Group(), shard=False, flat=True)
    tree = SampleTree(layout, result := torch.zeros(layout.size), 1)
    for last in (False, True):
        tree.begin(last=last)
        tree.put(module.weight, torch.tensor([[-0.0]]))
        tree.end()
    assert not torch.signbit(result).any()
