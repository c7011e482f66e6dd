"""Tokens through a model in parts give what they give together, whatever the parts and the rows' lengths."""

import pytest
import torch

from tests.support.small_models import VOCAB, made
from tplayers import formulas

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]

TOKENS = torch.randint(VOCAB, (3, 8), generator=torch.Generator().manual_seed(5))


@pytest.fixture
def model(group):
    return made("gpt", group.comm, dtype=torch.float64).eval()


@pytest.mark.parametrize("parts", [(8,), (1,) * 8, (3, 5), (5, 1, 2), (2, 4, 1, 1)])
def test_parts_of_a_sequence_are_the_whole(model, close, parts):
    cache, found = model.new_cache(3, 8), []
    with torch.no_grad():
        for part in TOKENS.split(parts, dim=1):
            found.append(model(part, cache=cache))
            cache.advance([part.shape[1]] * 3)
        close(torch.cat(found, dim=1), model(TOKENS))


def test_rows_of_different_lengths_are_each_as_alone(model, close):
    """Shorter rows are filled up at the end with what does not matter; then one token, and then two, for each row."""
    cache, lengths = model.new_cache(3, 8), [4, 1, 2]
    with torch.no_grad():
        expected = model(TOKENS)
        first = model(TOKENS[:, :4], cache=cache)
        for row, length in enumerate(lengths):
            close(first[row, :length], expected[row, :length])
        cache.advance(lengths)
        for s in (1, 2, 1):
            at = torch.tensor(cache.lengths)[:, None] + torch.arange(s)
            close(model(TOKENS.gather(1, at), cache=cache), torch.stack([expected[row, at[row]] for row in range(3)]))
            cache.advance([s] * 3)


def test_rows_are_kept_repeated_and_forgotten(model, close):
    cache = model.new_cache(3, 8)
    with torch.no_grad():
        model(TOKENS[:, :4], cache=cache)
        cache.advance([4, 3, 2])
        cache.keep([2, 0, 2])
        assert cache.lengths == [2, 4, 2]
        expected = model(TOKENS)
        found = model(torch.stack([TOKENS[2, 2], TOKENS[0, 4], TOKENS[2, 2]])[:, None], cache=cache)
        close(found[:, 0], torch.stack([expected[2, 2], expected[0, 4], expected[2, 2]]))
        cache.clear()
        close(model(TOKENS, cache=cache), expected)


def test_a_rank_stores_its_own_heads(group, model):
    shape = formulas.TransformerShape(layers=3, hidden=16, heads=4, seq=8, vocab=16)
    assert model.new_cache(3, 8).nbytes == formulas.key_value_bytes(shape, 3, 8, group.size, element_bytes=8)


def test_what_does_not_fit_is_an_error(group, model):
    with pytest.raises(ValueError, match=r"a key-value cache keeps no gradients; call the model within torch.no_grad"):
        model(TOKENS, cache=model.new_cache(3, 8))
    cache = model.new_cache(3, 6)
    with pytest.raises(ValueError, match="room for 6 tokens in a row; 7 are too many"):
        model(TOKENS[:, :7], cache=cache)
    large = model.new_cache(3, 20)
    large.advance([3, 1, 2])
    with pytest.raises(ValueError, match="a sequence of 9 tokens exceeds max_position_embeddings=8"):
        model(TOKENS[:, :6], cache=large)
    with pytest.raises(ValueError, match="a key-value cache needs causal attention, evaluation mode and no padding"):
        made("gpt", group.comm, hidden_dropout=0.0).train()(TOKENS, cache=model.new_cache(3, 8))
    with pytest.raises(ValueError, match="a key-value cache needs causal attention, evaluation mode and no padding"):
        model.eval().hidden_states(TOKENS, padding=torch.tensor([1, 2, 3]), cache=model.new_cache(3, 8))
    bert = made("bert", group.comm).eval()
    with pytest.raises(ValueError, match="a key-value cache needs causal attention"):
        bert.hidden_states(TOKENS, cache=bert.new_cache(3, 8))
    split = made("gpt", group.comm, sequence_parallel=True).eval()
    with pytest.raises(ValueError, match="a key-value cache excludes sequence_parallel"):
        split.hidden_states(TOKENS, cache=split.new_cache(3, 8))
