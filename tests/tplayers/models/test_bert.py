"""BERT's own rules: padding, labels that do not count, dropout by position, shapes. Values: test_bert_peer.py."""

import pytest
import torch
import torch.nn.functional as F

from tplayers import BERT, BERTConfig, Randomness, initialize, placements, sum_partial_gradients

VOCAB, S, B, H = 13, 8, 3, 8
LENGTHS = torch.tensor([8, 3, 5])

MODEL = BERT  # of the fixture `pair`


def config(**changes):
    base = {
        "num_layers": 2, "hidden_size": H, "num_attention_heads": 4, "vocab_size": VOCAB, "max_position_embeddings": 8,
        "make_vocab_size_divisible_by": 16, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    }  # fmt: skip
    return BERTConfig(**{**base, **changes})


def batch(rows=slice(None), seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(VOCAB, (B, S), generator=generator) for _ in range(2))
    types = torch.randint(2, (B, S), generator=generator)
    labels[torch.rand(B, S, generator=generator) < 0.5] = -100
    labels[torch.arange(S) >= LENGTHS[:, None]] = -100
    named = {"labels": labels[rows], "order_labels": torch.tensor([1, -100, 0])[rows]}
    return (tokens[rows], types[rows], LENGTHS[rows]), named


def step(model, randomness=None, **changes):
    inputs, named = batch()
    model.zero_grad()
    losses, orders = model(*inputs, randomness=randomness, **{**named, **changes})
    (losses.sum() + orders.sum()).backward()
    sum_partial_gradients(model, model.comm)
    return losses.detach(), orders.detach()


@pytest.mark.mpi
@pytest.mark.every_size
@pytest.mark.parametrize("placement", ["pre", "post"])
def test_dropout_is_the_same_at_every_tp_size(group, alone, pair, close, placement):
    shape = config(hidden_dropout=0.1, attention_dropout=0.1, norm_placement=placement)
    split, whole = pair(shape)
    randomness = Randomness(5, 17, (40, 41, 2))
    found, expected = step(split, randomness), step(whole, randomness)
    close(group.same(found[0]), expected[0])
    close(group.same(found[1]), expected[1])
    close(group.gradients(split), alone.gradients(whole))
    for other in (Randomness(6, 17, (40, 41, 2)), Randomness(5, 18, (40, 41, 2)), Randomness(5, 17, (40, 41, 3))):
        assert not torch.allclose(step(split, other)[0], found[0])


@pytest.mark.mpi
@pytest.mark.sizes(1, 2)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_neither_batching_nor_padding_changes_a_sample(pair, close, dropout):
    """Alone and cut to its length, a sample has the losses that it has among others; whatever its padding holds."""
    split, _ = pair(config(hidden_dropout=dropout, attention_dropout=dropout))
    (tokens, types, lengths), named = batch()
    changed = tokens.clone()
    changed[torch.arange(S) >= LENGTHS[:, None]] = 7
    together = split(tokens, types, lengths, randomness=Randomness(5, 1, (8, 9, 10)), **named)
    for i in range(B):
        n, one = int(lengths[i]), slice(i, i + 1)
        mine = {"labels": named["labels"][one, :n], "order_labels": named["order_labels"][one]}
        randomness = Randomness(5, 1, (8 + i,))
        if dropout == 0:  # the numbers of a mask follow from the length of its rows
            losses, orders = split(tokens[one, :n], types[one, :n], None, randomness=randomness, **mine)
            close(losses[0], together[0][i, :n])
            close(orders, together[1][one])
        alone = split(changed[one], types[one], lengths[one], randomness=randomness,
                      labels=named["labels"][one], order_labels=named["order_labels"][one])  # fmt: skip
        close(alone[0], together[0][one])
        close(alone[1], together[1][one])


@pytest.mark.mpi
@pytest.mark.sizes(1, 2)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_every_parameter_gets_a_gradient_when_nothing_counts(group, pair, dropout, sequence_parallel):
    """A sample without a real token and without labels too: zeros, and nothing that is not finite."""
    shape = config(hidden_dropout=dropout, attention_dropout=dropout, sequence_parallel=sequence_parallel)
    split, _ = pair(shape)
    randomness = Randomness(5, 1, (8, 9, 10))
    nothing = torch.full((B, S), -100)
    positions = torch.zeros(B, 2, dtype=torch.int64)
    for changes in (
        {"labels": nothing, "order_labels": torch.full((B,), -100)},
        {"labels": nothing, "order_labels": None},
        {"labels": nothing[:, :2], "order_labels": None, "positions": positions},
    ):
        (tokens, types, _), _ = batch()
        split.zero_grad()
        losses, orders = split(tokens, types, torch.tensor([0, 3, 0]), randomness=randomness, **changes)
        assert (losses == 0).all() and (orders == 0).all()
        (losses.sum() + orders.sum()).backward()
        for name, parameter in split.named_parameters():
            assert parameter.grad is not None and (parameter.grad == 0).all(), name


@pytest.mark.mpi
@pytest.mark.sizes(1, 2)
def test_padding_rows_of_the_vocabulary_never_matter(group, pair):
    """Whatever the padded rows of table and bias hold, the losses are the same, and no gradient reaches them."""
    split, _ = pair(config())
    losses = step(split)
    before = group.gradients(split)
    padded = torch.arange(16).chunk(group.size)[group.rank] >= VOCAB
    for huge in (1e4, -1e200):
        with torch.no_grad():
            split.embedding.weight[padded] = huge
            split.mlm_head.bias[padded] = huge
        found = step(split)
        assert torch.equal(found[0], losses[0]) and torch.equal(found[1], losses[1])
        gradients = group.gradients(split)
        for name in ("embedding.weight", "mlm_head.bias"):
            assert torch.equal(gradients[name][:VOCAB], before[name][:VOCAB])
            assert (gradients[name][VOCAB:] == 0).all()


@pytest.mark.mpi
@pytest.mark.sizes(1, 2)
def test_evaluation_has_no_dropout_and_later_tokens_matter(pair):
    split, _ = pair(config(hidden_dropout=0.5, attention_dropout=0.5))
    plain, _ = pair(config())
    inputs, named = batch()
    split.eval()
    assert torch.equal(split(*inputs, **named)[0], plain(*inputs, **named)[0])
    changed = inputs[0].clone()
    changed[0, 5] = (changed[0, 5] + 1) % VOCAB
    logits, other = (plain(tokens, *inputs[1:])[0] for tokens in (inputs[0], changed))
    assert not torch.allclose(logits[0, 0], other[0, 0])
    assert torch.equal(logits[1:], other[1:])


@pytest.mark.mpi
@pytest.mark.sizes(1, 2)
def test_without_binary_head_and_token_types(group, pair, close):
    split, whole = pair(config(binary_head=False, num_tokentypes=0))
    names = {name.split(".")[0] for name, _ in split.named_parameters()}
    assert names == {"embedding", "position_embedding", "layers", "final_norm", "mlm_head"}
    (tokens, _, lengths), named = batch()
    logits, order = split(tokens, None, lengths)
    assert order is None
    close(group.joined(logits), whole(tokens, None, lengths)[0].detach())
    losses, orders = split(tokens, None, lengths, labels=named["labels"])
    assert orders is None and losses.shape == (B, S)
    with pytest.raises(ValueError, match="order_labels need labels, and a model with binary_head=True"):
        split(tokens, None, lengths, **named)
    with pytest.raises(ValueError, match="token_types need a model with num_tokentypes"):
        split(*batch()[0])


@pytest.mark.mpi
@pytest.mark.sizes(1, 2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("dtype, error", [(torch.bfloat16, 0.03), (torch.float16, 0.004)])
def test_half_precision(group, dtype, error, sequence_parallel):
    """Losses in float32 and gradients near those of the same weights in float64, of 4096 tokens: two rows of types."""
    shape = config(max_position_embeddings=16, hidden_size=16, sequence_parallel=sequence_parallel)
    generator = torch.Generator().manual_seed(0)
    tokens, labels = (torch.randint(VOCAB, (256, 16), generator=generator) for _ in range(2))
    types, lengths = torch.randint(2, (256, 16), generator=generator), torch.randint(1, 17, (256,), generator=generator)
    results = []
    half = BERT(shape, group.comm, dtype=dtype)
    initialize(half, 1)
    wide = BERT(shape, group.comm, dtype=torch.float64)
    wide.load_state_dict(half.state_dict())
    for model in (half, wide):
        losses, orders = model(tokens, types, lengths, labels=labels, order_labels=labels[:, 0] % 2)
        assert losses.dtype == orders.dtype == (torch.float64 if model is wide else torch.float32)
        (losses.mean() + orders.mean()).mul(256).backward()
        sum_partial_gradients(model, group.comm)
        results.append([losses.detach().double(), orders.detach().double(), *(p.grad for p in model.parameters())])
        assert all(p.grad.dtype == p.dtype for p in model.parameters())
    names = ["losses", "orders", *(name for name, _ in wide.named_parameters())]
    for name, found, expected in zip(names, *results, strict=True):
        assert (found.double() - expected).norm() <= error * expected.norm(), name


def test_every_dropout_has_a_mask_of_its_own(ranks_of, monkeypatch):
    """Two sites of one name would drop the same positions in both."""
    sites = []
    keys = Randomness.keys
    monkeypatch.setattr(Randomness, "keys", lambda self, site, *heads: sites.append(site) or keys(self, site, *heads))
    model = BERT(config(num_layers=3, hidden_dropout=0.1, attention_dropout=0.1), *ranks_of(1))
    model(*batch()[0], randomness=Randomness(0, 0, tuple(range(B))))
    assert len(sites) == 1 + 3 * 3
    assert len(set(sites)) == len(sites)


def test_initial_values(ranks_of):
    """Weights N(0, 0.02), smaller where a branch ends; norms 1 and 0; biases 0: the paper, section 3."""
    model = BERT(config(hidden_size=64, norm_placement="post"), *ranks_of(1))
    initialize(model, 1)
    for name, value in model.named_parameters():
        if name.endswith("norm.weight"):
            assert (value == 1).all()
        elif name.endswith("bias"):
            assert (value == 0).all()
        else:
            end = name.endswith(("projection.weight", "down.weight"))
            assert value.std().item() == pytest.approx(0.01 if end else 0.02, rel=0.25), name
            assert placements(model)[name].init.std == pytest.approx(0.01 if end else 0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": torch.full((B, S), 16)}, "a token lies outside 0 to 15"),
        ({"tokens": torch.zeros(1, 9, dtype=torch.int64)}, "9 tokens exceeds max_position_embeddings=8"),
        ({"token_types": torch.full((B, S), 2)}, "a token type lies outside 0 to 1"),
        ({"token_types": torch.zeros(B, S - 1, dtype=torch.int64)}, r"token_types \[3, 7\] must be \[3, 8\]"),
        ({"padding": torch.tensor([8, 9, 1])}, "number of real tokens lies outside 0 to 8"),
        ({"padding": torch.zeros(B, S)}, r"padding torch.float32 \[3, 8\] must be int64 \[3\], .* or bool \[3, 8\]"),
        ({"padding": torch.zeros(2, dtype=torch.int64)}, r"padding torch.int64 \[2\] must be int64 \[3\]"),
        ({"labels": torch.full((B, S), 13)}, "a target lies outside 0 to 12"),
        ({"labels": torch.zeros(B, 4, dtype=torch.int64)}, r"labels \[3, 4\] must be \[3, 8\]"),
        ({"order_labels": torch.tensor([0, 1, 2])}, "a label of sentence order lies outside 0 to 1"),
        ({"order_labels": torch.tensor([0, 1])}, r"order_labels \[2\] must be \[3\]"),
        ({"labels": None}, "order_labels need labels"),
        ({"positions": torch.zeros(B, 2, dtype=torch.int64)}, r"labels \[3, 8\] must be \[3, 2\]"),
        ({"positions": torch.full((B, S), 8)}, "a position lies outside 0 to 7"),
        ({"positions": torch.zeros(S, dtype=torch.int64)}, r"positions \[8\] must be \[3, K\]"),
    ],
)
def test_wrong_input_is_refused(ranks_of, changes, message):
    model = BERT(config(), *ranks_of(1))
    inputs, named = batch()
    tokens, types, lengths = (
        changes.pop(name, given) for name, given in zip(("tokens", "token_types", "padding"), inputs, strict=True)
    )
    if tokens.shape != (B, S):
        types, lengths, named = None, None, {}
    with pytest.raises(ValueError, match=message):
        model(tokens, types, lengths, **{**named, **changes})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gelu": "relu"}, "gelu='relu' must be one of erf, tanh"),
        ({"head_gelu": "relu"}, "gelu='relu' must be one of erf, tanh"),
        ({"norm_placement": "sandwich"}, "norm_placement='sandwich' must be one of pre, post"),
        ({"num_attention_heads": 3}, "hidden_size=8 is not a multiple of num_attention_heads=3"),
    ],
)
def test_unknown_options_are_refused(ranks_of, change, message):
    with pytest.raises(ValueError, match=message):
        BERT(config(**change), *ranks_of(1))


def test_the_head_may_have_another_form_of_gelu(ranks_of):
    for layers, head in (("tanh", "erf"), ("erf", "tanh"), ("erf", None)):
        model = BERT(config(gelu=layers, head_gelu=head), *ranks_of(1), dtype=torch.float64)
        initialize(model, 1)
        x = torch.linspace(-2, 2, 3 * 8, dtype=torch.float64).view(3, 1, 8)
        dense, norm = model.mlm_head.dense, model.mlm_head.norm
        form = "tanh" if (head or layers) == "tanh" else "none"
        active = F.gelu(F.linear(x, dense.weight, dense.bias), approximate=form)
        assert torch.equal(model.mlm_head(x), F.layer_norm(active, (8,), norm.weight, norm.bias, norm.eps))
        assert model.layers[0].mlp.gelu == layers


def test_counts_of_the_papers_models():
    """Table 4's models, V = 30,522 without padding, with all heads: the counts of Hugging Face's MegatronBert."""
    from types import SimpleNamespace

    for layers, hidden, heads, expected in (
        (24, 1024, 16, 336_226_108), (24, 2048, 32, 1_280_595_772), (48, 2560, 40, 3_869_081_404),
    ):  # fmt: skip
        shape = BERTConfig(layers, hidden, heads, 30522, 512, make_vocab_size_divisible_by=1)
        with torch.device("meta"):
            model = BERT(shape, SimpleNamespace(rank=0, size=1))
        assert sum(p.numel() for p in model.parameters()) == expected


def test_what_only_a_gpt_may_have():
    with pytest.raises(ValueError, match="normalization='RMSNorm': a BERT has 'LayerNorm'; only a GPT may differ"):
        config(normalization="RMSNorm")
    with pytest.raises(ValueError, match="untie_embeddings_and_output_weights=True: a BERT has False"):
        config(untie_embeddings_and_output_weights=True)
