"""The learning rate against closed values, and against Megatron-LM's definition."""

import math
from itertools import pairwise

import pytest

from trainers.training.learning_rate import learning_rate

BASE = {"lr": 0.8, "min_lr": 0.2}


def rates(style, warmup, decay, steps):
    return [learning_rate(i, style=style, warmup_iters=warmup, decay_iters=decay, **BASE) for i in range(steps)]


def test_warm_up_rises_in_equal_steps_to_lr():
    assert rates("cosine", 4, 10, 5) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])
    assert rates("linear", 1, 10, 1) == [0.8]


@pytest.mark.parametrize(
    "style, expected",
    [
        ("linear", [0.8, 0.65, 0.5, 0.35, 0.2]),
        ("cosine", [0.8, 0.5 + 0.3 * math.sqrt(0.5), 0.5, 0.5 - 0.3 * math.sqrt(0.5), 0.2]),
        ("constant", [0.8] * 5),
    ],
)
@pytest.mark.parametrize("warmup", [0, 3])
def test_decay(style, expected, warmup):
    """Four steps of decay after the warm-up, the fifth at the end point."""
    assert rates(style, warmup, warmup + 4, warmup + 5)[warmup:] == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("style, last", [("linear", 0.2), ("cosine", 0.2), ("constant", 0.8)])
def test_end_points(style, last):
    assert rates(style, 0, 10, 1) == [0.8]
    assert rates(style, 2, 10, 200)[10:] == [last] * 190  # exactly: no rate drifts below min_lr
    assert rates(style, 10, 10, 12)[9:] == pytest.approx([0.8, 0.8, last])  # nothing left to decay over


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_decay_never_rises_and_stays_within(style):
    found = rates(style, 7, 100, 150)[6:]
    assert all(a >= b for a, b in pairwise(found))
    assert found[0] == 0.8 and found[-1] == 0.2


def megatron(done, lr, min_lr, style, warmup, decay):
    """The rate after ``done`` steps: megatron.core.optimizer_param_scheduler, with --lr-warmup-init 0."""
    if warmup > 0 and done <= warmup:
        return lr * done / warmup
    if style == "constant":
        return lr
    if done > decay:
        return min_lr
    ratio = (done - warmup) / (decay - warmup)
    share = 1 - ratio if style == "linear" else 0.5 * (math.cos(math.pi * ratio) + 1)
    return min_lr + share * (lr - min_lr)


@pytest.mark.parametrize("style", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("warmup, decay", [(0, 20), (5, 20), (19, 20)])
def test_megatrons_definition(style, warmup, decay):
    """The decay is Megatron-LM's; the warm-up is one step ahead of it, whose first step has rate 0."""
    expected = [megatron(done + (done < warmup), 0.8, 0.2, style, warmup, decay) for done in range(decay + 10)]
    assert rates(style, warmup, decay, decay + 10) == pytest.approx(expected, abs=1e-15)
