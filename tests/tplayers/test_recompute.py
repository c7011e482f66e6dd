"""Recomputation: the same bits as without, from fewer saved activations; what it communicates again."""

import pytest
import torch

import commengine
from tests.support.small_models import DECODERS, HEADS, KINDS, LAYERS, B, H, S, arguments, block, made, total
from tplayers import initialize

pytestmark = pytest.mark.mpi


def step(model, kind="gpt"):
    """Losses, gradients by name, and the collectives of forward and backward."""
    inputs, named = arguments(kind)
    with commengine.trace(model.comm) as log:
        losses = model(*inputs, **named)
        forward = len(log.events)
        total(losses).backward()
    losses = losses if kind in DECODERS else torch.cat((losses[0].flatten(), losses[1]))
    operations = [(event.operation, event.elements) for event in log.events]
    return losses.detach(), {n: p.grad for n, p in model.named_parameters()}, operations[:forward], operations[forward:]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_bit_equal(group, recompute, sequence_parallel, kind):
    """Also of float32: the replay runs the same operations on the same numbers, in the same order."""
    expected = step(made(kind, group.comm, sequence_parallel=sequence_parallel), kind)
    found = step(made(kind, group.comm, sequence_parallel=sequence_parallel, recompute=recompute), kind)
    assert torch.equal(found[0], expected[0])
    for name, gradient in expected[1].items():
        assert torch.equal(found[1][name], gradient), name
    assert found[2] == expected[2]
    if recompute == "selective" or group.size == 1:
        assert found[3] == expected[3]


@pytest.mark.mpi(min_size=2)
def test_full_recompute_communicates_a_layers_forward_again(group):
    hidden = ("all_reduce", S * B * H)
    _, _, _, backward = step(made("gpt", group.comm, recompute="full"))
    assert backward == [hidden] + LAYERS * 4 * [hidden]

    gather, scatter = (("all_gather", S * B * H), ("reduce_scatter", S * B * H))
    _, _, _, backward = step(made("gpt", group.comm, recompute="full", sequence_parallel=True))
    layer = 2 * [gather, scatter] + 2 * [gather, gather, scatter]
    assert backward == [gather, scatter, *(LAYERS * layer), gather]


@pytest.mark.mpi(min_size=2)
def test_replay_ends_with_the_last_tensor_that_is_needed(group):
    """Without dropout nothing saves what the layer's last all-reduce gives, so it is not run again."""
    layer = block(group.comm, H, HEADS, 4 * H, recompute="full")
    initialize(layer, 3)
    y = layer(torch.ones(S, B, H, requires_grad=True))
    with commengine.trace(group.comm) as log:
        y.sum().backward()
    assert len(log.events) == 1 + 2


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_random_state_and_hooks(group, recompute):
    """Recomputation neither reads nor moves torch's generator, and a parameter's gradient is ready once."""
    model = made("gpt", group.comm, recompute=recompute)
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
    model, plain = made("gpt", group.comm, recompute=recompute).eval(), made("gpt", group.comm).eval()
    tokens = torch.zeros(B, S, dtype=torch.int64)
    with torch.no_grad():
        assert torch.equal(model(tokens, tokens), plain(tokens, tokens))


def test_unknown_recompute_is_refused(group):
    with pytest.raises(ValueError, match="recompute='some' must be one of full, selective, None"):
        made("gpt", group.comm, recompute="some")
