"""What a layer and a model communicate, by count and volume, against the paper (section 3, Figure 4)."""

import pytest
import torch

import commengine
from tests.support.small_models import block
from tplayers import GPT, GPTConfig, Randomness

H, HEADS, S, B, LAYERS = 8, 4, 5, 3, 2

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]


def recorded(comm, call):
    with commengine.trace(comm) as log:
        result = call()
    assert all(event.size == comm.size and event.stream is None for event in log.events)
    return result, [(event.operation, event.redop, event.elements) for event in log.events]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_layer_is_two_all_reduces_each_way(group, dropout):
    layer = block(group.comm, H, HEADS, 4 * H, hidden_dropout=dropout, attention_dropout=dropout)
    x = torch.zeros(S, B, H, requires_grad=True)
    y, forward = recorded(group.comm, lambda: layer(x, Randomness(0, 0, tuple(range(B)))))
    _, backward = recorded(group.comm, y.sum().backward)
    assert forward == backward == 2 * [("all_reduce", "sum", S * B * H)]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("vocab_size", [16, 4096])
def test_model(group, vocab_size):
    """Embedding's g, the layers, and a loss of 3 numbers a token; backward the layers and the output layer's f."""
    shape = GPTConfig(LAYERS, H, HEADS, vocab_size, S, make_vocab_size_divisible_by=16)
    model = GPT(shape, group.comm)
    tokens, randomness = torch.zeros(B, S, dtype=torch.int64), Randomness(0, 0, tuple(range(B)))
    hidden = ("all_reduce", "sum", S * B * H)
    loss = [("all_reduce", "max", S * B), ("all_reduce", "sum", 2 * S * B)]

    losses, forward = recorded(group.comm, lambda: model(tokens, tokens, randomness))
    _, backward = recorded(group.comm, losses.sum().backward)
    assert forward == (1 + 2 * LAYERS) * [hidden] + loss
    assert backward == (2 * LAYERS + 1) * [hidden]

    _, forward = recorded(group.comm, lambda: model(tokens, None, randomness))
    assert forward == (1 + 2 * LAYERS) * [hidden]


def test_group_of_one_communicates_only_the_loss_with_itself(alone):
    model = GPT(GPTConfig(LAYERS, H, HEADS, 16, S, make_vocab_size_divisible_by=16), alone.comm)
    tokens, randomness = torch.zeros(B, S, dtype=torch.int64), Randomness(0, 0, tuple(range(B)))
    losses, forward = recorded(alone.comm, lambda: model(tokens, tokens, randomness))
    _, backward = recorded(alone.comm, losses.sum().backward)
    assert [event[1:] for event in forward] == [("max", S * B), ("sum", 2 * S * B)]
    assert backward == []
