"""The split GPT against the whole one (which test_gpt_peer.py holds against transformers')."""

import pytest
import torch

import tplayers
from tplayers import GPT, GPTConfig, Randomness

VOCAB, S, B = 13, 6, 3
CONFIG = {
    "num_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "vocab_size": VOCAB, "max_position_embeddings": 8,
    "make_vocab_size_divisible_by": 16,
}  # fmt: skip

MODEL = GPT  # of the fixture `pair`


def config(**changes):
    return GPTConfig(**{**CONFIG, "hidden_dropout": 0.0, "attention_dropout": 0.0, **changes})


def batch(vocab=VOCAB, seed=0):
    tokens = torch.randint(vocab, (B, S + 1), generator=torch.Generator().manual_seed(seed))
    labels = tokens[:, 1:].clone()
    labels[1, 2:4] = -100
    return tokens[:, :-1], labels


def step(model, randomness=None):
    tokens, labels = batch()
    model.zero_grad()
    losses = model(tokens, labels, randomness)
    losses.sum().backward()
    return losses.detach()


@pytest.mark.mpi
@pytest.mark.every_size
def test_losses_logits_and_gradients_at_every_tp_size(group, alone, pair, close):
    split, whole = pair(config())
    losses = step(split)
    assert losses.shape == (B, S)
    close(group.same(losses), step(whole))
    close(group.gradients(split), alone.gradients(whole))
    tokens, labels = batch()
    logits = group.joined(split(tokens))
    assert logits.shape == (B, S, 16)
    close(logits, whole(tokens).detach())
    real = logits[..., :VOCAB].reshape(B * S, VOCAB)
    flat = torch.nn.functional.cross_entropy(real, labels.reshape(-1), reduction="none")
    close(losses, flat.view(B, S))
    assert (losses[labels == -100] == 0).all()


@pytest.mark.mpi
@pytest.mark.sizes(1, 2)
def test_loss_from_the_returned_logits(group, pair, close):
    """The logits come back as a transposed view; the loss takes them as they are."""
    split, _ = pair(config())
    tokens, labels = batch()
    logits = split(tokens)
    losses = tplayers.vocab_parallel_cross_entropy(logits, labels, group.comm, vocab_size=VOCAB)
    close(losses, split(tokens, labels))


@pytest.mark.mpi
@pytest.mark.every_size
def test_dropout_is_the_same_at_every_tp_size(group, alone, pair, close):
    split, whole = pair(config(hidden_dropout=0.1, attention_dropout=0.1))
    randomness = Randomness(5, 17, (40, 41, 2))
    losses = step(split, randomness)
    close(group.same(losses), step(whole, randomness))
    close(group.gradients(split), alone.gradients(whole))
    for other in (Randomness(6, 17, (40, 41, 2)), Randomness(5, 18, (40, 41, 2)), Randomness(5, 17, (40, 41, 3))):
        assert not torch.allclose(step(split, other), losses)


@pytest.mark.mpi
@pytest.mark.sizes(1, 2)
def test_dropout_does_not_depend_on_how_samples_are_batched(pair, close):
    """Data-parallel ranks, microbatches and the whole batch draw one mask for a sample."""
    split, _ = pair(config(hidden_dropout=0.2, attention_dropout=0.2))
    tokens, labels = batch()
    together = split(tokens, labels, Randomness(5, 1, (8, 9, 10)))
    apart = [split(tokens[i : i + 1], labels[i : i + 1], Randomness(5, 1, (8 + i,))) for i in range(B)]
    close(together, torch.cat(apart))


@pytest.mark.mpi
@pytest.mark.sizes(1, 2)
def test_evaluation_has_no_dropout_and_needs_no_randomness(pair):
    split, whole = pair(config(hidden_dropout=0.5, attention_dropout=0.5))
    plain, _ = pair(config())
    tokens, labels = batch()
    split.eval()
    assert torch.equal(split(tokens, labels), plain(tokens, labels))
    whole.eval()
    assert torch.equal(whole(tokens, labels, Randomness(1, 1, (0, 1, 2))), whole(tokens, labels))


@pytest.mark.mpi
@pytest.mark.every_size
def test_padding_rows_never_matter(group, pair, close):
    """Whatever the padded rows of the embedding hold, the losses are the same, and no gradient reaches them."""
    split, _ = pair(config())
    losses = step(split)
    table = split.embedding.weight
    rows = torch.arange(16).chunk(group.size)[group.rank]
    before = group.gradients(split)
    for huge in (1e4, -1e200):
        with torch.no_grad():
            table[rows >= VOCAB] = huge
        assert torch.equal(step(split), losses)
        gradient = group.gradients(split.embedding)["weight"]
        assert torch.equal(gradient[:VOCAB], before["embedding.weight"][:VOCAB])
        assert torch.equal(gradient[VOCAB:], torch.zeros(16 - VOCAB, 8).double())


@pytest.mark.mpi
@pytest.mark.sizes(1, 2)
def test_tied_embedding_gets_both_gradients(group, pair):
    """Tokens that are never read still learn through the output layer, and so do those that are only read."""
    split, _ = pair(config())
    tokens, labels = torch.zeros(1, 4, dtype=torch.int64), torch.full((1, 4), 12)
    split(tokens, labels).sum().backward()
    both = group.gradients(split)["embedding.weight"]
    assert (both[:VOCAB].abs().sum(1) > 0).all()

    split.zero_grad()
    reading = split.hidden_states(tokens)
    reading.square().sum().backward()
    assert (group.gradients(split.embedding)["weight"][1:] == 0).all()


@pytest.mark.mpi
@pytest.mark.sizes(1, 2)
def test_future_tokens_do_not_matter(pair):
    split, _ = pair(config())
    tokens, labels = batch()
    changed = tokens.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % VOCAB
    assert torch.equal(split(tokens, labels)[:, :4], split(changed, labels)[:, :4])


@pytest.mark.mpi
@pytest.mark.sizes(1, 2)
def test_wrong_input_is_refused(pair):
    split, _ = pair(config())
    with pytest.raises(ValueError, match="9 tokens exceeds max_position_embeddings=8"):
        split(torch.zeros(1, 9, dtype=torch.int64))
    with pytest.raises(ValueError, match="outside 0 to 15"):
        split(torch.full((1, 2), 16))
    with pytest.raises(ValueError, match="outside 0 to 12"):
        split(torch.zeros(1, 2, dtype=torch.int64), torch.full((1, 2), 13))


@pytest.mark.mpi
@pytest.mark.sizes(1, 2)
@pytest.mark.parametrize("hidden, attention, site", [(0.1, 0.0, "embedding"), (0.0, 0.1, r"layers\.0\.attention")])
def test_training_with_dropout_needs_randomness(pair, hidden, attention, site):
    split, _ = pair(config(hidden_dropout=hidden, attention_dropout=attention))
    tokens, labels = batch()
    with pytest.raises(ValueError, match=rf"dropout at {site}: .* needs randomness=tplayers\.Randomness"):
        split(tokens, labels)


@pytest.mark.mpi
@pytest.mark.sizes(1, 2)
def test_samples_must_be_as_many_as_the_batch_holds(pair):
    """One key would broadcast: every sample would silently get the same mask."""
    split, _ = pair(config(hidden_dropout=0.1))
    tokens, labels = batch()
    for samples in ((0,), (0, 1), (0, 1, 2, 3)):
        with pytest.raises(ValueError, match="dropout keys do not fit"):
            split(tokens, labels, Randomness(0, 0, samples))
    with pytest.raises(ValueError, match="dropout keys do not fit"):
        split(tokens[:1], labels[:1], Randomness(0, 0, (0, 1)))


def test_every_dropout_has_a_mask_of_its_own(ranks_of, monkeypatch):
    """Two sites of one name would drop the same positions in both."""
    sites = []
    keys = Randomness.keys
    monkeypatch.setattr(Randomness, "keys", lambda self, site, *heads: sites.append(site) or keys(self, site, *heads))
    model = GPT(config(num_layers=3, hidden_dropout=0.1, attention_dropout=0.1), *ranks_of(1))
    model(batch()[0], None, Randomness(0, 0, tuple(range(B))))
    assert len(sites) == 1 + 3 * 3
    assert len(set(sites)) == len(sites)


def test_padded_vocabulary_does_not_depend_on_tp():
    assert GPTConfig(1, 8, 4, 50257, 8).padded_vocab_size == 51200  # the paper's: a multiple of 128 * 8
    assert [config(vocab_size=v).padded_vocab_size for v in (1, 15, 16, 17)] == [16, 16, 16, 32]
