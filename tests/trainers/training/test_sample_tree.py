"""Sums over samples in one tree: the same on one rank as on several that have neighbouring samples."""

import pytest
import torch
from torch import nn

from tests.support.exact import in_pairs
from tplayers import placements
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


@pytest.mark.parametrize("samples", [1, 2, 3, 8, 12, 16, 20])
def test_gradients_of_a_bucket(samples):
    """Five steps. The sum is in the bucket's buffer, and no more buffers are made than the tree has levels."""
    module = nn.Linear(2, 2)
    named = list(module.named_parameters())
    layout = BucketLayout(named, placements(module), Group(), shard=False, flat=True)
    result = torch.zeros(layout.size)
    run = run_length(samples)
    tree, made = SampleTree(layout, result, run), []
    new = tree._node
    tree._node = lambda sums: made.append(sums) or new(sums)
    for _ in range(5):
        values = values_of(samples)
        tree.clear()
        for number, value in enumerate(values):
            tree.begin(last=number + 1 == samples)
            for (_, parameter), part in zip(named, (value[:4].view(2, 2), value[4:]), strict=True):
                tree.put(parameter, part)
            tree.end()
        right = expected(values, run)
        assert torch.equal(layout.view(result, named[0][1]).flatten(), right[:4])
        assert torch.equal(layout.view(result, named[1][1]), right[4:])
    assert len(made) <= (samples // run).bit_length() + (run > 1)


def test_a_negative_zero_becomes_positive():
    module = nn.Linear(1, 1, bias=False)
    layout = BucketLayout(list(module.named_parameters()), placements(module), Group(), shard=False, flat=True)
    result = torch.zeros(layout.size)
    tree = SampleTree(layout, result, 1)
    tree.begin(last=True)
    tree.put(module.weight, torch.tensor([[-0.0]]))
    tree.end()
    assert not torch.signbit(result).any()
