"""The screen of the output layer loses none of the k largest logits, on any weights, and gives them exactly."""

import pytest
import torch

from tplayers.generation import fast_weights
from tplayers.generation.fast_weights import OutputScreen

pytestmark = pytest.mark.skipif(
    not fast_weights.available(torch.zeros(1, 1)), reason="this processor, or PyTorch, has no exact products of int8"
)

ROWS, HIDDEN, COLUMNS = 3000, 96, 3072


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


WEIGHTS = {
    "normal": random(ROWS, HIDDEN),
    "rows of many sizes": random(ROWS, HIDDEN) * torch.logspace(-20, 3, ROWS).unsqueeze(1),
    "one large number in each row": random(ROWS, HIDDEN).index_fill_(1, torch.tensor([7]), 8.0),
    "rows of zeros": random(ROWS, HIDDEN).index_fill_(0, torch.arange(0, ROWS, 2), 0.0),
}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("k", [1, 20])
def test_the_largest_logits_are_there_and_right(name, k):
    """The truth is in float64; x has numbers of many sizes, which the second vector of integers must hold."""
    weight = WEIGHTS[name]
    screen = OutputScreen(weight, COLUMNS)
    x = random(5, HIDDEN, seed=1) * torch.tensor([1.0, 1e-6, 1e5, 1.0, 1.0]).unsqueeze(1)
    x[3, 11] = 1000.0
    found = screen.logits(x, k)
    assert found is not None and found.shape == (5, COLUMNS)
    truth = x.double() @ weight.double().t()
    kept = found[:, :ROWS] != -torch.inf
    assert kept.gather(1, truth.topk(k).indices).all()
    assert (found[:, ROWS:] == -torch.inf).all()
    size = x.double().norm(dim=1, keepdim=True) * weight.double().norm(dim=1)
    wrong = (found[:, :ROWS] - truth).abs() / size.clamp(min=1e-300)
    assert wrong[kept & (size > 1e-30)].max() < 1e-6
    assert kept.sum() < 0.05 * kept.numel()  # else it would save nothing


def test_almost_equal_logits_all_stay():
    """Rows that differ by less than a step of int8 cannot be told apart, so none of them may be left out."""
    weight = random(ROWS, HIDDEN) * 0.1
    weight[100:150] = random(HIDDEN, seed=3) + 1e-5 * random(50, HIDDEN, seed=4)
    x = weight[100:101].clone()
    found = OutputScreen(weight, ROWS).logits(x, 1)
    assert (found[0, 100:150] != -torch.inf).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["x", "weight"])
def test_numbers_that_are_not_finite_leave_the_choice_to_the_whole_product(bad, where):
    weight, x = WEIGHTS["normal"].clone(), random(2, HIDDEN)
    (x if where == "x" else weight)[1, 5] = bad
    assert OutputScreen(weight, ROWS).logits(x, 1) is None


@pytest.mark.parametrize("weight", [random(HIDDEN).repeat(ROWS, 1), random(ROWS, HIDDEN) * 1e-37])
def test_too_many_candidates_leave_the_choice_to_the_whole_product(weight):
    """Equal rows, and numbers for which float32 has no scale."""
    assert OutputScreen(weight, ROWS).logits(weight[:1], 1) is None


def test_a_host_without_exact_products_of_integers_has_none(monkeypatch):
    """A product that saturates, as those of old processors do, is noticed."""
    product = fast_weights._product
    monkeypatch.setattr(fast_weights, "_product", lambda *operands: product(*operands).clamp(max=32767))
    assert not fast_weights._exact_products.__wrapped__()


def test_only_float32_on_the_host_has_one():
    assert not fast_weights.available(torch.zeros(1, 1, dtype=torch.bfloat16))
    assert not fast_weights.available(torch.zeros(1, 1, device="meta"))
