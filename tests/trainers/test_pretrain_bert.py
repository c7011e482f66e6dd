"""pretrain_bert: one run at every layout and after a restart, its report, its refusals, and what it learns."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support.training.runs import Runs
from trainers import preprocess_data
from trainers.data.indexed import IndexedDataset
from trainers.data.indexed_writer import IndexedDatasetWriter
from trainers.data.permutation import EpochPermutation
from trainers.data.samples import split_documents, unigram_cross_entropy
from trainers.data.sentences.samples import IGNORED, SampleRules, SentenceSamples
from trainers.data.tokenizer import Tokenizer
from trainers.data.wordpiece import SPECIAL

pytestmark = pytest.mark.slow

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)]
STEPS, BATCH, SEED, LENGTH = 20, 4, 77, 32
TINY = [
    "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", str(LENGTH),
    "--make-vocab-size-divisible-by", "64", "--micro-batch-size", "1", "--global-batch-size", str(BATCH),
    "--train-iters", str(STEPS), "--log-interval", "1", "--eval-iters", "0", "--seed", str(SEED), "--lr", "1e-2",
    "--lr-warmup-iters", "4",
]  # fmt: skip
HALF = ["--use-distributed-optimizer", "--sequence-parallel", "--tensor-model-parallel-size", "2"]
WORDS = [*"abcdefghijklmnopqrstuvwxyz", *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"), "."]


def write(prefix: Path, documents: list[list[str]], words: list[str] = WORDS) -> str:
    """A data set of these sentences, with its tokenizer beside it."""
    (prefix.parent / "vocab.txt").write_text("\n".join([*SPECIAL, *words]) + "\n")
    tokenizer = Tokenizer.from_vocab(prefix.parent / "vocab.txt")
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for document in documents:
            sentences = tokenizer.encode_batch(document)
            writer.add_document(np.concatenate(sentences), [len(one) for one in sentences])
    Path(f"{prefix}-tokenizer.json").write_bytes(tokenizer.to_bytes())
    return str(prefix)


def texts(seed: int, count: int) -> list[list[str]]:
    """Documents of one to five sentences of words of one to four pieces; every fourth is one word without end."""
    rng = np.random.default_rng(seed)

    def word(pieces: int) -> str:
        return "".join(rng.choice(list("abcdefgh"), pieces))

    def sentence() -> str:
        return " ".join(word(int(n)) for n in rng.integers(1, 5, rng.integers(2, 8))) + " ."

    return [[word(25)] if n % 4 == 0 else [sentence() for _ in range(rng.integers(1, 6))] for n in range(count)]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return write(tmp_path_factory.mktemp("data") / "text_sentence", texts(0, 60))


@pytest.fixture(scope="module")
def runs(tmp_path_factory, pretrain, data):
    """The folder of each run: by its layout, or by its name."""
    root = tmp_path_factory.mktemp("runs")
    source = [*TINY, "--data-path", data]
    commands: dict[str, tuple[int, list]] = {
        f"{tensor}-{replicas}": (tensor * replicas, [*source, "--tensor-model-parallel-size", tensor])
        for tensor, replicas in LAYOUTS
    }
    commands["resumed"] = (2, [*source, "--tensor-model-parallel-size", 2, "--exit-interval", 12])
    commands["resumed again"] = (2, [*source, "--tensor-model-parallel-size", 2, "--load", root / "resumed"])
    commands["bf16"] = (4, [*source, *HALF, "--bf16"])
    commands["fp16"] = (4, [*source, *HALF, "--fp16", "--recompute-granularity", "selective"])
    evaluated = [*source, "--split", "80,20,0", "--eval-iters", "100", "--train-iters", "2"]
    commands["evaluated"] = (1, evaluated)
    commands["evaluated, 4 ranks"] = (4, [*evaluated, "--tensor-model-parallel-size", 2])
    commands["masked alone"] = (2, [*evaluated, "--bert-no-binary-head", "--norm-placement", "post", "--gelu", "tanh"])
    commands["mock"] = (2, [*TINY, "--mock-data", "--vocab-size", 60, "--eval-iters", 2])
    commands["numbered"] = (1, numbered(root / "numbered_sentence"))
    folders = {name: root / name.removesuffix(" again") for name in commands}
    return Runs(commands, folders, pretrain, command="pretrain_bert")


def losses(runs, rows, name: str, key: str = "mlm_loss") -> torch.Tensor:
    found = rows(runs[name], key)
    assert [row["iteration"] for row in found] == list(range(1, STEPS + 1))
    return torch.tensor([row[key] for row in found], dtype=torch.float64)


@pytest.mark.parametrize(
    "layout", [(2, 2), *(pytest.param(other, marks=pytest.mark.long) for other in LAYOUTS[1:] if other != (2, 2))]
)
def test_losses_are_those_of_one_rank(runs, rows, layout):
    for key in ("mlm_loss", "sop_loss", "grad_norm"):
        expected, found = (losses(runs, rows, f"{tensor}-{data}", key) for tensor, data in ((1, 1), layout))
        assert (found - expected).abs().max() < 1e-4, key
    assert losses(runs, rows, "1-1")[-4:].mean() < losses(runs, rows, "1-1")[:4].mean() - 0.1


def test_the_runs_have_unequal_counts_to_agree_on(data):
    """Some micro-batch has no masked token, some no order, and the two replicas' counts differ in most steps."""
    corpus = IndexedDataset(data)
    pieces = Tokenizer.from_file(f"{data}-tokenizer.json").wordpieces()
    samples = SentenceSamples(corpus, split_documents(len(corpus), "969,30,1")[0], pieces, SampleRules(LENGTH, SEED))
    order = EpochPermutation(len(samples), SEED)
    rows = [samples.draw(n // len(samples), order[n]) for n in range(STEPS * BATCH)]
    masked = np.array([(row.labels != IGNORED).sum() for row in rows]).reshape(STEPS, 2, BATCH // 2)
    assert (masked == 0).any() and masked.max() == SampleRules(LENGTH, SEED).predictions == 4
    assert (masked.sum(axis=2)[:, 0] != masked.sum(axis=2)[:, 1]).mean() > 0.5
    assert {row.order for row in rows} == {0, 1, IGNORED}


@pytest.mark.long
def test_a_resumed_run_goes_on_bit_for_bit(runs, rows):
    for key in ("mlm_loss", "sop_loss", "grad_norm"):
        assert torch.equal(losses(runs, rows, "resumed again", key), losses(runs, rows, "2-1", key))
    one, other = (load_file(runs[name] / f"iter_{STEPS:07d}/model.safetensors") for name in ("resumed", "2-1"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.long
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_half_precision_and_zero_1(runs, rows, name):
    found, expected = losses(runs, rows, name), losses(runs, rows, "1-1")
    assert (found - expected).abs().max() < 0.2 and found[-4:].mean() < found[:4].mean() - 0.1


def report(runs, name: str) -> dict:
    return json.loads((runs[name] / "report.json").read_text())


def test_the_report(runs, data):
    """The unigram loss is that of the same masked tokens, and nothing depends on the number of ranks."""
    found = report(runs, "evaluated")
    corpus, tokenizer = IndexedDataset(data), Tokenizer.from_file(f"{data}-tokenizer.json")
    samples = SentenceSamples(corpus, range(48, 60), tokenizer.wordpieces(), SampleRules(LENGTH, SEED))
    labels = np.concatenate([samples.targets(n) for n in range(len(samples))])
    counts = np.bincount(corpus.tokens[: corpus.document_offsets[48]], minlength=tokenizer.vocab_size)
    expected = unigram_cross_entropy(counts, np.bincount(labels, minlength=tokenizer.vocab_size))
    assert found["unigram_entropy"] == pytest.approx(expected)
    assert found["validation_tokens"] == len(labels)
    assert found["validation_loss"] == pytest.approx(found["validation_mlm_loss"] + found["validation_sop_loss"])
    assert 0 < found["masked_accuracy"] < 1 and 0 < found["sop_accuracy"] < 1
    assert "[MASK]" in found["sample_prompt"] and re.search(r"\[[^]]+\]", found["sample"])
    text = (runs["evaluated"] / "report.txt").read_text()
    assert "masked accuracy" in text and "sop accuracy" in text and f"  {found['sample']}\n" in text
    other = report(runs, "evaluated, 4 ranks")
    for key in ("validation_mlm_loss", "validation_sop_loss", "masked_accuracy", "sop_accuracy", "unigram_entropy"):
        assert other[key] == pytest.approx(found[key], abs=1e-5), key
    assert other["sample"] == found["sample"] and other["validation_tokens"] == found["validation_tokens"]


def test_masked_tokens_alone(runs):
    found = report(runs, "masked alone")
    assert found["validation_loss"] == found["validation_mlm_loss"]
    assert "sop_accuracy" not in found and "validation_sop_loss" not in found
    assert not any("pooler" in name for name in load_file(runs["masked alone"] / "iter_0000002/model.safetensors"))


def test_mock_data(runs):
    found = report(runs, "mock")
    assert found["validation_tokens"] == 2 * BATCH * 4
    assert 2 < found["unigram_entropy"] < math.log(60)
    assert found["sample_prompt"].startswith("2 ")  # numbers, as there is no tokenizer


# Bad input ------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[list[str], list[str]]] = {
    "vocabulary without [MASK]": (
        ["--data-path", "{bare}", "--vocab-file", "{dir}/no-mask.txt"],
        ["--vocab-file: .*no-mask.txt", r"no \[MASK\]; BERT needs \[PAD\]"],
    ),
    "a BPE vocabulary": (["--data-path", "{bpe}"], ["--tokenizer-model .*bpe-tokenizer.json", r"no \[PAD\].*\[MASK\]"]),
    "no vocabulary": (["--data-path", "{bare}"], ["--vocab-file FILE: needed"]),
    "no vocabulary, but its size": (["--data-path", "{bare}", "--vocab-size", "99"], ["--vocab-file FILE: needed"]),
    "two vocabularies": (
        ["--data-path", "{data}", "--vocab-file", "{dir}/a", "--tokenizer-model", "{dir}/b"],
        ["--vocab-file and --tokenizer-model"],
    ),
    "data without sentences": (
        ["--data-path", "{whole}"],
        ["--data-path .*whole", "no document has two sentences", "--split-sentences", "--bert-no-binary-head"],
    ),
    "documents that are no sentences": (
        ["--data-path", "{whole}", "--bert-no-binary-head"],
        ["one has 40 tokens, of which a sample would hold 29", "--split-sentences"],
    ),
    "data of another tokenizer": (["--data-path", "{other}"], ["outside the vocabulary", "another tokenizer"]),
    "no held-out sentences": (
        ["--data-path", "{data}", "--split", "1,0,0", "--eval-iters", "1"],
        ["--split 1,0,0", "--eval-iters 0"],
    ),
    "samples without room": (["--data-path", "{data}", "--seq-length", "4"], ["--seq-length 4", "at least 5"]),
    "mock data without words": (["--mock-data", "--vocab-size", "5"], ["--vocab-size 5", "at least 6"]),
    "a probability of 1": (["--data-path", "{data}", "--mask-prob", "1"], ["--mask-prob 1.0", "below 1"]),
    "an unknown arrangement": (["--data-path", "{data}", "--norm-placement", "mid"], ["--norm-placement", "pre"]),
    "a checkpoint of other samples": (
        ["--data-path", "{data}", "--load", "{run}", "--one-sentence-documents", "skip"],
        ["--one-sentence-documents skip", "saved with mlm"],
    ),
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory, pretrain, runs, data):
    """How each of the commands that must be refused ends, on two ranks."""
    folder = tmp_path_factory.mktemp("refused")
    (folder / "no-mask.txt").write_text("\n".join([*(token for token in SPECIAL if token != "[MASK]"), *WORDS]) + "\n")
    write(folder / "other", [["a b .", "b c ."]] * 40)
    with IndexedDatasetWriter(folder / "other", np.uint16) as writer:
        for _ in range(40):
            writer.add_document([5, 60000, 5, 60000], [2, 2])
    for name in ("whole", "bare"):
        write(folder / name, [["a b c d e f g h"], ["a b c d " * 10]] * 20)
    (folder / "bare-tokenizer.json").unlink()
    (folder / "text.txt").write_text("Some text.")
    preprocess_data.main(
        ["--input", str(folder / "text.txt"), "--train-bpe", "257", "--output-prefix", f"{folder}/bpe"]
    )
    places = {name: f"{folder}/{name}" for name in ("bare", "bpe", "whole", "other")}
    places |= {"dir": str(folder), "data": data, "run": str(runs["2-1"])}
    words = [(2, [*TINY, *(word.format(**places) for word in given)]) for given, _ in REFUSED.values()]
    return dict(zip(REFUSED, pretrain(*words, command="pretrain_bert"), strict=True))


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_one_line_on_rank_zero(refused, name):
    outcome, patterns = refused[name], REFUSED[name][1]
    assert outcome.codes == [2, 2]
    assert outcome.err[1] == "" and outcome.out == ["", ""]
    line = outcome.err[0]
    if "\r" in line:  # the first step was begun: a progress bar, and what a run says at its start
        line = line.splitlines(keepends=True)[-1]
    assert line.startswith("error: ") and line.count("\n") == 1, line
    for pattern in patterns:
        assert re.search(pattern, line), (pattern, line)


# What it learns -------------------------------------------------------------------------------------------------


def numbered(prefix: Path) -> list:
    """Arguments of a run on documents whose sentence k is about number k: the numbers tell which part came first."""
    numbers = [f"n{letter}" for letter in "abcdefgh"]
    rng = np.random.default_rng(3)

    def sentence(number: str) -> str:
        return f"{number} {rng.choice(list('abcdef'))} {number} {rng.choice(list('abcdef'))}"

    documents = [[sentence(number) for number in numbers[: rng.integers(2, 9)]] for _ in range(2000)]
    return [
        "--data-path", write(prefix, documents, [*WORDS, *numbers]), "--split", "90,10,0", "--num-layers", 2,
        "--hidden-size", 64, "--num-attention-heads", 4, "--seq-length", LENGTH, "--micro-batch-size", 32,
        "--train-iters", 200, "--lr", "2e-3", "--lr-warmup-iters", 30, "--hidden-dropout", 0, "--attention-dropout", 0,
        "--make-vocab-size-divisible-by", 64, "--short-seq-prob", 0,
    ]  # fmt: skip


@pytest.mark.long
def test_the_order_of_numbered_sentences_is_learnt(runs):
    found = report(runs, "numbered")
    assert found["sop_accuracy"] >= 0.95
    assert found["validation_mlm_loss"] < found["unigram_entropy"] - 0.5
