"""Copies of the weights change no text, are made anew when the weights change, and are no part of the model."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

from tplayers import (
    GPT,
    ColumnParallelLinear,
    GPTConfig,
    RowParallelLinear,
    Sampling,
    generate,
    initialize,
    placements,
)
from tplayers.generation import fast_weights
from tplayers.generation.fast_weights import (
    PACKED_ROWS,
    WeightCopies,
    _pack,
    _packed,
    fast_model,
    inference_copy,
    screened,
)

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2)]

VOCAB, GREEDY = 600, Sampling(temperature=0)


@pytest.fixture
def small(monkeypatch):
    """Models of any size have a screen, if the host can have one."""
    if not fast_weights.available(torch.zeros(1, 1)):
        pytest.skip("this processor, or PyTorch, has no exact products of int8")
    monkeypatch.setattr(fast_weights, "_SCREENED_WEIGHTS", 1)


def gpt(comm, seed=9, **options):
    config = GPTConfig(2, 32, 4, VOCAB, 64, init_method_std=0.3, make_vocab_size_divisible_by=64, **options)
    model = GPT(config, comm)
    initialize(model, seed)
    return model


def real(model):
    rows = model.embedding.weight.shape[0]
    return min(max(VOCAB - model.comm.rank * rows, 0), rows)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.9, top_k=8)], ids=["greedy", "top-k"])
@pytest.mark.parametrize(("rows", "untied"), [(1, False), (3, True), (6, False), (6, True)])
def test_the_text_is_that_of_the_weights_themselves(group, small, monkeypatch, sampling, rows, untied):
    """With a screen, for one text with columns together, and from 4 texts on with packed weights."""
    model = gpt(group.comm, untie_embeddings_and_output_weights=untied, num_query_groups=4 - 2 * untied)
    model.requires_grad_(rows > 1)
    prompts = [[(7 * row + 3 * n * n) % VOCAB for n in range(3 + row)] for row in range(rows)]
    screens = []
    logits = fast_weights.OutputScreen.logits
    monkeypatch.setattr(fast_weights.OutputScreen, "logits", lambda self, x, k: screens.append(k) or logits(self, x, k))
    fast = generate(model, prompts, 24, sampling=sampling, seed=3)
    assert len(screens) == 24
    monkeypatch.setattr(fast_weights, "available", lambda weight: False)
    assert generate(model, prompts, 24, sampling=sampling, seed=3) == fast
    assert len(screens) == 24


def linear(model):
    return [*(one for block in model.layers for one in (block.attention.qkv, block.mlp.down)), model.embedding]


@pytest.mark.every_size
def test_packed_weights_serve_several_texts_and_leave_the_model_alone(group, random):
    model = gpt(group.comm).requires_grad_(False)
    if not fast_weights.available(model.embedding.weight):
        pytest.skip("this processor, or PyTorch, has no exact products of int8")
    x = random(6, 1, 32).float()
    fast, screen = fast_model(model, 6, 1, Sampling(), real(model))
    assert screen is None  # all logits count
    assert all(hasattr(layer, "packed") for layer in linear(fast))
    with torch.no_grad():
        torch.testing.assert_close(linear(fast)[0](x), linear(model)[0](x))
    assert all(not hasattr(layer, "packed") for layer in linear(model))
    fast, _ = fast_model(model, 3, 1, Sampling(), real(model))
    assert all(not hasattr(layer, "packed") for layer in linear(fast))  # too few texts


def test_columns_lie_together_for_one_text(group, small):
    model = gpt(group.comm).requires_grad_(False)
    for fast in (fast_model(model, 1, 1, Sampling(), real(model))[0] for _ in range(2)):
        for layer, mine in zip(linear(fast)[:-1], linear(model)[:-1], strict=True):
            assert torch.equal(layer.weight, mine.weight)
            assert layer.weight.t().is_contiguous() and mine.weight.is_contiguous()
        assert fast.embedding.weight.data_ptr() == model.embedding.weight.data_ptr()
    kept = linear(fast)[0].weight
    assert kept is linear(fast_model(model, 1, 1, Sampling(), real(model))[0])[0].weight
    model.layers[0].attention.qkv.weight.mul_(2.0)
    changed = linear(fast_model(model, 1, 1, Sampling(), real(model))[0])[0].weight
    assert torch.equal(changed, 2.0 * kept)
    for rows, frozen in ((2, True), (1, False)):
        fast, _ = fast_model(model.requires_grad_(not frozen), rows, 20, Sampling(), real(model))
        assert linear(fast)[0].weight.data_ptr() == linear(model)[0].weight.data_ptr()


def test_copies_of_frozen_weights_are_kept_until_these_change(group, small):
    model = gpt(group.comm).requires_grad_(False)
    other = gpt(group.comm, seed=10)
    truth = generate(copy.deepcopy(other), [[5, 6]], 20)

    def copies():
        fast, screen = fast_model(model, 6, 1, GREEDY, real(model))
        return screen, fast.layers[0].mlp.up.packed

    first = copies()
    generate(model, [[5, 6]], 2, sampling=Sampling())  # uses neither of them
    assert all(one is two for one, two in zip(first, copies(), strict=True))
    with torch.no_grad():
        for mine, new in zip(model.parameters(), other.parameters(), strict=True):
            mine.copy_(new)  # in place
    second = copies()
    assert not any(one is two for one, two in zip(first, second, strict=True) if one is not None)
    assert generate(model, [[5, 6]], 20) == truth
    for parameter in model.parameters():
        parameter.numpy()[:] *= 1.5  # PyTorch does not count what others write into the memory
    third = copies()
    assert not any(one is two for one, two in zip(second, third, strict=True) if one is not None)
    model.load_state_dict(gpt(group.comm).state_dict(), assign=True)  # other tensors
    model.requires_grad_(False)
    assert not any(one is two for one, two in zip(third, copies(), strict=True) if one is not None)


def test_weights_that_train_have_copies_for_one_call_only(group, small):
    model = gpt(group.comm)
    assert fast_model(model, 1, 15, GREEDY, real(model))[1] is None  # too few tokens
    assert (fast_model(model, 1, 16, GREEDY, real(model))[1] is None) == (real(model) == 0)
    assert "weight_copies" not in vars(model)


def test_copies_are_no_part_of_the_model(group, small):
    model = gpt(group.comm).requires_grad_(False)
    names = set(model.state_dict())
    fast_model(model, 6, 1, GREEDY, real(model))
    fast_model(model, 1, 1, GREEDY, real(model))
    assert set(model.state_dict()) == names
    kept = vars(model)["weight_copies"]
    for other in (copy.deepcopy(kept), pickle.loads(pickle.dumps(kept))):  # noqa: S301 - made here
        assert isinstance(other, WeightCopies)
        assert vars(other) == {"_kept": {}}


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (GREEDY, 1), (Sampling(temperature=1, top_k=40), 40), (Sampling(temperature=1, top_k=40, top_p=0.9), 40),
        (Sampling(temperature=1), 0), (Sampling(temperature=1, top_p=0.9), 0),
        (Sampling(temperature=0, repetition_penalty=1.1), 0),
    ],
)  # fmt: skip
def test_how_many_of_the_largest_logits_count(sampling, expected):
    assert screened(sampling) == expected


@pytest.mark.parametrize("rows", [1, 3, 4, 8, 33])
def test_products_with_packed_weights(group, rows):
    """In float32 on the host, without a backward. With few rows the weight itself is used."""
    whole = group.size * 24
    for layer, split in (
        (ColumnParallelLinear(8, whole, group.comm), False), (RowParallelLinear(whole, 8, group.comm), True),
    ):  # fmt: skip
        weights = {}
        with torch.no_grad():
            for number, (name, placement) in enumerate(placements(layer).items()):
                weights[name] = torch.randn(placement.shape, generator=torch.Generator().manual_seed(number))
                layer.get_parameter(name).copy_(placement.part(weights[name]))
        x = torch.randn((1, rows, whole if split else 8), generator=torch.Generator().manual_seed(7))
        truth = F.linear(x.double(), weights["weight"].double(), weights["bias"].double()).float()
        truth, x = (truth, group.mine(x)) if split else (group.mine(truth), x)
        fast = inference_copy(layer)
        _pack(fast, *_packed([layer.weight.detach()]))
        with torch.no_grad():
            found = fast(x)
        torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-4)
        assert found.is_contiguous()
        _pack(fast, *_packed([torch.zeros_like(layer.weight)]))
        with torch.no_grad():
            assert (torch.equal(fast(x), layer.bias.expand_as(found))) == (rows >= PACKED_ROWS)
