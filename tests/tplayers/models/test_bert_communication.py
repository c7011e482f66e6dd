"""What BERT communicates, by count and volume: two all-reduces each way a layer (paper, section 3, Figure 4)."""

import pytest
import torch

import commengine
from tests.support.small_models import block
from tplayers import BERT, BERTConfig, Randomness

H, HEADS, S, B, LAYERS, K = 8, 4, 8, 3, 2, 3
RANDOMNESS = Randomness(0, 0, tuple(range(B)))
LENGTHS = torch.tensor([8, 3, 5])

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.every_size]


def recorded(comm, call):
    with commengine.trace(comm) as log:
        result = call()
    assert all(event.size == comm.size and event.stream is None for event in log.events)
    return result, [(event.operation, event.redop, event.elements) for event in log.events]


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("padding", [None, LENGTHS])
def test_layer_is_two_all_reduces_each_way(group, placement, padding):
    dropouts = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    layer = block(group.comm, H, HEADS, 4 * H, encoder=True, norm_placement=placement, **dropouts)
    x = torch.zeros(S, B, H, requires_grad=True)
    y, forward = recorded(group.comm, lambda: layer(x, RANDOMNESS, padding))
    _, backward = recorded(group.comm, y.sum().backward)
    assert forward == backward == 2 * [("all_reduce", "sum", S * B * H)]


def step(comm, positions, **options):
    """The collectives of forward and backward of a model with all heads."""
    shape = BERTConfig(LAYERS, H, HEADS, 4096, S, make_vocab_size_divisible_by=16, **options)
    model = BERT(shape, comm)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.1)
    tokens = torch.zeros(B, S, dtype=torch.int64)
    named = {"labels": tokens, "order_labels": tokens[:, 0], "randomness": RANDOMNESS}
    if positions:
        named |= {"labels": tokens[:, :K], "positions": tokens[:, :K]}
    losses, forward = recorded(comm, lambda: model(tokens, tokens, LENGTHS, **named))
    _, backward = recorded(comm, lambda: (losses[0].sum() + losses[1].sum()).backward())
    return forward, backward


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_model(group, placement):
    """The embedding's g, the layers, and a loss of 3 numbers a token; the pooler and both heads add nothing."""
    hidden = ("all_reduce", "sum", S * B * H)
    loss = [("all_reduce", "max", S * B), ("all_reduce", "sum", 2 * S * B)]
    forward, backward = step(group.comm, positions=False, norm_placement=placement)
    assert forward == (1 + 2 * LAYERS) * [hidden] + loss
    assert backward == (2 * LAYERS + 1) * [hidden]


def test_model_at_positions(group):
    """The output layer's f and the loss shrink to the positions."""
    hidden = ("all_reduce", "sum", S * B * H)
    loss = [("all_reduce", "max", K * B), ("all_reduce", "sum", 2 * K * B)]
    forward, backward = step(group.comm, positions=True)
    assert forward == (1 + 2 * LAYERS) * [hidden] + loss
    assert backward == [("all_reduce", "sum", K * B * H)] + 2 * LAYERS * [hidden]


@pytest.mark.parametrize("positions", [False, True])
def test_model_with_sequence_parallelism(group, positions):
    """Reduce-scatter and all-gather where g and f were, and one all-reduce of each sample's first token."""
    rows = -(-K // group.size) * group.size if positions else S  # filled up to a multiple of the group
    gather, scatter = (("all_gather", None, S * B * H), ("reduce_scatter", "sum", S * B * H))
    head_gather, head_scatter = (("all_gather", None, rows * B * H), ("reduce_scatter", "sum", rows * B * H))
    loss = [("all_reduce", "max", rows * B), ("all_reduce", "sum", 2 * rows * B)]
    forward, backward = step(group.comm, positions, sequence_parallel=True)
    picked = [head_scatter] if positions else []
    pooled = ("all_reduce", "sum", B * H)
    assert forward == [scatter, *(2 * LAYERS * [gather, scatter]), *picked, head_gather, pooled, *loss]
    given = [head_gather] if positions else []
    assert backward == [head_gather, head_scatter, *given, *(2 * LAYERS * [gather, gather, scatter]), gather]
