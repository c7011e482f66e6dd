"""BERT against implementations that are not ours: transformers' MegatronBert (pre-LN) and BERT (post-LN)."""

import functools

import pytest
import torch
import torch.nn.functional as F

from tests.support.weights.hugging_face import from_hugging_face
from tplayers import BERT, BERTConfig, Randomness, sum_partial_gradients

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2)]

VOCAB, S, B, H, HEADS, LAYERS = 21, 8, 4, 16, 4, 2
LENGTHS = torch.tensor([8, 5, 1, 7])
REAL = torch.arange(S) < LENGTHS[:, None]
OPTIONS = {
    "plain": {},
    "position dropout of nothing": {"attention_dropout": 1e-12, "hidden_dropout": 1e-12},
    "sequence parallel": {"sequence_parallel": True},
    "full recomputation": {"recompute": "full"},
    "selective recomputation": {"recompute": "selective"},
    "everything": {"sequence_parallel": True, "recompute": "full", "attention_dropout": 1e-12},
}


def config(placement, **changes):
    gelu = changes.pop("gelu", "erf")
    return BERTConfig(
        LAYERS, H, HEADS, VOCAB, S + 2, make_vocab_size_divisible_by=8, norm_placement=placement, gelu=gelu,
        **{"hidden_dropout": 0.0, "attention_dropout": 0.0, **changes},
    )  # fmt: skip


@functools.cache
def peer(placement, gelu="erf"):
    """The random model, in float64, that has no dropout."""
    transformers = pytest.importorskip("transformers", reason="the independent peer is transformers' BERT")
    shape = {
        "vocab_size": VOCAB, "hidden_size": H, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "intermediate_size": 4 * H, "max_position_embeddings": S + 2, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0, "layer_norm_eps": 1e-5,  # ours; theirs is 1e-12
        "hidden_act": {"erf": "gelu", "tanh": "gelu_new"}[gelu],
        "pad_token_id": None,  # else the gradient of that token's embedding leaves out the lookup
        "attn_implementation": "eager",
    }  # fmt: skip
    if placement == "pre":
        model = transformers.MegatronBertForPreTraining(transformers.MegatronBertConfig(**shape))
    else:
        model = transformers.BertForPreTraining(transformers.BertConfig(**shape))
    model = model.double().train()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)).double()
            parameter.copy_(0.3 * noise)
    return model


@functools.cache
def batch():
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCAB, (B, S), generator=generator)
    types = torch.randint(2, (B, S), generator=generator)
    labels = torch.randint(VOCAB, (B, S), generator=generator)
    labels[~REAL | (torch.rand(B, S, generator=generator) < 0.5)] = -100
    labels[1] = -100  # a sample with no masked token
    labels[0, 0] = labels[2, 0] = 3
    order = torch.tensor([1, 0, -100, 1])
    return tokens, types, labels, order


@functools.cache
def expected(placement, gelu="erf"):
    """Logits, per-item losses and all gradients of the sum of both mean losses, by our names."""
    model = peer(placement, gelu)
    tokens, types, labels, order = batch()
    output = model(input_ids=tokens, token_type_ids=types, attention_mask=REAL.long())
    logits, relation = output.prediction_logits, output.seq_relationship_logits
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(B, S)
    orders = F.cross_entropy(relation, order, reduction="none")
    model.zero_grad()
    (losses.sum() / (labels != -100).sum() + orders.sum() / (order != -100).sum()).backward()
    gradients = from_hugging_face({name: p.grad for name, p in model.named_parameters()}, config(placement))
    again = model(
        input_ids=tokens, token_type_ids=types, attention_mask=REAL.long(), labels=labels, next_sentence_label=order
    )
    return logits.detach(), relation.detach(), losses.detach(), orders.detach(), gradients, again.loss.item()


def compare(group, close, shape, padding, positions=None, stream=None):
    model = BERT(shape, group.comm, dtype=torch.float64, overlap_stream=stream)
    group.load(model, from_hugging_face(dict(peer(shape.norm_placement, shape.gelu).named_parameters()), shape))
    logits, relation, losses, orders, gradients, loss = expected(shape.norm_placement, shape.gelu)
    tokens, types, labels, order = batch()
    randomness = Randomness(1, 2, tuple(range(B)))
    real = REAL
    if positions is not None:
        logits, losses, labels, real = (take(x, positions) for x in (logits, losses, labels, REAL))
        labels = labels.masked_fill(repeated(positions), -100)
        losses = losses.masked_fill(repeated(positions), 0.0)
    found, found_relation = model(tokens, types, padding, positions=positions, randomness=randomness)
    close(group.joined(found)[..., :VOCAB][real], logits[real])
    close(group.same(found_relation), relation)
    found, found_orders = model(
        tokens, types, padding, labels=labels, order_labels=order, positions=positions, randomness=randomness
    )
    close(group.same(found), losses)
    close(group.same(found_orders), orders)
    total = found.sum() / (labels != -100).sum() + found_orders.sum() / (order != -100).sum()
    assert total.item() == pytest.approx(loss, abs=1e-10)
    total.backward()
    sum_partial_gradients(model, group.comm)
    ours = group.gradients(model)
    assert set(ours) == set(gradients)
    close(ours, gradients)


def take(x, positions):
    """Rows of x [b, s, ...] at positions [b, K]."""
    return x[torch.arange(B)[:, None], positions]


def repeated(positions):
    """Where a row of positions names one that stood before."""
    return torch.tensor([[p in row[:k] for k, p in enumerate(row)] for row in positions.tolist()])


@pytest.fixture
def within():
    return functools.partial(torch.testing.assert_close, rtol=0, atol=1e-10)


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("case", OPTIONS)
def test_logits_losses_and_gradients(group, within, placement, case):
    compare(group, within, config(placement, **OPTIONS[case]), LENGTHS)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_with_async_gradients_a_mask_and_gelu_by_tanh(group, within, sequence_parallel):
    shape = config("pre", gelu="tanh", sequence_parallel=sequence_parallel)
    compare(group, within, shape, REAL, stream=group.comm.new_stream())


@pytest.mark.every_size
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_head_at_the_masked_positions_only(group, within, sequence_parallel):
    """Position 0 fills the rows; their number is no multiple of the group."""
    counted = batch()[2] != -100
    longest = int(counted.sum(dim=1).max())
    longest += 1 - longest % 2  # odd
    positions = torch.zeros(B, longest, dtype=torch.int64)
    for sample in range(B):
        mine = counted[sample].nonzero().flatten().flip(0)  # any order
        positions[sample, : len(mine)] = mine
        positions[sample, len(mine) :] = int(mine[0]) if len(mine) else 0
    compare(group, within, config("pre", sequence_parallel=sequence_parallel), LENGTHS, positions)
