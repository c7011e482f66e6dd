"""Placement in layers and models: initial values that no TP size changes, and TP sizes that do not divide a model.

Initial values are a function of (seed, global name). A size that does not divide is a ValueError, which names the
numbers and the sizes that would work.
"""

import math

import pytest
import torch

import tplayers
from tests.support.small_models import LLAMA, block
from tplayers import (
    GPT,
    MLP,
    ColumnParallelLinear,
    GPTConfig,
    LayerNorm,
    RowParallelLinear,
    SelfAttention,
    VocabParallelEmbedding,
    formulas,
    require_divisible,
    rng,
)

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
    norm = LayerNorm(8)
    assert norm.weight.isnan().all()
    tplayers.initialize(norm, 1)
    assert (norm.weight == 1).all()


def test_drawing_leaves_torchs_generator_alone(ranks_of):
    before = torch.get_rng_state()
    wholes(ranks_of(1), 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_parameters_without_placement_are_left_alone():
    model = torch.nn.ModuleDict({"ours": LayerNorm(8), "theirs": torch.nn.Linear(2, 2)})
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


LAYERS = {
    "column": (lambda c: ColumnParallelLinear(4, 6, c), "out_features=6", [1, 2, 3, 6]),
    "column of blocks": (lambda c: ColumnParallelLinear(4, 18, c, blocks=3), "out_features / 3=6", [1, 2, 3, 6]),
    "row": (lambda c: RowParallelLinear(6, 4, c), "in_features=6", [1, 2, 3, 6]),
    "embedding": (lambda c: VocabParallelEmbedding(10, 4, c), "num_embeddings=10", [1, 2, 5, 10]),
    "attention": (lambda c: SelfAttention(12, 6, c), "num_attention_heads=6", [1, 2, 3, 6]),
    "mlp": (lambda c: MLP(8, 10, c), "out_features=10", [1, 2, 5, 10]),
    "block": (lambda c: block(c, 12, 6, 16), "num_attention_heads=6", [1, 2, 3, 6]),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer(ranks_of, name):
    build, value, fitting = LAYERS[name]
    for rank in ranks_of(4):
        with pytest.raises(ValueError) as caught:
            build(rank)
        message = str(caught.value)
        assert "tensor-model-parallel size 4 does not divide" in message
        assert value in message
        assert message.endswith(f"sizes that would work: {fitting}")
    for size in (1, 2):
        build(ranks_of(size)[-1])


@pytest.mark.parametrize(
    "changes, offender, fitting",
    [
        ({"num_attention_heads": 6, "hidden_size": 24}, "num_attention_heads=6", [1, 2]),
        ({"ffn_hidden_size": 18}, "ffn_hidden_size=18", [1, 2]),
        ({"make_vocab_size_divisible_by": 10}, "padded_vocab_size=10", [1, 2]),
        ({"num_attention_heads": 1}, "num_attention_heads=1", [1]),
    ],
)
def test_gpt_names_every_value_and_the_sizes_that_divide_all(ranks_of, changes, offender, fitting):
    values = {"hidden_size": 16, "num_attention_heads": 4, "make_vocab_size_divisible_by": 16, **changes}
    config = GPTConfig(num_layers=1, vocab_size=10, max_position_embeddings=8, **values)
    with pytest.raises(ValueError) as caught:
        GPT(config, ranks_of(4)[0])
    message = str(caught.value)
    assert offender in message
    for name in ("num_attention_heads=", "hidden_size=", "ffn_hidden_size=", "padded_vocab_size="):
        assert name in message
    assert message.endswith(f"sizes that would work: {fitting}")
    for size in fitting:
        GPT(config, ranks_of(size)[0])


def test_the_ranks_of_the_job_count_too():
    config = GPTConfig(num_layers=1, hidden_size=16, num_attention_heads=8, vocab_size=16, max_position_embeddings=8)
    with pytest.raises(ValueError, match=r"size 3 .*ranks=6; sizes that would work: \[1, 2\]"):
        config.require_parallel(3, ranks=6)
    config.require_parallel(2, ranks=6)


SHAPES = {
    "gpt": {},
    "llama": LLAMA,
    "llama, 2 groups, with biases": LLAMA | {"num_query_groups": 2, "add_bias_linear": True},
    "5 heads": {"num_attention_heads": 5, "kv_channels": 6, "pad_attention_heads": True},
    "2 groups of 3 heads": LLAMA | {"num_attention_heads": 6, "num_query_groups": 2, "pad_attention_heads": True},
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_costs_know_every_parameter_and_the_cache(ranks_of, name):
    fields = {"num_attention_heads": 4, "make_vocab_size_divisible_by": 16} | SHAPES[name]
    config = GPTConfig(num_layers=2, hidden_size=16, vocab_size=10, max_position_embeddings=8, **fields)
    for size in (1, 2, 4):
        shape = config.cost_shape(8, tensor=size)
        for comm in ranks_of(size):
            model = GPT(config, comm)
            assert formulas.parameter_sizes(shape, size) == [(name, p.numel()) for name, p in model.named_parameters()]
            assert formulas.key_value_bytes(shape, 3, 7, size) == model.new_cache(3, 7).nbytes
        assert formulas.parameters(shape, size) == sum(p.numel() for p in model.parameters())


def test_hidden_size_that_the_heads_do_not_divide(ranks_of):
    for build in (
        lambda: SelfAttention(10, 4, *ranks_of(1)),
        lambda: GPT(GPTConfig(1, 10, 4, 16, 8), *ranks_of(1)),
    ):
        with pytest.raises(ValueError, match="hidden_size=10 is not a multiple of num_attention_heads=4"):
            build()


def test_sizes_that_would_work_are_those_that_do():
    for size in range(1, 40):
        numbers = {"a": 24, "b": 36}
        if 24 % size or 36 % size:
            with pytest.raises(ValueError, match=r"a=24, b=36; sizes that would work: \[1, 2, 3, 4, 6, 12\]"):
                require_divisible(size, **numbers)
        else:
            assert size in (1, 2, 3, 4, 6, 12)
            require_divisible(size, **numbers)
