"""Log-likelihoods and predicted tokens are those of transformers in float64, at every number of ranks."""

import math

import numpy as np
import pytest
import torch

from commengine import ProcessGrid
from tests.support.weights.hugging_face import to_hugging_face
from tplayers import GPT, GPTConfig, initialize
from tplayers.placement import placements
from trainers.scoring import lambada, scorer, texts
from trainers.scoring.passages import Passage, Windows
from trainers.scoring.scorer import score

pytestmark = pytest.mark.mpi

VOCAB, LENGTH = 53, 16
CONFIG = GPTConfig(2, 48, 12, VOCAB, LENGTH, init_method_std=0.3, make_vocab_size_divisible_by=12)  # 60 columns
TEXTS = {count: np.random.default_rng(count).integers(0, VOCAB, count) for count in (10, 16, 17, 101)}


def gpt(comm, config=CONFIG, seed=5):
    model = GPT(config, comm, dtype=torch.float64)
    initialize(model, seed)
    return model.eval()


@pytest.fixture(scope="module")
def theirs(mpi_world):
    """On rank 0, the same weights in transformers' model: an independent truth."""
    if mpi_world.rank:
        return None
    from mpi4py import MPI
    from transformers import GPT2Config, GPT2LMHeadModel

    from commengine import Communicator

    with Communicator(MPI.COMM_SELF, name="alone") as alone:
        ours = gpt(alone)
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=VOCAB, n_positions=LENGTH, n_embd=48, n_layer=2, n_head=12, layer_norm_epsilon=1e-5)
        )
        tensors = to_hugging_face({name: p.detach() for name, p in ours.named_parameters()}, CONFIG)
        assert not model.double().load_state_dict(tensors, strict=False).unexpected_keys
    return model.double().eval()


@pytest.fixture
def grids(world):
    """Grids of this rank by (tensor, data): all ranks as each, and 3 of 4 ranks, of which the fourth has none."""
    made = {}
    for tensor in (n for n in range(1, world.size + 1) if world.size % n == 0):
        made[tensor, world.size // tensor] = ProcessGrid(world, tensor=tensor)
    part = world.split(int(world.rank < 3), world.rank, name="three") if world.size == 4 else None
    if part is not None and world.rank < 3:
        made[1, 3], made[3, 1] = ProcessGrid(part), ProcessGrid(part, tensor=3)
    yield made
    for grid in made.values():
        grid.close()
    if part is not None:
        part.close()


def brute_force(theirs, tokens, stride):
    """The summed negative log-likelihood: each target by the first window that reaches it."""
    total, windows = 0.0, {}
    for target in range(1, len(tokens)):
        k = max(-(-(target - LENGTH) // stride), 0)
        if k not in windows:
            with torch.no_grad():
                window = torch.from_numpy(tokens[k * stride : k * stride + LENGTH])
                windows[k] = theirs(window[None]).logits[0].log_softmax(-1)
        total -= float(windows[k][target - 1 - k * stride, tokens[target]])
    return total


@pytest.mark.slow
@pytest.mark.sizes(1, 2)
def test_the_log_likelihood_is_that_of_brute_force_over_transformers(world, theirs, grids):
    cases = [(count, stride) for count in TEXTS for stride in (1, 4, 16)]
    truth = [brute_force(theirs, TEXTS[count], stride) for count, stride in cases] if theirs is not None else None
    for (count, stride), expected in zip(cases, world.mpi.bcast(truth), strict=True):
        tokens = TEXTS[count]
        windows = Windows([tokens], LENGTH, stride)
        assert not len(windows) or list(windows[-1].tokens) == list(windows[len(windows) - 1].tokens)
        for grid in grids.values():
            scores = score(gpt(grid.tensor), windows, grid.data, batch=3)
            assert math.fsum(scores.nll.tolist()) == pytest.approx(expected, rel=1e-9)
            assert scores.position_targets.sum() == count - 1 == windows.targets
            assert math.isclose(scores.position_nll.sum(), expected, rel_tol=1e-9)
            assert scores.predicted is None


@pytest.mark.every_size
def test_the_bits_are_the_same_at_every_number_of_replicas(world, grids):
    """Also with more replicas than batches, and in float32, where the order of sums would show."""
    config = GPTConfig(2, 48, 12, VOCAB, LENGTH, init_method_std=0.3, make_vocab_size_divisible_by=12)
    for text in (TEXTS[101], TEXTS[10]):
        windows = Windows([text, text[:7]], LENGTH, 4)
        found = []
        for (tensor, _), grid in grids.items():
            if tensor == 1:
                model = gpt(grid.tensor, config).float()
                found.append(score(model, windows, grid.data, batch=4, predict=True))
        for one in found[1:]:
            assert torch.equal(one.nll, found[0].nll) and torch.equal(one.predicted, found[0].predicted)
        every = world.mpi.allgather(found[0].nll.tolist())
        assert every == every[:1] * world.size


def test_a_model_without_an_opinion_has_the_perplexity_of_its_vocabulary(grids):
    """V^(targets / T_o): padding columns count for nothing, and sums have no error of the model's dtype."""
    tokens, text_words = TEXTS[101], 37
    for grid in grids.values():
        model = gpt(grid.tensor)
        with torch.no_grad():
            model.embedding.weight.zero_()
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            scores = score(model.to(dtype), Windows([tokens], LENGTH, 4), grid.data, batch=8)
            found = texts.perplexity(math.fsum(scores.nll.tolist()), text_words)
            assert found == pytest.approx(VOCAB ** (100 / text_words), rel=1e-9)


def last_words(theirs):
    """(Rows of context, word and text; transformers' greedy tokens at each word): half the words are its own."""
    generator = np.random.default_rng(0)
    rows, expected = [], []
    for number in range(200):
        context = generator.integers(0, VOCAB, generator.integers(1, 30))
        size = int(generator.integers(1, 5))
        word = generator.integers(0, VOCAB, size)
        read = [*context[-(LENGTH + 1 - size) :]]
        for place in range(size if number % 2 else 0):
            with torch.no_grad():
                word[place] = int(theirs(torch.tensor([[*read, *word[:place]]])).logits[0, -1].argmax())
        with torch.no_grad():
            logits = theirs(torch.tensor([[*read, *word[:-1]]])).logits[0, -size:]
        expected.append(logits.argmax(-1).tolist())
        rows.append((context.astype(np.int32), word.astype(np.int32), np.concatenate([context, word]).astype(np.int32)))
    return rows, expected


@pytest.mark.slow
def test_the_predicted_tokens_are_transformers_greedy_ones_row_by_row(world, theirs, grids):
    """200 last words of 1 to 4 tokens, half of them the model's own continuation; contexts of any length."""
    rows, expected = world.mpi.bcast(None if theirs is None else last_words(theirs))
    examples = lambada.examples(rows, LENGTH)
    passages, numbers = lambada.distinct(examples)
    assert len(passages) == 200 and sum(example.cut for example in examples) > 50
    for grid in grids.values():
        scores = score(gpt(grid.tensor), passages, grid.data, batch=7, predict=True)
        found = [scores.predicted_of(strict) for strict, _ in numbers]
        assert found == expected
        right = [one == word.tolist() for one, (_, word, _) in zip(found, rows, strict=True)]
        assert all(right[1::2]) and sum(right) in range(100, 110)


def test_logits_are_computed_in_parts(grids, monkeypatch):
    """As for a large vocabulary: the same losses and tokens, in parts of one target and of several."""
    passages = [Passage(TEXTS[17], 5), Passage(TEXTS[10], 9), Passage(TEXTS[16], 1)]
    for grid in grids.values():
        model = gpt(grid.tensor)
        whole = score(model, passages, grid.data, batch=2, predict=True)
        for logits in ((1, 1), (200, 200), (400, 90)):  # of the product, and in float64
            monkeypatch.setattr(scorer, "_ON_HOST", logits)
            parts = score(model, passages, grid.data, batch=2, predict=True)
            torch.testing.assert_close(parts.nll, whole.nll, rtol=1e-12, atol=0)
            assert torch.equal(parts.predicted, whole.predicted)
        monkeypatch.undo()
    assert whole.ends.tolist() == [5, 14, 15] and placements(model)


def test_progress_reaches_the_number_of_passages(grids):
    windows = Windows([TEXTS[101]], LENGTH, 4)
    for grid in grids.values():
        said = []
        score(gpt(grid.tensor), windows, grid.data, batch=2, progress=said.append)
        assert said == sorted(said) and (said[-1] == len(windows) or grid.data.rank)
        assert not len(Windows([], LENGTH, 4)) and score(gpt(grid.tensor), [], grid.data, batch=2).nll.tolist() == []
