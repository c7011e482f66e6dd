"""Attention dropout by the fused kernel: how its masks are distributed, what they depend on, what they leave alone."""

import contextlib
import itertools
import math

import pytest
import torch

from tplayers import GPT, GPTConfig, Randomness, SelfAttention, initialize
from tplayers.rng import seeded

S, B, H, HEADS = 16, 4, 16, 4
BASE = {"seed": 1, "iteration": 2, "samples": (3, 4, 5, 6), "site": "layers.0.attention", "rank": 0}
CHANGES = {
    "seed": 2, "iteration": 3, "samples": (7, 8, 9, 10), "site": "layers.1.attention", "rank": 1,
}  # fmt: skip


def attention(comm, p=0.3, **options):
    return SelfAttention(H, HEADS, comm, causal=False, attention_dropout=p, dropout_mask="fused", **options)


def probabilities(ranks_of, p, seed, iteration, samples, site, rank):
    """What the core's dropout makes of equal probabilities 1 / S: [b, heads, s, s], exactly 0 where it is dropped."""
    layer = attention(ranks_of(2)[rank], p, site=site)
    drawn = layer._drawn(Randomness(seed, iteration, samples))
    zeros = torch.zeros(B, HEADS, S, S, dtype=torch.float64)
    return layer._core(zeros, zeros, torch.eye(S, dtype=torch.float64).expand_as(zeros), drawn)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_mean_and_variance_of_kept_probabilities(ranks_of, p):
    found = torch.stack([probabilities(ranks_of, p, **{**BASE, "iteration": k}) for k in range(32)]) * S * (1 - p)
    assert torch.allclose(found, found.round(), atol=1e-12)  # 0, or 1 / (1 - p) times the probability
    kept = found.flatten().round()
    sigma = math.sqrt(p * (1 - p))
    assert abs(kept.mean().item() - (1 - p)) < 4 * sigma / math.sqrt(kept.numel())
    of_heads = found.sum(dim=(-1, -2))  # each a binomial of S * S
    assert abs(of_heads.mean().item() - S * S * (1 - p)) < 4 * sigma * S / math.sqrt(of_heads.numel())
    assert of_heads.var().item() / (S * S * p * (1 - p)) == pytest.approx(1, abs=5 * math.sqrt(2 / of_heads.numel()))


@pytest.mark.parametrize("what", CHANGES)
def test_masks_differ_in(ranks_of, what):
    """``samples`` differ between micro-batches and between ranks of a data group."""
    one, again = (probabilities(ranks_of, 0.5, **BASE) != 0 for _ in range(2))
    assert torch.equal(one, again)
    other = probabilities(ranks_of, 0.5, **{**BASE, what: CHANGES[what]}) != 0
    agreement = (one == other).double().mean().item()
    assert abs(agreement - 0.5) < 4 * 0.5 / math.sqrt(one.numel())


def test_numbers_that_swap_places_do_not_collide():
    seeds = [
        Randomness(seed, iteration, samples).rank_seed(site, rank)
        for seed, iteration, rank in itertools.product(range(4), repeat=3)
        for samples in ((0,), (1,), (0, 1), (1, 0))
        for site in ("a", "b")
    ]
    assert len(set(seeds)) == len(seeds)


def test_torchs_random_state_is_left_alone(ranks_of):
    layer = attention(*ranks_of(1))
    initialize(layer, 3)
    x, randomness = torch.randn(S, B, H, requires_grad=True), Randomness(1, 2, BASE["samples"])
    torch.manual_seed(7)
    expected = torch.rand(5)
    torch.manual_seed(7)
    first = layer(x, randomness)
    first.sum().backward()
    assert torch.equal(torch.rand(5), expected)
    assert torch.equal(layer(x, randomness), first)  # whatever the state is
    state = torch.get_rng_state()
    with contextlib.suppress(KeyError), seeded(1, x.device):
        torch.rand(3)
        {}["an error in the block"]
    assert torch.equal(torch.get_rng_state(), state)


def test_on_cuda_only_that_devices_generator_is_seeded(monkeypatch):
    of_devices = (torch.Generator().manual_seed(5), torch.Generator().manual_seed(6))
    monkeypatch.setattr(torch.cuda, "default_generators", of_devices)
    before = [generator.get_state() for generator in (*of_devices, torch.default_generator)]
    with seeded(123, torch.device("cuda", 1)):
        assert of_devices[1].initial_seed() == 123
        drawn = torch.rand(4, generator=of_devices[1])
        assert torch.equal(of_devices[0].get_state(), before[0])
        assert torch.equal(torch.get_rng_state(), before[2])
    assert torch.equal(drawn, torch.rand(4, generator=torch.Generator().manual_seed(123)))
    for generator, state in zip((*of_devices, torch.default_generator), before, strict=True):
        assert torch.equal(generator.get_state(), state)


def test_without_dropout_or_training_it_is_the_default_path(ranks_of):
    x, randomness = torch.randn(S, B, H), Randomness(1, 2, BASE["samples"])
    for p, training in ((0.0, True), (0.3, False)):
        layers = [
            SelfAttention(H, HEADS, *ranks_of(1), attention_dropout=p, dropout_mask=m) for m in ("position", "fused")
        ]
        results = []
        for layer in layers:
            initialize(layer, 3)
            results.append(layer.train(training)(x, randomness))
        assert torch.equal(*results)


def test_dropout_that_drops_nothing_is_plain_attention(ranks_of):
    layers = [attention(*ranks_of(1), p=p) for p in (1e-12, 0.0)]
    for layer in layers:
        initialize(layer, 3)
    x, randomness = torch.randn(S, B, H), Randomness(1, 2, BASE["samples"])
    torch.testing.assert_close(layers[0](x, randomness), layers[1](x, randomness))


@pytest.mark.slow
def test_needs_randomness_a_known_word_and_no_compiler(ranks_of):
    with pytest.raises(ValueError, match=r"dropout at layers\.3\.attention: .* needs randomness=tplayers\.Randomness"):
        attention(*ranks_of(1), site="layers.3.attention")(torch.zeros(S, B, H))
    with pytest.raises(ValueError, match="dropout_mask='flash' must be one of position, fused"):
        SelfAttention(H, HEADS, *ranks_of(1), dropout_mask="flash")
    layer = attention(*ranks_of(1))
    initialize(layer, 3)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="dropout_mask='fused' does not compile"):
        torch.compile(layer, fullgraph=True, backend="eager")(torch.zeros(S, B, H), Randomness(1, 2, BASE["samples"]))
    torch._dynamo.reset()


@pytest.mark.parametrize("groups", [1, 2])
def test_grouped_queries_are_those_of_repeated_keys_and_values_under_the_same_mask(ranks_of, groups):
    """Each query head draws a mask of its own. Gradients of a group's keys and values are sums over its queries."""
    drawn = torch.Generator().manual_seed(3)
    grouped, whole = attention(*ranks_of(1), p=0.4, query_groups=groups), attention(*ranks_of(1), p=0.4)
    seed = grouped._drawn(Randomness(1, 2, BASE["samples"]))
    assert isinstance(seed, int) and seed == whole._drawn(Randomness(1, 2, BASE["samples"]))
    q = torch.randn(B, HEADS, S, S, dtype=torch.float64, generator=drawn)
    k, v = torch.randn(2, B, groups, S, S, dtype=torch.float64, generator=drawn).unbind()
    found, wanted = (one.clone().requires_grad_() for one in (k, v)), (one.clone().requires_grad_() for one in (k, v))
    (k1, v1), (k2, v2) = found, wanted
    first = grouped._core(q, k1, v1, seed)
    second = whole._core(q, *(one.repeat_interleave(HEADS // groups, 1) for one in (k2, v2)), seed)
    torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)
    gradient = torch.randn(first.shape, dtype=torch.float64, generator=drawn)
    first.backward(gradient)
    second.backward(gradient)
    torch.testing.assert_close((k1.grad, v1.grad), (k2.grad, v2.grad), rtol=1e-12, atol=1e-12)
    eye = torch.eye(S, dtype=torch.float64).expand(B, groups, S, S)
    kept = grouped._core(torch.zeros_like(q), torch.zeros_like(k), eye, seed) != 0
    for one, other in itertools.combinations(range(HEADS), 2):
        assert abs((kept[:, one] == kept[:, other]).double().mean().item() - (0.6**2 + 0.4**2)) < 0.1


def gpt(comm, **options):
    shape = GPTConfig(
        2, H, HEADS, 13, 8, make_vocab_size_divisible_by=16, hidden_dropout=0.2, attention_dropout=0.4,
        attention_dropout_mask="fused", **options,
    )  # fmt: skip
    model = GPT(shape, comm)
    initialize(model, 3)
    return model


def step(model, randomness):
    tokens = torch.randint(13, (B, 9), generator=torch.Generator().manual_seed(0))
    losses = model(tokens[:, :-1], tokens[:, 1:], randomness)
    losses.sum().backward()
    return losses.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.mpi
@pytest.mark.parametrize("groups", [None, 1])
@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_recomputation_draws_the_same_mask(group, recompute, sequence_parallel, groups):
    """Bit-equal gradients; torch's generator is in another state in the backward than it was in the forward."""
    randomness = Randomness(5, 17, BASE["samples"])
    options = {"sequence_parallel": sequence_parallel, "num_query_groups": groups}
    losses, gradients = step(gpt(group.comm, **options), randomness)
    torch.rand(10)
    found, recomputed = step(gpt(group.comm, **options, recompute=recompute), randomness)
    assert torch.equal(found, losses)
    for name, gradient in gradients.items():
        assert torch.equal(recomputed[name], gradient), name


@pytest.mark.mpi
def test_ranks_of_a_tensor_group_draw_masks_of_their_own_and_agree_on_the_loss(group):
    losses, _ = step(gpt(group.comm), Randomness(5, 17, BASE["samples"]))
    group.same(losses)
    assert not torch.equal(losses, step(gpt(group.comm), Randomness(5, 18, BASE["samples"]))[0])
    seeds = group.comm.mpi.allgather(Randomness(5, 17, BASE["samples"]).rank_seed("layers.0.attention", group.rank))
    assert len(set(seeds)) == group.size
