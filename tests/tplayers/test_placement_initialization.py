"""Initial values are a function of (seed, global name): the same global model at every TP size."""

import math

import pytest
import torch

import tplayers
from tplayers import GPT, GPTConfig, ParallelLayerNorm, rng

CONFIG = GPTConfig(2, 8, 4, 13, 8, make_vocab_size_divisible_by=16)


def wholes(ranks, seed, config=CONFIG, dtype=None):
    """The global parameters, from all ranks' models."""
    models = [GPT(config, rank, dtype=dtype) for rank in ranks]
    for model in models:
        tplayers.initialize(model, seed)
    parameters = [dict(model.named_parameters()) for model in models]
    found = {}
    for name, placement in tplayers.placements(models[0]).items():
        parts = [each[name].detach() for each in parameters]
        if not placement.sharded:
            assert all(torch.equal(part, parts[0]) for part in parts)
        found[name] = placement.assemble(parts)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_bit_identical_at_every_tp_size(ranks_of, dtype):
    expected = wholes(ranks_of(1), 1234, dtype=dtype)
    for size in (2, 4):
        found = wholes(ranks_of(size), 1234, dtype=dtype)
        assert found.keys() == expected.keys()
        for name, whole in found.items():
            assert whole.dtype == dtype
            assert torch.equal(whole, expected[name]), name


@pytest.mark.mpi
@pytest.mark.every_size
def test_bit_identical_to_the_whole_model(group, alone):
    split, whole = GPT(CONFIG, group.comm), GPT(CONFIG, alone.comm)
    tplayers.initialize(split, 1234)
    tplayers.initialize(whole, 1234)
    for (name, part), (same_name, expected) in zip(
        group.assembled(split).items(), whole.named_parameters(), strict=True
    ):
        assert name == same_name
        assert torch.equal(part, expected), name


def test_seeds_and_names_differ(ranks_of):
    one, other = wholes(ranks_of(1), 1), wholes(ranks_of(1), 2)
    drawn = {name for name in one if one[name].std() > 0}
    assert drawn == {n for n in one if n.endswith("weight") and "norm" not in n} | {"position_embedding"}
    for name in drawn:
        assert (one[name] == other[name]).float().mean() < 0.05
    firsts = [one[name].flatten()[0].item() for name in drawn]
    assert len(set(firsts)) == len(firsts), "two parameters got one stream"


def test_distribution(ranks_of):
    config = GPTConfig(2, 64, 4, 512, 64, init_method_std=0.05, make_vocab_size_divisible_by=512)
    for name, whole in wholes(ranks_of(1), 1, config).items():
        if "norm.weight" in name:
            assert (whole == 1).all(), name
        elif name.endswith("bias"):
            assert (whole == 0).all(), name
        else:
            ends_a_branch = "projection" in name or "down" in name
            std = 0.05 / math.sqrt(2 * 2) if ends_a_branch else 0.05  # GPT-2: 1 / sqrt(branches)
            count = whole.numel()
            assert abs(whole.mean()) < 4 * std / math.sqrt(count), name
            assert abs(whole.std() / std - 1) < 4 / math.sqrt(2 * count), name


def test_forgetting_to_initialize_is_loud(ranks_of):
    model = GPT(CONFIG, *ranks_of(1))
    assert all(parameter.isnan().all() for parameter in model.parameters())
    assert model.eval()(torch.zeros(1, 2, dtype=torch.int64)).isnan().all()
    norm = ParallelLayerNorm(8, *ranks_of(1))
    assert norm.weight.isnan().all()
    tplayers.initialize(norm, 1)
    assert (norm.weight == 1).all()


def test_drawing_leaves_torchs_generator_alone(ranks_of):
    before = torch.get_rng_state()
    wholes(ranks_of(1), 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_parameters_without_placement_are_left_alone(ranks_of):
    model = torch.nn.ModuleDict({"ours": ParallelLayerNorm(8, *ranks_of(1)), "theirs": torch.nn.Linear(2, 2)})
    before = model["theirs"].weight.detach().clone()
    tplayers.initialize(model, 1)
    assert torch.equal(model["theirs"].weight, before)
    assert not tplayers.placements(model)["theirs.weight"].sharded


def test_stable_hash_is_the_same_in_every_release():
    """Checkpoints resume with these masks and seeds: changing the hash breaks them."""
    assert rng.stable_hash(1, 2, "a") == GOLDEN[0]
    assert rng.stable_hash(-1, "layers.3.attention", 2**40) == GOLDEN[1]


GOLDEN = (9144566696336860946, -2454405879587845314)


def test_stable_hash_tells_its_parts_apart():
    several = [(1,), ("1",), (1, 1), (11,), ("1", "1"), ("11",), ("1,1",), ("",), ("", ""), (), (12, 3), (1, 23), (-1,)]
    assert len({rng.stable_hash(*parts) for parts in several}) == len(several)
    assert all(-(2**63) <= rng.stable_hash(*parts) < 2**63 for parts in several)
