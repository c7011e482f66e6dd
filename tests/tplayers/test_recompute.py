"""Recomputation: the same bits as without, from fewer saved activations; what it communicates again."""

import pytest
import torch

import commengine
from tplayers import GPT, GPTConfig, Randomness, TransformerBlock, initialize

pytestmark = pytest.mark.mpi

S, B, H, HEADS, LAYERS = 8, 3, 16, 4, 3
RANDOMNESS = Randomness(5, 17, (40, 41, 2))


def gpt(comm, **options):
    shape = GPTConfig(
        LAYERS, H, HEADS, 13, S, make_vocab_size_divisible_by=16, hidden_dropout=0.2, attention_dropout=0.1, **options
    )
    model = GPT(shape, comm)
    initialize(model, 3)
    return model


def step(model):
    """Losses, gradients by name, and the collectives of forward and backward."""
    tokens = torch.randint(13, (B, S + 1), generator=torch.Generator().manual_seed(0))
    with commengine.trace(model.comm) as log:
        losses = model(tokens[:, :-1], tokens[:, 1:], RANDOMNESS)
        forward = len(log.events)
        losses.sum().backward()
    operations = [(event.operation, event.elements) for event in log.events]
    return losses.detach(), {n: p.grad for n, p in model.named_parameters()}, operations[:forward], operations[forward:]


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_bit_equal(group, recompute, sequence_parallel):
    """Also of float32: the replay runs the same operations on the same numbers, in the same order."""
    expected = step(gpt(group.comm, sequence_parallel=sequence_parallel))
    found = step(gpt(group.comm, sequence_parallel=sequence_parallel, recompute=recompute))
    assert torch.equal(found[0], expected[0])
    for name, gradient in expected[1].items():
        assert torch.equal(found[1][name], gradient), name
    assert found[2] == expected[2]
    if recompute == "selective" or group.size == 1:
        assert found[3] == expected[3]


@pytest.mark.mpi(min_size=2)
def test_full_recompute_communicates_a_layers_forward_again(group):
    hidden = ("all_reduce", S * B * H)
    _, _, _, backward = step(gpt(group.comm, recompute="full"))
    assert backward == [hidden] + LAYERS * 4 * [hidden]

    gather, scatter = (("all_gather", S * B * H), ("reduce_scatter", S * B * H))
    _, _, _, backward = step(gpt(group.comm, recompute="full", sequence_parallel=True))
    layer = 2 * [gather, scatter] + 2 * [gather, gather, scatter]
    assert backward == [gather, scatter, *(LAYERS * layer), gather]


@pytest.mark.mpi(min_size=2)
def test_replay_ends_with_the_last_tensor_that_is_needed(group):
    """Without dropout nothing saves what the layer's last all-reduce gives, so it is not run again."""
    layer = TransformerBlock(H, HEADS, 4 * H, group.comm, recompute="full")
    initialize(layer, 3)
    y = layer(torch.ones(S, B, H, requires_grad=True))
    with commengine.trace(group.comm) as log:
        y.sum().backward()
    assert len(log.events) == 1 + 2


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_random_state_and_hooks(group, recompute):
    """Recomputation neither reads nor moves torch's generator, and a parameter's gradient is ready once."""
    model = gpt(group.comm, recompute=recompute)
    ready = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))
    state = torch.get_rng_state()
    step(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert sorted(ready) == sorted(name for name, _ in model.named_parameters())
    first = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    torch.rand(100)
    for name, gradient in step(model)[1].items():
        assert torch.equal(gradient, first[name])


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_evaluation_keeps_nothing_and_recomputes_nothing(group, recompute):
    model, plain = gpt(group.comm, recompute=recompute).eval(), gpt(group.comm).eval()
    tokens = torch.zeros(B, S, dtype=torch.int64)
    with torch.no_grad():
        assert torch.equal(model(tokens, tokens), plain(tokens, tokens))


def test_unknown_recompute_is_refused(group):
    with pytest.raises(ValueError, match="recompute='some' must be None or one of full, selective"):
        gpt(group.comm, recompute="some")
