"""The Llama family: against transformers' models with the same weights, and over a group against one rank."""

import re

import pytest
import torch
import torch.nn.functional as F

from tests.support.models.llama import CASES, HEADS, VOCAB, H, S, by_our_names, ours, theirs
from tests.support.small_models import VOCAB as SMALL
from tests.support.small_models import B, arguments, made
from tplayers import GPT, GPTConfig, generate, sum_partial_gradients

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2)]


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers", reason="the independent peer is transformers' Llama")


def tokens(rows=2, seed=3):
    return torch.randint(VOCAB, (rows, S + 1), generator=torch.Generator().manual_seed(seed))


def of_theirs(model, config, data):
    """Logits, losses and gradients, by our names."""
    logits = model(input_ids=data[:, :-1]).logits
    losses = F.cross_entropy(logits.transpose(1, 2), data[:, 1:], reduction="none")
    losses.mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return logits.detach(), losses.detach(), by_our_names(gradients, config)


def of_ours(model, group, data):
    logits = group.joined(model(data[:, :-1]))[..., :VOCAB]
    losses = model(data[:, :-1], data[:, 1:])
    losses.mean().backward()
    sum_partial_gradients(model, group.comm)
    return logits, group.same(losses), group.gradients(model)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_logits_losses_and_gradients_are_those_of_transformers(group, transformers, case, sequence_parallel):
    config = ours(case, sequence_parallel=sequence_parallel)
    peer, model = theirs(case, transformers, exact=True), GPT(config, group.comm, dtype=torch.float64)
    weights = by_our_names({name: p.detach() for name, p in peer.named_parameters()}, config)
    assert set(weights) == {name for name, _ in model.named_parameters()}
    group.load(model, weights)
    expected, found = of_theirs(peer, config, tokens()), of_ours(model, group, tokens())
    torch.testing.assert_close(found[0], expected[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found[2], expected[2], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", CASES)
def test_as_they_are_in_float32(group, transformers, case):
    config = ours(case)
    peer, model = theirs(case, transformers, exact=False), GPT(config, group.comm)
    group.load(model, by_our_names({name: p.detach() for name, p in peer.named_parameters()}, config))
    expected, found = of_theirs(peer, config, tokens()), of_ours(model, group, tokens())
    pairs = {"logits": (found[0], expected[0]), "losses": (found[1], expected[1])}
    pairs |= {name: (found[2][name], gradient) for name, gradient in expected[2].items()}
    for name, (mine, other) in pairs.items():
        assert (mine - other).abs().max() <= 1e-5 * other.abs().max(), name


@pytest.mark.parametrize("case", ["2 of 8, tied", "1 of 8, large heads"])
def test_generated_tokens_are_those_of_transformers_and_of_whole_passes(group, transformers, case):
    config = ours(case)
    peer, model = theirs(case, transformers, exact=True), GPT(config, group.comm, dtype=torch.float64)
    group.load(model, by_our_names({name: p.detach() for name, p in peer.named_parameters()}, config))
    prompts = [[1, 2, 3, 4], [5], [6, 7]]  # rows at different positions
    found = generate(model, prompts, 6)
    for prompt, new in zip(prompts, found, strict=True):
        whole = list(prompt)
        for token in new:
            logits = group.joined(model(torch.tensor([whole])))[0, -1, :VOCAB]
            assert int(logits.argmax()) == token
            whole.append(token)
        peer.eval()
        theirs_new = peer.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)
        assert theirs_new[0, len(prompt) :].tolist() == new


@pytest.mark.every_size
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_and_every_layout_agree(group, alone, close, sequence_parallel):
    split = made("llama", group.comm, dtype=torch.float64, sequence_parallel=sequence_parallel)
    whole = made("llama", alone.comm, dtype=torch.float64)
    (inputs, _) = arguments("llama")
    losses = [model(*inputs) for model in (split, whole)]
    for one in losses:
        one.sum().backward()
    sum_partial_gradients(split, group.comm)
    close(group.same(losses[0]), losses[1].detach())
    close(group.gradients(split), alone.gradients(whole))


def test_no_parameter_is_left_that_the_family_does_not_have(group):
    names = {re.sub(r"^layers\.\d+\.", "", name) for name, _ in made("llama", group.comm).named_parameters()}
    assert names == {
        "embedding.weight", "output.weight", "final_norm.weight", "attention_norm.weight", "mlp_norm.weight",
        "attention.query.weight", "attention.query.bias", "attention.key_value.weight", "attention.key_value.bias",
        "attention.projection.weight", "mlp.gate_up.weight", "mlp.down.weight",
    }  # fmt: skip


def test_untied_output_has_a_gradient_of_its_own(group):
    """No gradient reaches the embedding of tokens that are not read, and the padded rows of the output have none."""
    model = made("llama", group.comm, dtype=torch.float64)
    (inputs, _) = arguments("llama")
    model(torch.zeros(B, S, dtype=torch.int64), inputs[1], inputs[2]).sum().backward()
    found = group.gradients(model)
    assert (found["embedding.weight"][1:] == 0).all() and (found["embedding.weight"][0] != 0).any()
    assert (found["output.weight"][:SMALL] != 0).any(dim=1).all() and (found["output.weight"][SMALL:] == 0).all()


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"normalization": "BatchNorm"}, "normalization='BatchNorm' must be one of LayerNorm, RMSNorm"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type='alibi' must be one of learned_absolute, rope"),
        ({"num_query_groups": 3}, r"num_query_groups=3 does not divide num_attention_heads=8; \[1, 2, 4, 8\] do"),
        ({"num_query_groups": 0}, "num_query_groups=0 does not divide num_attention_heads=8"),
        ({"kv_channels": 5, "position_embedding_type": "rope"}, "heads of an even size; kv_channels=5 is odd"),
    ],
)
def test_what_no_model_is_made_of(alone, fields, words):
    with pytest.raises(ValueError, match=words):
        GPT(GPTConfig(1, H, HEADS, VOCAB, S, **fields), alone.comm)


def test_an_odd_size_of_heads_names_the_settings_that_it_follows_from():
    with pytest.raises(ValueError, match="even size; hidden_size=20 / num_attention_heads=4 = 5 is odd"):
        GPTConfig(1, 20, 4, VOCAB, S, position_embedding_type="rope").require_parallel(1)
