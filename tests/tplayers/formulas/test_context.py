"""The messages of ranks that share sequences, against sums over ranks and heads made by hand."""

from dataclasses import replace

import pytest

from tplayers.formulas import TransformerShape, context_collectives, copies_of_groups

LLAMA = TransformerShape(5, 64, 8, 48, 128, kv_heads=2, head=16)
METHODS = ("ulysses", "ring", "gather")


def total(shape, context, method, phase="", tensor=1, **more):
    run = context_collectives(shape, 3, tensor, context, method, element_bytes=2, **more)
    return sum(one.count * one.size for one in run if phase in ("", one.phase))


@pytest.mark.parametrize("context", [2, 3, 4, 6])
def test_a_ring_passes_every_block_on_and_its_gradients_in_fp32(context):
    block = 2 * 2 * 3 * 48 // context * 16  # keys and values of 2 heads, 3 samples
    assert total(LLAMA, context, "ring", "forward") == 5 * (context - 1) * block * 2
    assert total(LLAMA, context, "ring", "backward") == 5 * (context - 1) * block * (2 + 4)
    # As many bytes as a gather receives, which counts its whole buffer.
    assert total(LLAMA, context, "gather", "forward") == 5 * context * block * 2
    assert total(LLAMA, context, "gather", "backward") == 5 * context * block * (2 + 4)


@pytest.mark.parametrize("context", [2, 4, 8])
def test_ulysses_sends_less_on_more_ranks(context):
    """8 heads of queries and of results, and 2 each of keys and values, as often as ranks need them."""
    times = max(1, context // 2)
    of_head = 3 * 48 // context * 16 * 2
    expected = 5 * of_head * (8 + 2 * 2 * times + 8)
    assert total(LLAMA, context, "ulysses", "forward") == total(LLAMA, context, "ulysses", "backward") == expected


@pytest.mark.parametrize("method", METHODS)
def test_full_recomputation_repeats_the_forward_and_nothing_else_does(method):
    kinds = {"none": 0, "selective": 0, "full": 1}
    for recompute, times in kinds.items():
        again = total(LLAMA, 2, method, "recompute", recompute=recompute)
        assert again == times * total(LLAMA, 2, method, "forward")


@pytest.mark.parametrize("method", METHODS)
def test_a_tensor_group_shares_the_heads(method):
    wide = replace(LLAMA, kv_heads=4)
    assert total(wide, 2, method, tensor=2) == total(wide, 2, method) / 2
    assert total(LLAMA, 1, method) == 0


@pytest.mark.parametrize("method", METHODS)
def test_a_bert_brings_its_first_tokens_to_all_ranks(method):
    bert = replace(LLAMA, model="bert")
    more = total(bert, 2, method) - total(bert, 2, method, order_head=False)
    assert more == 3 * 64 * 2 and total(bert, 2, method, order_head=False) == total(LLAMA, 2, method)


@pytest.mark.parametrize(
    ("heads", "groups", "context", "copies"),
    [(8, 8, 4, 1), (8, 2, 2, 1), (8, 2, 4, 2), (8, 1, 8, 8), (12, 4, 6, 3), (6, 3, 2, 2), (12, 2, 3, 3), (8, 4, 8, 2)],
)
def test_each_rank_gets_whole_heads_of_keys_that_fit_its_queries(heads, groups, context, copies):
    assert copies_of_groups(heads, groups, context) == copies
    keys = [group for group in range(groups) for _ in range(copies)]
    queries = [head // (heads // groups) for head in range(heads)]
    for rank in range(context):
        mine = queries[rank * heads // context : (rank + 1) * heads // context]
        there = keys[rank * len(keys) // context : (rank + 1) * len(keys) // context]
        assert [there[number * len(there) // len(mine)] for number in range(len(mine))] == mine


def test_another_method_is_refused():
    with pytest.raises(ValueError, match="method='star': one of ulysses, ring, gather"):
        context_collectives(LLAMA, 1, 1, 2, "star")
