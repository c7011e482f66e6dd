"""Heads that the ranks do not divide: which are added, and that a padded model is the model without padding."""

import itertools

import pytest
import torch

from tests.support.small_models import LLAMA
from tplayers import BERT, GPT, BERTConfig, GPTConfig, Randomness, placements, sum_partial_gradients
from tplayers.attention.head_split import split_heads

VOCAB, S, B = 13, 8, 3
#: (query heads, heads of keys and values): on 2 and 4 ranks groups are padded, queries in shared groups, or both
HEADS = {"five": (5, None), "groups": (9, 3), "queries": (6, 2), "one group": (5, 1), "no padding": (4, 2)}


def least(ranks, heads, groups):
    """The fewest query heads with which every rank has equally many, of one group or of whole groups."""
    queries = heads // groups
    found = []
    for more, each in itertools.product(range(groups, 2 * ranks + groups), range(queries, 2 * ranks + queries)):
        shares = ranks % more == 0 and each % (ranks // more) == 0 and queries > 1
        if (more % ranks == 0 and each == queries) or shares:
            found.append(more * each)
    return min(found)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_real_head_is_on_one_rank_with_its_keys_and_values(ranks):
    for heads in range(1, 13):
        for groups in (n for n in range(1, heads + 1) if heads % n == 0):
            split, size = split_heads(ranks, heads, groups, 840, pad=True), heads // groups
            assert split.padded_groups * split.padded_queries == least(ranks, heads, groups)
            found = []
            for rank in range(ranks):
                numbers = split.heads(rank)
                assert len(numbers) == split.local_heads
                first = rank * split.local_groups if split.sharing == 1 else rank // split.sharing
                for place, head in enumerate(numbers[: split.real_heads(rank)]):
                    group = first + place // (split.local_heads // split.local_groups)
                    if group < groups:
                        assert head // size == group
                        found.append(head)
            assert sorted(found) == list(range(heads))
            if split.padded_groups * split.padded_queries == heads:
                assert split == split_heads(ranks, heads, groups, 840)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((2, 5, 5, 8), r"size 2 does not divide all of num_attention_heads=5; sizes that would work: \[1, 5\]"),
        ((2, 4, 3, 8), r"num_query_groups=3 does not divide num_attention_heads=4; \[1, 2, 4\] do"),
        ((4, 12, 6, 8), r"size 4 neither divides num_query_groups=6 nor is a multiple of it.*: \[1, 2, 3, 6, 12\]"),
        ((8, 8, 2, 6), r"4 ranks share each of num_query_groups=2 heads .* its size kv_channels=6"),
    ],
)
def test_what_does_not_split_is_refused_and_padded(sizes, message):
    with pytest.raises(ValueError, match=message):
        split_heads(*sizes)
    if sizes[1] % sizes[2] == 0:
        assert split_heads(*sizes, pad=True).local_heads > 0


def config(heads, kind="gpt", **changes):
    count, groups = HEADS[heads]
    fields = {
        "num_layers": 2, "hidden_size": 8, "num_attention_heads": count, "vocab_size": VOCAB, "kv_channels": 4,
        "max_position_embeddings": S, "make_vocab_size_divisible_by": 16, "num_query_groups": groups,
        "ffn_hidden_size": 12, "hidden_dropout": 0.1, "attention_dropout": 0.2, "pad_attention_heads": True, **changes,
    }  # fmt: skip
    if kind == "gpt":
        return GPTConfig(**fields)
    return BERTConfig(**fields | {"hidden_size": 4 * count, "kv_channels": None})


def step(model, comm):
    tokens = torch.randint(VOCAB, (B, S + 1), generator=torch.Generator().manual_seed(4))
    model.zero_grad()
    randomness, labels = Randomness(5, 17, (40, 41, 2)), tokens[:, 1:]
    if isinstance(model, GPT):
        losses = model(tokens[:, :-1], labels, randomness)
    else:
        order = torch.tensor([1, -100, 0])
        losses, ordered = model(tokens[:, :-1], labels=labels, order_labels=order, randomness=randomness)
        losses = losses.sum() + ordered.sum()
    losses.sum().backward()
    sum_partial_gradients(model, comm)
    return losses.detach()


def require_zeros(model, tensors):
    """Require that the padding of each tensor, by the parameters' names, is 0; return the number of its elements."""
    found = 0
    for name, placement in placements(model).items():
        if placement.padded:
            rows = tensors[name].detach().reshape(-1, placement.stretch).clone()
            real = torch.zeros(placement.stretch, dtype=torch.bool)
            for _, place, number in placement.runs():
                real[place : place + number] = True
            assert (rows[:, ~real] == 0).all(), name
            found += rows[:, ~real].numel()
    return found


@pytest.mark.parametrize(("name", "heads", "groups"), [("five", 8, 8), ("groups", 12, 4), ("queries", 8, 2)])
def test_formulas_of_costs_count_the_heads_of_zeros(name, heads, groups):
    """`bench.step` compares what they say with what runs."""
    shape = config(name).cost_shape(S, tensor=4)
    assert (shape.heads, shape.groups, shape.head_size) == (heads, groups, 4)
    shape.require_tensor_parallel(4)
    for unpadded in (config(name).cost_shape(S), config(name, pad_attention_heads=False).cost_shape(S, tensor=4)):
        assert (unpadded.heads, unpadded.groups) == (HEADS[name][0], HEADS[name][1] or HEADS[name][0])


LLAMAS = {name: LLAMA[name] for name in LLAMA if name not in ("num_query_groups", "kv_channels")}
CASES = [
    *(pytest.param(heads, "gpt", {}, marks=pytest.mark.sizes(1, 2)) for heads in HEADS),
    *((heads, "gpt", LLAMAS) for heads in HEADS),
    ("five", "bert", {"sequence_parallel": True}), ("queries", "gpt", {**LLAMAS, "sequence_parallel": True}),
    ("one group", "gpt", {"recompute": "full"}), ("groups", "gpt", {**LLAMAS, "recompute": "selective"}),
]  # fmt: skip


@pytest.mark.some(6)
@pytest.mark.mpi
@pytest.mark.every_size
@pytest.mark.parametrize(("heads", "kind", "changes"), CASES)
def test_a_padded_model_is_the_one_without_padding(group, alone, close, heads, kind, changes):
    """Losses and gradients with dropout; the padding and its gradients are 0 after steps of AdamW, too."""
    made = BERT if kind == "bert" else GPT
    split = made(config(heads, kind, **changes), group.comm, dtype=torch.float64)
    whole = made(config(heads, kind, **{**changes, "pad_attention_heads": False}), alone.comm, dtype=torch.float64)
    alone.load(whole, group.fill(split, scale=0.3))
    close(group.same(step(split, group.comm)), step(whole, alone.comm))
    close(group.gradients(split), alone.gradients(whole))
    padding = require_zeros(split, {name: p.grad for name, p in split.named_parameters()})
    there = split_heads(group.size, HEADS[heads][0], HEADS[heads][1] or HEADS[heads][0], 4, pad=True)
    more = there.padded_groups * there.padded_queries > HEADS[heads][0]
    assert (sum(group.comm.mpi.allgather(padding)) > 0) == more
    # With eps=1e-8 AdamW divides a gradient that is nearly 0 by its own size: its rounding would be as large as a step.
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3) for model in (split, whole)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.step()
        close(group.same(step(split, group.comm)), step(whole, alone.comm))
    require_zeros(split, dict(split.named_parameters()))
    close(group.assembled(split), alone.assembled(whole))


@pytest.mark.mpi
@pytest.mark.every_size
@pytest.mark.parametrize("heads", HEADS)
def test_cached_keys_and_values_with_padding(group, heads):
    model = GPT(config(heads, **LLAMAS), group.comm, dtype=torch.float64)
    group.fill(model, scale=0.3)
    model.eval().requires_grad_(False)
    tokens = torch.randint(VOCAB, (B, S), generator=torch.Generator().manual_seed(1))
    cache = model.new_cache(B, S)
    parts = []
    for piece in tokens.split(3, dim=1):
        parts.append(model(piece, cache=cache))
        cache.advance([piece.shape[1]] * B)
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens), rtol=1e-12, atol=1e-12)
