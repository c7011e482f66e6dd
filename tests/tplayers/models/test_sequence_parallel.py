"""Sequence parallelism (Korthikanti et al. 2022, section 4.2.2): the same numbers from shards of the sequence."""

import pytest
import torch
import torch.nn.functional as F

import commengine
import tplayers
from tests.support import small_models
from tplayers import GPT, ColumnParallelLinear, GPTConfig, Randomness, RowParallelLinear
from tplayers import sum_partial_gradients as sum_partial

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]

S, B, H, HEADS = 8, 3, 16, 4
RANDOMNESS = Randomness(5, 17, (40, 41, 2))
DROPOUTS = {"hidden_dropout": 0.2, "attention_dropout": 0.1}


def block(comm, **options):
    return small_models.block(comm, H, HEADS, 4 * H, dtype=torch.float64, **DROPOUTS, **options)


def config(**changes):
    return GPTConfig(2, H, HEADS, 13, 12, make_vocab_size_divisible_by=16, **{**DROPOUTS, **changes})


def tokens_and_labels():
    tokens = torch.randint(13, (B, S + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


# The same numbers --------------------------------------------------------------------------------------------------


def test_column_takes_a_shard(group, random, close):
    layer = ColumnParallelLinear(6, 12, group.comm, sequence_parallel=True, blocks=3, dtype=torch.float64)
    wholes = group.fill(layer)
    x = random(S, B, 6).requires_grad_()
    y = F.linear(x, wholes["weight"], wholes["bias"])
    gradient = random(*y.shape, seed=1)
    y.backward(gradient)

    def mine(y):
        return torch.cat([group.mine(part) for part in y.chunk(3, -1)], -1)

    shard = group.mine(x.detach(), 0).requires_grad_()
    out = layer(shard)
    close(out, mine(y.detach()))
    out.backward(mine(gradient))
    close(group.joined(shard.grad, 0), x.grad)
    close(group.gradients(layer), {name: whole.grad for name, whole in wholes.items()})


def test_column_takes_a_shard_of_any_layout(group, random, close):
    layer = ColumnParallelLinear(6, 8, group.comm, sequence_parallel=True, dtype=torch.float64)
    group.fill(layer)
    shard = random(S, B, 6)
    strided = shard.transpose(0, 2).contiguous().transpose(0, 2)
    for x in (shard, strided):
        x.requires_grad_()
        layer(x).square().sum().backward()
    close(layer(strided), layer(shard))
    close(strided.grad, shard.grad)


@pytest.mark.parametrize("bias", [True, False])
def test_row_returns_a_shard(group, random, close, bias):
    layer = RowParallelLinear(8, 5, group.comm, bias, sequence_parallel=True, dtype=torch.float64)
    wholes = group.fill(layer)
    x = random(S, B, 8).requires_grad_()
    y = F.linear(x, wholes["weight"], wholes.get("bias"))
    gradient = random(*y.shape, seed=1)
    y.backward(gradient)

    mine = group.mine(x.detach()).requires_grad_()
    out = layer(mine)
    close(out, group.mine(y.detach(), 0))
    out.backward(group.mine(gradient, 0))
    sum_partial(layer, group.comm)
    close(group.joined(mine.grad), x.grad)
    close(group.gradients(layer), {name: whole.grad for name, whole in wholes.items()})


def test_block_on_shards(group, alone, random, close):
    """Against the layer on one rank, which test_block.py holds against plain torch."""
    split, whole = block(group.comm, sequence_parallel=True), block(alone.comm)
    alone.load(whole, group.fill(split))
    x = random(S, B, H).requires_grad_()
    expected = whole(x, RANDOMNESS)
    gradient = random(S, B, H, seed=1)
    expected.backward(gradient)

    shard = group.mine(x.detach(), 0).requires_grad_()
    y = split(shard, RANDOMNESS)
    close(y, group.mine(expected.detach(), 0))
    y.backward(group.mine(gradient, 0))
    sum_partial(split, group.comm)
    close(group.joined(shard.grad, 0), x.grad)
    close(group.gradients(split), alone.gradients(whole))


def test_model(group, alone, close):
    split = GPT(config(sequence_parallel=True), group.comm, dtype=torch.float64)
    whole = GPT(config(), alone.comm, dtype=torch.float64)
    alone.load(whole, group.fill(split, scale=0.3))
    tokens, labels = tokens_and_labels()
    losses = [model(tokens, labels, RANDOMNESS) for model in (split, whole)]
    close(group.same(losses[0]), losses[1].detach())
    for loss in losses:
        loss.sum().backward()
    sum_partial(split, group.comm)
    close(group.gradients(split), alone.gradients(whole))
    split.eval()
    whole.eval()
    close(group.joined(split(tokens)), whole(tokens).detach())


@pytest.mark.mpi(min_size=2)
def test_partial_gradients_are_parts_of_their_sum(group, random):
    """What is marked partial differs between ranks before the sum, what is replicated and not marked does not."""
    layer = block(group.comm, sequence_parallel=True)
    group.fill(layer)
    layer(random(S // group.size, B, H, seed=group.rank), RANDOMNESS).square().sum().backward()
    partial = {name for name, placement in tplayers.placements(layer).items() if placement.partial}
    norms = [f"{norm}_norm.{kind}" for norm in ("attention", "mlp") for kind in ("weight", "bias")]
    assert partial == {*norms, "attention.projection.bias", "mlp.down.bias"}
    before = {name: group.ranks(p.grad) for name, p in layer.named_parameters() if name in partial}
    sharded = {name: p.grad.clone() for name, p in layer.named_parameters() if name not in partial}
    with commengine.trace(group.comm) as log:
        sum_partial(layer, group.comm)
    assert [(event.operation, event.elements) for event in log.events] == [("all_reduce", 6 * H)]
    for name, p in layer.named_parameters():
        if name in partial:
            assert not torch.equal(before[name][0], before[name][1])
            torch.testing.assert_close(p.grad, sum(before[name]))
            group.same(p.grad)
        else:
            assert tplayers.placements(layer)[name].sharded
            assert torch.equal(p.grad, sharded[name])


# What it communicates ----------------------------------------------------------------------------------------------


def recorded(comm, call):
    with commengine.trace(comm) as log:
        result = call()
    return result, [(event.operation, event.elements) for event in log.events]


@pytest.mark.mpi(min_size=2)
def test_layer_communication(group):
    """Section 4.2.2: all-gather and reduce-scatter where f and g all-reduce; the kept shards are gathered again."""
    layer = block(group.comm, sequence_parallel=True)
    x = torch.zeros(S // group.size, B, H, dtype=torch.float64, requires_grad=True)
    y, forward = recorded(group.comm, lambda: layer(x, RANDOMNESS))
    _, backward = recorded(group.comm, y.sum().backward)
    gather, scatter = (("all_gather", S * B * H), ("reduce_scatter", S * B * H))
    assert forward == 2 * [gather, scatter]
    # The row-parallel layer's gradient, the column-parallel layer's input once more, its gradient.
    assert backward == 2 * [gather, gather, scatter]


@pytest.mark.mpi(min_size=2)
def test_model_communication(group):
    model = GPT(config(sequence_parallel=True), group.comm)
    losses, forward = recorded(group.comm, lambda: model(*tokens_and_labels(), RANDOMNESS))
    _, backward = recorded(group.comm, losses.sum().backward)
    gather, scatter = (("all_gather", S * B * H), ("reduce_scatter", S * B * H))
    loss = [("all_reduce", S * B), ("all_reduce", 2 * S * B)]
    assert forward == [scatter, *(2 * 2 * [gather, scatter]), gather, *loss]
    assert backward == [gather, scatter, *(2 * 2 * [gather, gather, scatter]), gather]


def test_group_of_one_communicates_only_the_loss(alone):
    model = GPT(config(sequence_parallel=True), alone.comm)
    losses, forward = recorded(alone.comm, lambda: model(*tokens_and_labels(), RANDOMNESS))
    _, backward = recorded(alone.comm, lambda: (losses.sum().backward(), sum_partial(model, alone.comm)))
    assert [operation for operation, _ in forward] == 2 * ["all_reduce"]
    assert backward == []


# Limits ------------------------------------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
def test_a_sequence_that_does_not_divide(group):
    model = GPT(config(sequence_parallel=True), group.comm)
    words = rf"size {group.size} does not divide all of sequence_length=7; sizes that would work: \[1, 7\]"
    with pytest.raises(ValueError, match=words):
        model(torch.zeros(1, 7, dtype=torch.int64), None, RANDOMNESS)
    layer = RowParallelLinear(8, 4, group.comm, sequence_parallel=True)
    with pytest.raises(ValueError, match=r"dimension 0 of \[7, 1, 4\] does not divide"):
        layer(torch.zeros(7, 1, 8 // group.size))
