"""Grouped queries: the layer whose query heads have keys and values of their own, with those of a group repeated."""

import pytest
import torch

import commengine
from tplayers import Randomness, SelfAttention, sum_partial_gradients

S, B, H, HEADS, HEAD = 8, 3, 16, 4, 8
RANDOMNESS = Randomness(5, 17, (40, 41, 2))


def layer(comm, groups, **options):
    return SelfAttention(
        H, HEADS, comm, head_size=HEAD, query_groups=groups, attention_dropout=options.pop("dropout", 0.0),
        dtype=torch.float64, **options,
    )  # fmt: skip


def repeated(tensor, groups):
    """[keys; values] of ``groups`` heads as those of all query heads."""
    heads = tensor.view(2, groups, HEAD, *tensor.shape[1:]).repeat_interleave(HEADS // groups, dim=1)
    return heads.reshape(2 * HEADS * HEAD, *tensor.shape[1:])


def summed(tensor, groups):
    """The gradient of [keys; values] of ``groups`` heads from that of all query heads."""
    return tensor.view(2, groups, HEADS // groups, HEAD, *tensor.shape[1:]).sum(2).reshape(-1, *tensor.shape[1:])


@pytest.mark.mpi
@pytest.mark.every_size
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": False, "padding": True}, {"dropout": 0.3}, {"dropout": 0.3, "causal": False, "padding": True},
     {"sequence_parallel": True, "dropout": 0.3, "recompute_core": True}, {"qkv_bias": False, "bias": False}],
)  # fmt: skip
def test_a_group_of_queries_shares_a_head(group, alone, random, close, groups, options):
    options = dict(options)
    padding = torch.tensor([6, 2, 4]) if options.pop("padding", False) else None
    sharded = options.get("sequence_parallel", False)
    split = layer(group.comm, groups, **options)
    whole = layer(alone.comm, None, **options | {"sequence_parallel": False})
    wholes = {name: value.detach() for name, value in group.fill(split).items()}
    names = [name.removeprefix("query.") for name in wholes if name.startswith("query.")]
    fused = {f"qkv.{n}": torch.cat((wholes[f"query.{n}"], repeated(wholes[f"key_value.{n}"], groups))) for n in names}
    alone.load(whole, fused | wholes)

    x, gradient = random(S, B, H).requires_grad_(), random(S, B, H, seed=1)
    y = whole(x, RANDOMNESS, padding)
    y.backward(gradient)
    mine = (group.mine(x.detach(), 0) if sharded else x.detach().clone()).requires_grad_()
    out = split(mine, RANDOMNESS, padding)
    close(out, group.mine(y.detach(), 0) if sharded else y.detach())
    out.backward(group.mine(gradient, 0) if sharded else gradient)
    sum_partial_gradients(split, group.comm)
    close(group.joined(mine.grad, 0) if sharded else group.same(mine.grad), x.grad)
    expected = alone.gradients(whole)
    for name in names:
        of_queries, of_rest = expected.pop(f"qkv.{name}").split([HEADS * HEAD, 2 * HEADS * HEAD])
        expected |= {f"query.{name}": of_queries, f"key_value.{name}": summed(of_rest, groups)}
    close(group.gradients(split), expected)


@pytest.mark.mpi(min_size=2)
def test_it_communicates_as_one_layer_and_gathers_a_head(group):
    """One f for both weights. The ranks that share a head gather its keys and values, and sum their gradients."""
    grouped = layer(group.comm, 1)
    group.fill(grouped)
    x = torch.zeros(S, B, H, dtype=torch.float64, requires_grad=True)
    with commengine.trace(group.comm) as log:
        y = grouped(x)
        forward = len(log.events)
        y.sum().backward()
    said = [(event.group, event.operation, event.elements) for event in log.events]
    block, head = f"tensor/block{group.size}", 2 * S * B * HEAD
    assert said[:forward] == [(block, "all_gather", head), ("tensor", "all_reduce", S * B * H)]
    assert said[forward:] == [(block, "reduce_scatter", head), ("tensor", "all_reduce", S * B * H)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_heads_of_a_rank(ranks_of, size):
    for groups in (1, 2):
        made = [layer(comm, groups) for comm in ranks_of(size)]
        assert [(one.num_heads, one.kv_heads) for one in made] == [(4 // size, max(groups // size, 1))] * size
        assert {one.key_value.weight.shape for one in made} == {(2 * groups * HEAD // size, H)}
        assert all((one.sharing is None) == (size <= groups) for one in made)


@pytest.mark.parametrize(
    "size, heads, groups, head, says",
    [
        (1, 4, 3, 8, r"num_query_groups=3 does not divide num_attention_heads=4; \[1, 2, 4\] do"),
        (4, 12, 6, 8, r"size 4 neither divides num_query_groups=6 nor is a multiple of it; .*: \[1, 2, 3, 6, 12\]"),
        (4, 4, 1, 6, "4 ranks share each of num_query_groups=1 .* do not divide its size kv_channels=6"),
        (3, 4, 2, 8, r"size 3 does not divide all of num_attention_heads=4; sizes that would work: \[1, 2, 4\]"),
    ],
)  # fmt: skip
def test_what_cannot_be_shared(ranks_of, size, heads, groups, head, says):
    with pytest.raises(ValueError, match=says):
        SelfAttention(H, heads, ranks_of(size)[0], query_groups=groups, head_size=head)
