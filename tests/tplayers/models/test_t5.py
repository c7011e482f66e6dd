"""T5 against transformers' T5ForConditionalGeneration with the same weights, on several ranks and pipeline stages."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from commengine import Communicator
from tests.support.weights.hugging_face import from_hugging_face
from tplayers import (
    T5,
    ModelPart,
    Randomness,
    StageInput,
    T5Config,
    generate,
    initialize,
    placements,
    sum_partial_gradients,
    use_canonical_shards,
)
from tplayers.models.relative_bias import relative_buckets

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2)]

VOCAB, H, HEADS, HEAD, FFN, LAYERS, S, N, B = 30, 16, 6, 4, 24, 2, 12, 8, 2
#: the two kinds of T5: the first one, and 1.1
KINDS = {
    "1.0": {},
    "1.1": {"swiglu": True, "untie_embeddings_and_output_weights": True, "scale_decoder_outputs": False},
}


def ours(kind, *, num_attention_heads=HEADS, **changes):
    shape = {
        "ffn_hidden_size": FFN, "kv_channels": HEAD, "make_vocab_size_divisible_by": 8, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "pad_attention_heads": True, "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 10,
    }  # fmt: skip
    return T5Config(LAYERS, H, num_attention_heads, VOCAB, **{**shape, **KINDS[kind], **changes})


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers", reason="the independent peer is transformers' T5")


def exact_norm(norm, x):
    """Their norm, which rounds the squares of x to float32, in float64."""
    return norm.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)


def theirs(kind, transformers):
    tied = kind == "1.0"
    shape = transformers.T5Config(
        vocab_size=VOCAB, d_model=H, d_kv=HEAD, d_ff=FFN, num_layers=LAYERS, num_heads=HEADS, dropout_rate=0.0,
        relative_attention_num_buckets=8, relative_attention_max_distance=10, tie_word_embeddings=tied,
        feed_forward_proj="relu" if tied else "gated-gelu", decoder_start_token_id=0,
    )  # fmt: skip
    shape.tie_word_embeddings = shape.scale_decoder_outputs = tied  # transformers 5 sets both to True
    model = transformers.T5ForConditionalGeneration(shape).double().train()
    for module in model.modules():
        if type(module).__name__ == "T5LayerNorm":
            module.forward = partial(exact_norm, module)
    model.encoder.embed_tokens = model.decoder.embed_tokens = model.shared  # without ties transformers 5 has three
    assert (model.lm_head.weight.data_ptr() == model.shared.weight.data_ptr()) == tied
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)).double()
            parameter.copy_(0.3 * noise)
    return model


def batch(masked):
    drawn = torch.Generator().manual_seed(5)
    tokens, target = torch.randint(1, VOCAB, (B, S), generator=drawn), torch.randint(1, VOCAB, (B, N), generator=drawn)
    labels = target.clone()
    shifted = F.pad(target[:, :-1], (1, 0))
    if not masked:
        return tokens, shifted, labels, {}, {}
    labels[1, -2:] = -100
    real, of_decoder = torch.ones(B, S, dtype=torch.bool), torch.ones(B, N, dtype=torch.bool)
    real[0, 7:] = False
    of_decoder[1, -2:] = False
    mine = {"padding": real, "decoder_padding": of_decoder}
    return tokens, shifted, labels, mine, {"attention_mask": real.long(), "decoder_attention_mask": of_decoder.long()}


def of_theirs(peer, config, masked):
    tokens, shifted, labels, _, masks = batch(masked)
    peer.zero_grad()
    logits = peer(input_ids=tokens, decoder_input_ids=shifted, **masks).logits
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
    losses.mean().backward()
    gradients = {name: p.grad for name, p in peer.named_parameters()}
    return logits.detach(), losses.detach(), from_hugging_face(gradients, config)


@pytest.mark.parametrize("masked", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sequence_parallel": True, "recompute": "full"},
        pytest.param({"recompute": "selective"}, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sizes(1, 2, 4)
def test_logits_losses_and_gradients_are_those_of_transformers(group, transformers, kind, changes, masked):
    config, peer = ours(kind, **changes), theirs(kind, transformers)
    model = T5(config, group.comm, dtype=torch.float64)
    weights = from_hugging_face({name: p.detach() for name, p in peer.named_parameters()}, config)
    assert set(weights) == {name for name, _ in model.named_parameters()}
    group.load(model, weights)
    tokens, shifted, labels, masks, _ = batch(masked)
    logits = group.joined(model(tokens, shifted, **masks))[..., :VOCAB]
    losses = model(tokens, shifted, labels, **masks)
    losses.mean().backward()
    sum_partial_gradients(model, group.comm)
    expected = of_theirs(peer, config, masked)
    exact = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(logits, expected[0], **exact)
    torch.testing.assert_close(group.same(losses), expected[1], **exact)
    torch.testing.assert_close(group.gradients(model), expected[2], **exact)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_model_compute_what_the_whole_one_does(group, kind):
    """Three chunks on two stages: the gradients of the tables and of the encoder's output come back by the same way."""
    config = ours(kind, sequence_parallel=True)
    whole = T5(config, group.comm, dtype=torch.float64)
    weights = {name: one.detach() for name, one in group.fill(whole, scale=0.3).items()}
    cut = [range(1), range(1, 3), range(3, 4)]
    parts = [
        T5(config, group.comm, dtype=torch.float64, part=ModelPart(2 * LAYERS, chunks))
        for chunks in ((cut[0], cut[2]), (cut[1],))
    ]
    for part in parts:
        group.load(part, {name: weights[name] for name, _ in part.named_parameters()})
    tokens, shifted, labels, masks, _ = batch(True)
    losses = whole(tokens, shifted, labels, **masks)
    losses.mean().backward()
    x = None
    for part, chunk in ((0, 0), (1, 0), (0, 1)):
        x = parts[part](tokens, shifted, labels, **masks, at=StageInput(chunk, x))
        if (part, chunk) != (0, 1):
            assert x.shape == parts[part].activations(tokens, shifted).shape
    torch.testing.assert_close(x, losses, rtol=1e-12, atol=1e-12)
    x.mean().backward()
    found = {name: p.grad for part in parts for name, p in part.named_parameters()}
    assert set(found) == {name for name, _ in whole.named_parameters()}
    for name, p in whole.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_buckets_are_those_of_transformers(transformers, bidirectional):
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(-1000, 1001)
    for buckets, most in ((32, 128), (8, 10), (64, 1000)):
        theirs = T5Attention._relative_position_bucket(distance, bidirectional, buckets, most)
        assert torch.equal(relative_buckets(distance, buckets, most, bidirectional=bidirectional), theirs)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"add_bias_linear": True}, "add_bias_linear=True"),
        ({"position_embedding_type": "rope"}, "position_embedding_type='rope'"),
        ({"relative_attention_num_buckets": 7}, "must be even"),
        ({"relative_attention_max_distance": 4}, "above half of the 8 buckets"),
    ],
)
def test_shapes_that_no_t5_has(changes, words):
    with pytest.raises(ValueError, match=words):
        ours("1.0", **changes)


@pytest.mark.parametrize("kind", KINDS)
def test_generated_tokens_are_those_of_transformers(group, transformers, kind):
    config, peer = ours(kind), theirs(kind, transformers).eval()
    model = T5(config, group.comm, dtype=torch.float64)
    group.load(model, from_hugging_face({name: p.detach() for name, p in peer.named_parameters()}, config))
    prompts = [[3, 4, 5, 6, 7], [8], [9, 10, 11]]
    found = generate(model, prompts, 9)
    for prompt, new in zip(prompts, found, strict=True):
        expected = peer.generate(
            torch.tensor([prompt]), max_new_tokens=9, min_new_tokens=9, do_sample=False, num_beams=1, eos_token_id=None
        )  # fmt: skip
        assert new == expected[0, 1:].tolist()
    several = generate(model, prompts, 5, samples=2)
    assert several == [one[:5] for one in found for _ in range(2)]
    ends = generate(model, prompts, 9, stop_tokens=[found[0][2]])
    assert [one[: len(mine)] for one, mine in zip(found, ends, strict=True)] == ends and len(ends[0]) <= 3


@pytest.fixture(scope="module")
def in_trees(mpi_world):
    """All ranks, and this rank alone, with reductions in a tree."""
    from mpi4py import MPI

    with Communicator(mpi_world, order="tree") as together, Communicator(MPI.COMM_SELF, order="tree") as itself:
        yield together, itself


@pytest.mark.parametrize("changes", [{}, {"sequence_parallel": True, "recompute": "full", "attention_dropout": 0.1}])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.long)], ids=str)
def test_canonical_shards_have_the_same_bits_on_all_sizes(in_trees, kind, changes, dtype):
    config = ours(kind, num_attention_heads=4, make_vocab_size_divisible_by=32, **changes)
    tokens, shifted, labels, masks, _ = batch(True)
    found = []
    for comm in in_trees:
        model = T5(config, comm, dtype=dtype)
        initialize(model, 3)
        use_canonical_shards(model, comm, 4)
        for row in range(B):
            own = {name: mask[row : row + 1] for name, mask in masks.items()}
            at = {"randomness": Randomness(1, 0, (row,))} if changes else {}
            losses = model(*(one[row : row + 1] for one in (tokens, shifted, labels)), **own, **at)
            losses.sum().backward()
        found.append((losses.detach(), dict(model.named_parameters()), placements(model)))
    (mine, parts, placed), (right, wholes, _) = found
    assert torch.equal(mine, right)
    for name, parameter in parts.items():
        assert torch.equal(parameter.grad, placed[name].part(wholes[name].grad)), name
