"""The corpus of a blend: one tokenizer, different data, held-out parts by weight, the unigram loss of the mixture."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from commengine import Communicator, UsageError
from trainers.data.corpus import open_corpus
from trainers.data.indexed import IndexedDataset
from trainers.data.indexed_writer import IndexedDatasetWriter
from trainers.data.tokenizer import Tokenizer
from trainers.settings.commands import GPTSettings
from trainers.tasks.kinds import task_of
from trainers.tasks.unigram import unigram_entropy

CONFIG = GPTSettings(seq_length=8, vocab_size=50, split="80,20", hidden_size=24, eval_iters=10)
Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """``write(name, documents, seed)``: the prefix of a data set of random tokens below 50; the seed is its content."""

    def write(name: str, documents: int, seed: int = 0, length: int = 40) -> str:
        random = np.random.default_rng(seed)
        with IndexedDatasetWriter(tmp_path / name, "u2") as writer:
            for _ in range(documents):
                writer.add_document(random.integers(seed % 20, 50, length))
        return str(tmp_path / name)

    return write


def blend(*words: object, **settings: object) -> GPTSettings:
    return dataclasses.replace(CONFIG, data_path=[str(word) for word in words], **settings)  # type: ignore[arg-type]


# The tokenizer ---------------------------------------------------------------------------------------------------


def trained(prefix: str, text: str) -> Tokenizer:
    tokenizer = Tokenizer.train_bpe([text], 260)
    Path(f"{prefix}-tokenizer.json").write_bytes(tokenizer.to_bytes())
    return tokenizer


def test_the_tokenizer_beside_all_data_sets_is_the_runs(write: Write) -> None:
    a, b = write("a", 20, 1), write("b", 20, 2)
    for prefix in (a, b):
        trained(prefix, "one and one and one")
    done = task_of(blend(0.5, a, 0.5, b, vocab_size=None)).completed(1)
    assert done.tokenizer_model == f"{a}-tokenizer.json" and done.vocab_size == 260
    tokenizer = open_corpus(done).tokenizer
    assert tokenizer is not None and tokenizer.decode(tokenizer.encode("and")) == "and"


def test_data_sets_of_different_tokenizers_are_refused(write: Write) -> None:
    """Whether or not the one of the run is named; the vocabularies are of equal size here."""
    a, b = write("a", 20, 1), write("b", 20, 2)
    trained(a, "one and one and one")
    trained(b, "two for two for two")
    for named in (None, f"{a}-tokenizer.json"):
        with pytest.raises(
            UsageError, match=r"--data-path: .*/b was not made with the tokenizer .*/a-tok.* as .*/b-tok"
        ):
            task_of(blend(0.5, a, 0.5, b, vocab_size=None, tokenizer_model=named)).completed(1)


def test_a_tokenizer_beside_some_data_sets_only_must_be_named(write: Write) -> None:
    a, b = write("a", 20, 1), write("b", 20, 2)
    trained(b, "one and one and one")
    with pytest.raises(UsageError, match=r"/b has a tokenizer beside it, .*/a has none; .* --tokenizer-model"):
        task_of(blend(0.5, a, 0.5, b, vocab_size=None)).completed(1)
    named = task_of(blend(0.5, a, 0.5, b, vocab_size=None, tokenizer_model=f"{b}-tokenizer.json")).completed(1)
    assert named.vocab_size == 260
    assert task_of(blend(1, a, vocab_size=50)).completed(1).tokenizer_model is None


def test_a_tokenizer_that_knows_more_tokens_is_the_same(write: Write, tmp_path: Path) -> None:
    """As one is that has special tokens for later."""
    a, b = write("a", 20, 1), write("b", 20, 2)
    trained(a, "one and one and one")
    more = trained(b, "one and one and one")
    more._backend.add_special_tokens(["<|later|>"])
    Path(f"{b}-tokenizer.json").write_bytes(more.to_bytes())
    for words in ((0.5, a, 0.5, b), (0.5, b, 0.5, a)):
        done = task_of(blend(*words, vocab_size=None)).completed(1)
        assert done.tokenizer_model == f"{b}-tokenizer.json" and done.vocab_size == 261


# The data --------------------------------------------------------------------------------------------------------


def test_the_same_data_twice_is_refused(write: Write) -> None:
    """Under another name: no prefix is named twice."""
    words = (0.5, write("a", 20, 1), 0.5, write("copy", 20, 1))
    with pytest.raises(UsageError, match=r"--data-path: .*/a and .*/copy hold the same data; add up the weights"):
        open_corpus(blend(*words))


def test_a_data_set_keeps_its_identity_where_it_lies(write: Write) -> None:
    same = {IndexedDataset(write(name, 20, 1)).identity() for name in ("a", "b")}
    others = {IndexedDataset(write(f"c{n}", 20 + (n == 1), n, 40 + (n == 2))).identity() for n in (1, 2, 3)}
    assert len(same) == 1 and len(same | others) == 4


def test_large_data_sets_differ_by_either_end(tmp_path: Path) -> None:
    identities = set()
    for first, middle, last in ((0, 0, 0), (1, 0, 0), (0, 0, 1)):
        with IndexedDatasetWriter(tmp_path / "x", "u2") as writer:
            for token in (first, *[middle] * 9, last):
                writer.add_document(np.full(30_000, token))
        identities.add(IndexedDataset(tmp_path / "x").identity())
    assert len(identities) == 3


def test_sources_are_those_of_the_command_line(write: Write) -> None:
    a, b = write("a", 20, 1), write("b", 30, 2)
    corpus = open_corpus(blend(3, a, 1, b))
    assert [(source.name, float(source.weight)) for source in corpus.sources] == [(a, 3), (b, 1)]
    # 80% of 20 and of 30 documents of 40 tokens, cut into samples of 8 tokens and one more
    assert [len(source.training) for source in corpus.sources] == [(16 * 40 - 1) // 8, (24 * 40 - 1) // 8]
    assert [len(source.held_out or ()) for source in corpus.sources] == [(4 * 40 - 1) // 8, (6 * 40 - 1) // 8]
    stream = corpus.stream(seed=1)
    drawn = Counter(stream.sources[stream.place(n)[0]].name for n in range(100))
    assert drawn == {a: 75, b: 25}


# Held-out parts --------------------------------------------------------------------------------------------------


def test_each_source_gets_its_share_of_an_evaluation_in_whole_batches(write: Write) -> None:
    words = (0.66, write("a", 200, 1), 0.23, write("b", 20, 2), 0.11, write("c", 5, 3), 0, write("d", 20, 4))
    parts = open_corpus(blend(*words)).held_out(10, size=4)
    # b has 19 samples in 5 batches, of which 3 are asked for; c has 4 samples in one batch, and 2 are asked for
    assert [(Path(part.name).name, part.iterations, part.samples) for part in parts] == [
        ("a", 7, 28), ("b", 3, 12), ("c", 1, 4),
    ]  # fmt: skip
    assert [part.weight for part in parts] == pytest.approx([0.66, 0.23, 0.11])
    parts = open_corpus(blend(*words)).held_out(1000, size=4)
    assert [(part.iterations, part.samples) for part in parts] == [(50, 199), (5, 19), (1, 4)]
    assert open_corpus(blend(*words)).held_out(0, size=4) == []


def test_a_source_without_held_out_samples_is_left_out(write: Write) -> None:
    words = (0.6, write("a", 200, 1), 0.4, write("b", 2, 2))
    (part,) = open_corpus(blend(*words)).held_out(10, size=4)
    assert (part.weight, part.iterations) == (1.0, 10)
    with pytest.raises(UsageError, match=r"--split 80,20: no validation documents .*/b, .* 0 tokens .* --eval-iters 0"):
        open_corpus(blend(0, words[1], 1, words[3]))
    assert open_corpus(blend(0, words[1], 1, words[3], eval_iters=0)).held_out(0, 4) == []


@pytest.mark.mpi
def test_unigram_entropy_is_of_the_mixture(write: Write, alone: Communicator) -> None:
    """Counted here from the documents: both the model and the text it is tried on are mixed by the weights."""
    sets = {write("a", 20, 1): 0.75, write("b", 40, 19): 0.25, write("none", 9, 7): 0.0}
    words = [word for prefix, weight in sets.items() for word in (weight, prefix)]
    corpus = open_corpus(blend(*words))
    parts = corpus.held_out(10, size=2)
    assert [part.samples for part in parts] == [16, 6]
    model, total, losses = Counter[int](), 0.0, []
    for prefix, weight in sets.items():
        tokens = np.concatenate(
            [IndexedDataset(prefix).document(n) for n in range(len(IndexedDataset(prefix)) * 4 // 5)]
        )
        for token in tokens.tolist():
            model[token] += weight / len(tokens)
        total += len(tokens) if weight else 0
    for (prefix, weight), part in zip(list(sets.items())[:2], parts, strict=True):
        found = IndexedDataset(prefix)
        text = np.concatenate([found.document(n) for n in range(len(found) * 4 // 5, len(found))])
        labels = text[1 : 8 * part.samples + 1].tolist()
        nats = [-math.log((model[token] * total + 1) / (total + 50)) for token in labels]
        losses.append(weight * sum(nats) / len(nats))
    assert unigram_entropy(corpus, 50, parts, alone) == pytest.approx(sum(losses), rel=1e-12)


def test_a_data_set_of_sentences_is_not_gpts(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "sentences", "u2") as writer:
        for _ in range(20):
            writer.add_document(np.arange(40), [15, 25])
    config = dataclasses.replace(CONFIG, data_path=str(tmp_path / "sentences"))
    with pytest.raises(UsageError, match="sentences: its items are sentences, as pretrain_bert needs them; make a"):
        open_corpus(config)
