"""``python -m trainers.preprocess_data``: what it writes decodes to what it read; an error is one line."""

import itertools
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import mpirun
from tests.support.data import DATA, needs
from tests.support.full_disk import room_for
from trainers import preprocess_data
from trainers.data import stdlib_text
from trainers.data.indexed import IndexedDataset
from trainers.data.tokenizer import END_OF_DOCUMENT, Tokenizer
from trainers.data.wordpiece import SPECIAL

ROOT = Path(__file__).parents[2]
GPT2 = ["--vocab-file", str(DATA / "gpt2-bpe/encoder.json"), "--merge-file", str(DATA / "gpt2-bpe/vocab.bpe")]
TEXTS = ["The first document.\nTwo lines.\n", "A second: naïve 漢字 🙂 <|endoftext|>", " third \n\n\t"]
BPE = ["--train-bpe", "300"]
Here = Callable[..., subprocess.CompletedProcess[str]]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainers.preprocess_data", *arguments]
    return mpirun.command(command, timeout=100, cwd=folder, fresh=False)


def read(prefix: Path) -> list[str]:
    """The documents, decoded, an end of document spelt out."""
    data, tokenizer = IndexedDataset(prefix), Tokenizer.from_file(f"{prefix}-tokenizer.json")
    assert all(tokenizer.eod not in data.document(i)[:-1] for i in range(len(data)))
    return [tokenizer.decode(data.document(i).tolist()) for i in range(len(data))]


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """A folder with the texts as three files, as JSON lines, and as paragraphs."""
    for n, text in enumerate(TEXTS):
        (tmp_path / f"{n}.txt").write_bytes(text.encode())
    rows = [{"id": n, "text": text, "body": f"body {n}"} for n, text in enumerate(TEXTS)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (tmp_path / "paragraphs.txt").write_text("one\nstill one\n\n \ntwo\n\nthree")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n{"text": }\n')
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    return tmp_path


@pytest.fixture
def here(inputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """`run` in this process, in the folder ``inputs``, which spares each command line the start of another process."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(inputs)
        code: Any = 0
        try:
            preprocess_data.main(arguments)
        except SystemExit as stop:
            code = stop.code
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return run


@pytest.mark.parametrize("files", [["0.txt", "1.txt", "empty.txt", "2.txt"], ["rows.jsonl"]])
def test_documents_come_back_in_order(inputs: Path, here: Here, files: list[str]) -> None:
    done = here("--input", *files, *BPE, "--output-prefix", "out", "--workers", "1")
    assert done.returncode == 0, done.stderr
    assert read(inputs / "out") == [text + END_OF_DOCUMENT for text in TEXTS]
    data = IndexedDataset(inputs / "out")
    size = sum(len(text.encode()) for text in TEXTS)
    assert done.stdout.startswith(f"out: 3 documents, {len(data.tokens)} tokens (uint16), {size} bytes of text, ")
    assert done.stdout.endswith(" tokens per second\n") and done.stdout.count("\n") == 1
    assert done.stderr == ""  # no bar where there is no terminal


def test_json_key_no_eod_and_a_second_run(inputs: Path, here: Here) -> None:
    assert here("--input", "0.txt", *BPE, "--output-prefix", "out").returncode == 0
    tokenizer = ["--tokenizer-model", "out-tokenizer.json"]
    options = ["--json-key", "body", "--no-append-eod", "--output-prefix", "out"]  # over the first output
    before = {path.name: path.read_bytes() for path in inputs.glob("out*")}
    done = here("--input", "rows.jsonl", *tokenizer, *options)
    assert done.returncode == 2 and "--output-prefix: there is a data set out already" in done.stderr
    assert {path.name: path.read_bytes() for path in inputs.glob("out*")} == before
    done = here("--input", "rows.jsonl", *tokenizer, *options, "--overwrite")
    assert done.returncode == 0, done.stderr
    assert read(inputs / "out") == ["body 0", "body 1", "body 2"]


def test_configuration_file(inputs: Path, here: Here) -> None:
    (inputs / "run.yaml").write_text(
        "input: [paragraphs.txt]\nsplit-on-blank-lines: true\ntrain-bpe: 270\nappend-eod: false\noutput-prefix: a\n"
    )
    done = here("--config", "run.yaml", "--output-prefix", "b")
    assert done.returncode == 0, done.stderr
    assert read(inputs / "b") == ["one\nstill one", "two", "three"]
    assert not (inputs / "a.idx").exists()


@pytest.mark.slow
def test_the_number_of_workers_changes_nothing(inputs: Path) -> None:
    (inputs / "long.txt").write_text("".join(f"Line {n} of a long text.\n" for n in range(20000)))
    for workers in ("1", "3"):
        arguments = ["--input", "long.txt", *BPE, "--output-prefix", f"w{workers}", "--workers", workers]
        assert run(inputs, *arguments).returncode == 0
    for suffix in (".bin", ".idx", "-tokenizer.json"):
        assert (inputs / f"w1{suffix}").read_bytes() == (inputs / f"w3{suffix}").read_bytes()


def test_what_the_files_beside_a_tokenizer_say_goes_with_the_data_set(here: Here, inputs: Path) -> None:
    """Its end of a document, though <|endoftext|> is in the vocabulary, too; a newer data set has none of it."""
    model = inputs / "model"
    model.mkdir()
    (model / "tokenizer.json").write_bytes(Tokenizer.train_bpe(TEXTS, 270).to_bytes())
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "bos_token": "<s>"}))
    assert (
        here("--input", "0.txt", "--tokenizer-model", "model/tokenizer.json", "--output-prefix", "out").returncode == 0
    )
    assert read(inputs / "out") == [f"{TEXTS[0]}<|im_end|>"]
    told = Tokenizer.from_file(inputs / "out-tokenizer.json")
    assert (told.end_token, told.start_token) == ("<|im_end|>", "<s>")
    assert here("--input", "0.txt", *BPE, "--output-prefix", "out", "--overwrite").returncode == 0
    assert not (inputs / "out-tokenizer_config.json").exists()
    assert read(inputs / "out") == [f"{TEXTS[0]}{END_OF_DOCUMENT}"]


def test_lower_case_is_asked_of_the_files_and_may_not_contradict_them(here: Here, inputs: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "first", "First", "the", "The"]
    (inputs / "vocab.txt").write_text("\n".join(words))
    (inputs / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))
    common = ["--input", "0.txt", "--output-prefix", "out", "--no-append-eod", "--overwrite"]
    for option in ("--tokenizer-model", "--vocab-file"):
        assert here(*common, option, "vocab.txt").returncode == 0
        assert IndexedDataset(inputs / "out").document(0)[0] == words.index("The")
    done = here(*common, "--vocab-file", "vocab.txt", "--tokenizer-type", "BertWordPieceLowerCase")
    assert done.returncode == 2 and "do_lower_case false: contradicts --tokenizer-type" in done.stderr


@pytest.mark.parametrize(
    "arguments,message",
    [
        (BPE, "give --input FILE... or --from-stdlib"),
        ([*BPE, "--input", "0.txt", "--from-stdlib"], "give --input FILE... or --from-stdlib"),
        ([*BPE, "--input", "0.txt", "none.txt"], "--input: none.txt: not a file"),
        ([*BPE, "--input", "."], "--input: .: not a file"),
        ([*BPE, "--input", "empty.txt"], "--input: no text in empty.txt"),
        ([*BPE, "--input", "0.txt", "bad.jsonl"], "--input: bad.jsonl: line 2: not JSON"),
        (
            [*BPE, "--input", "rows.jsonl", "--json-key", "txt"],
            "line 1: no key 'txt'; the keys are 'id', 'text'",
        ),
        ([*BPE, "--input", "latin.txt"], "--input: latin.txt: not UTF-8"),
        (["--input", "0.txt"], "--train-bpe N; got none"),
        (["--input", "0.txt", *BPE, "--tokenizer-model", "x.json"], "got more than one"),
        (["--input", "0.txt", "--vocab-file", "x"], "needs both"),
        (
            ["--input", "0.txt", "--vocab-file", "x", "--merge-file", "y"],
            "--vocab-file, --merge-file: x: no such",
        ),
        (
            ["--input", "0.txt", "--tokenizer-model", "0.txt"],
            "--tokenizer-model: 0.txt: not a tokenizer.json",
        ),
        (
            ["--input", "0.txt", "--tokenizer-model", "words.json"],
            "--append-eod (or use --no-append-eod): the tokenizer has no",
        ),
        (["--input", "0.txt", "--train-bpe", "256"], "--train-bpe 256: must be at least 257, and at most 16777216"),
        (
            ["--input", "0.txt", "--train-bpe", str(2**63)],
            "--train-bpe 9223372036854775808: must be below 2**63",
        ),
        (["--input", "0.txt", "--train-wordpiece", "0"], "--train-wordpiece 0: must be at least 6, and at most"),
        (["--input", "0.txt", "--train-bpe", "many"], "--train-bpe: invalid int value: 'many'"),
        ([*BPE, "--input", "0.txt", "--workers", "0"], "--workers 0: must be at least 1"),
        ([*BPE, "--input", "0.txt", "--split"], "unrecognized arguments: --split"),
        ([*BPE, "--input", "0.txt", "--config", "no.yaml"], "no.yaml"),
        ([*BPE, "--input", "0.txt", "--config", "no-eod.yaml"], "no-append-eod: in a file, write append-eod"),
        ([*BPE, "--input", "0.txt", "--config", "unknown.yaml"], "--learning-rate"),
        ([*BPE, "--input", "0.txt", "--output-prefix", "none/out"], "--output-prefix: none: there is no such folder"),
        ([*BPE, "--input", "0.txt", "--output-prefix", "0.txt/out"], "--output-prefix: 0.txt: not a folder"),
        ([*BPE, "--input", "0.txt", "--output-prefix", "./"], "--output-prefix: './' ends in a folder"),
        ([*BPE, "--input", "0.txt", "--output-prefix", "taken"], "--output-prefix: taken.bin is a folder"),
        ([*BPE, "--input", "self.bin", "--output-prefix", "self"], "self.bin is an --input file"),
    ],
)
def test_errors(inputs: Path, here: Here, arguments: list[str], message: str) -> None:
    (inputs / "no-eod.yaml").write_text("no-append-eod: true\n")
    (inputs / "unknown.yaml").write_text("learning-rate: 3\n")
    (inputs / "taken.bin").mkdir()
    (inputs / "self.bin").write_text("text")
    words = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"x": 0}, "unk_token": "x"},
    }
    (inputs / "words.json").write_text(json.dumps(words))
    before = sorted(path.name for path in inputs.iterdir())
    if "--output-prefix" not in arguments:
        arguments = [*arguments, "--output-prefix", "out"]
    done = here(*arguments)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr and done.stderr.count("\n") == 1 and done.stdout == ""
    assert sorted(path.name for path in inputs.iterdir()) == before


@pytest.mark.parametrize("file", ["out.bin", "out.idx"])
def test_a_full_disk_leaves_the_older_data_set_and_is_not_the_inputs_fault(inputs: Path, here: Here, file: str) -> None:
    """A document of one token has 20 bytes in the index and 2 in .bin, one of 5,000 tokens has 10,000 bytes in .bin."""
    (inputs / "many.txt").write_text("a\n\n" * 2000)
    (inputs / "long.txt").write_text("a b " * 10_000)
    assert here("--input", "0.txt", *BPE, "--output-prefix", "out").returncode == 0
    before = {path.name: path.read_bytes() for path in inputs.iterdir() if path.is_file()}
    text, size = ("long.txt", 20_000) if file == "out.bin" else ("many.txt", 30_000)
    tokenizer = ["--tokenizer-model", "out-tokenizer.json", "--split-on-blank-lines"]
    with room_for(size):
        done = here("--input", text, *tokenizer, "--output-prefix", "out", "--overwrite")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "--output-prefix: " in done.stderr and f"'{file}'" in done.stderr and "--input" not in done.stderr
    assert {path.name: path.read_bytes() for path in inputs.iterdir() if path.is_file()} == before


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("training", ["--train-bpe", "--train-wordpiece"])
def test_a_word_of_a_megabyte_takes_no_longer_than_others(inputs: Path, here: Here, training: str) -> None:
    """Uncut, it takes minutes, and pytest's limit ends the test. The ids decode to it all the same."""
    draw = random.Random(1)
    word = "".join(draw.choice("abcdefghij") for _ in range(1_000_000))
    (inputs / "word.txt").write_text(word)
    done = here("--input", "word.txt", training, "1000", "--output-prefix", "out", "--no-append-eod")
    assert done.returncode == 0, done.stderr
    if training == "--train-bpe":
        assert read(inputs / "out") == [word]


@pytest.mark.long
@pytest.mark.slow
def test_ctrl_c_ends_the_training_of_a_tokenizer_at_once(inputs: Path) -> None:
    """The library answers no signal while it trains; the status is 130, and there is one line."""
    draw = random.Random(2)
    (inputs / "large.txt").write_text(" ".join(f"{draw.getrandbits(80):x}" for _ in range(400_000)))
    code = (
        "import os, signal, threading\n"
        "from trainers import preprocess_data\n"
        "from trainers.data import wordpiece\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored where the tests run in the background
        "cut = wordpiece.cut_words\n"
        "def then_interrupt(texts):\n"
        "    yield from cut(texts)\n"
        "    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()\n"  # the library has all texts
        "wordpiece.cut_words = then_interrupt\n"
        "preprocess_data.main(['--input', 'large.txt', '--train-bpe', '60000', '--output-prefix', 'out'])\n"
    )
    before = sorted(inputs.iterdir())
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=inputs, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 130 and done.stderr == "preprocess_data: interrupted; nothing is written\n"
    assert sorted(inputs.iterdir()) == before


SENTENCES = [
    ["Mr. Fox ran away.", "The dog did not.", "Why?"],
    ["A document of one sentence"],
    ["The dog ran.", "The fox did, too."],
]


@pytest.fixture
def stories(inputs: Path) -> Path:
    """Documents of sentences as JSON lines; one of them, without a token, is no document."""
    rows = [{"text": " ".join(sentences)} for sentences in SENTENCES]
    (inputs / "stories.jsonl").write_text("\n".join(map(json.dumps, [*rows[:1], {"text": " "}, *rows[1:]])) + "\n")
    return inputs


def items(prefix: str) -> list[list[str]]:
    """The sentences of each document, decoded."""
    data, tokenizer = IndexedDataset(prefix), Tokenizer.from_file(f"{prefix}-tokenizer.json")
    ends = np.cumsum(data.sequence_lengths)
    found = [tokenizer.decode(part.tolist()) for part in np.split(data.tokens, ends[:-1])]
    borders = data.document_sequences
    return [found[first:stop] for first, stop in pairwise(borders)]


@pytest.mark.parametrize("batch", [1, 1 << 22])
def test_sentences_are_items(stories: Path, here: Here, monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    """As in Megatron-LM's PREFIX_text_sentence: the document index counts sentences."""
    monkeypatch.setattr(preprocess_data, "_BATCH", batch)
    source = ["--input", "stories.jsonl", "--split-sentences"]
    done = here(*source, "--train-wordpiece", "90", "--output-prefix", "out")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("out_text_sentence: 3 documents, 6 sentences, ")
    assert not (stories / "out.bin").exists()
    lower = [[re.sub("([.?,])", r" \1", text.lower()).split() for text in sentences] for sentences in SENTENCES]
    assert [
        [re.sub("([.?,])", r" \1", text).split() for text in document] for document in items("out_text_sentence")
    ] == lower
    assert IndexedDataset("out_text_sentence").document_sequences.tolist() == [0, 3, 4, 6]

    again = ["--tokenizer-model", "out_text_sentence-tokenizer.json", "--output-prefix", "again"]
    assert here(*source, *again).returncode == 0
    for suffix in (".bin", ".idx", "-tokenizer.json"):
        one, other = (stories / f"{name}_text_sentence{suffix}" for name in ("out", "again"))
        assert one.read_bytes() == other.read_bytes()


def test_sentences_of_byte_level_bpe_end_their_document_if_asked(stories: Path, here: Here) -> None:
    source = ["--input", "stories.jsonl", "--split-sentences", *BPE]
    assert here(*source, "--output-prefix", "plain").returncode == 0
    assert here(*source, "--append-eod", "--output-prefix", "ended").returncode == 0
    plain, ended = items("plain_text_sentence"), items("ended_text_sentence")
    assert ended == [[*document[:-1], document[-1] + END_OF_DOCUMENT] for document in plain]
    assert "".join(plain[0]) == " ".join(SENTENCES[0])


@pytest.mark.parametrize("option", ["--vocab-file", "--tokenizer-model"])
def test_a_cased_vocabulary_from_a_file(stories: Path, here: Here, option: str) -> None:
    words = ["The", "the", "dog", "ran", "Mr", "Fox", ".", "##s"]
    (stories / "vocab.txt").write_text("\n".join([*SPECIAL, *words]) + "\n")
    source = ["--input", "stories.jsonl", "--split-sentences", option, "vocab.txt"]
    assert here(*source, "--tokenizer-type", "BertWordPieceCase", "--output-prefix", "cased").returncode == 0
    assert here(*source, "--output-prefix", "lower").returncode == 0
    the, low = 5, 6
    assert (
        the in IndexedDataset("cased_text_sentence").tokens and low not in IndexedDataset("cased_text_sentence").tokens
    )
    assert (
        low in IndexedDataset("lower_text_sentence").tokens and the not in IndexedDataset("lower_text_sentence").tokens
    )


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--train-wordpiece", "20"], "--train-wordpiece: want at least "),
        (
            ["--vocab-file", "few.txt"],
            "few.txt: not a tokenizer.json, nor BERT's vocab.txt: the vocabulary has no [MASK]",
        ),
        (
            ["--train-wordpiece", "90", "--append-eod"],
            "--append-eod (or use --no-append-eod): the tokenizer has no <|endoftext|>",
        ),
        (["--train-wordpiece", "90", "--train-bpe", "300"], "got more than one"),
        (["--train-wordpiece", "90", "--tokenizer-type", "Other"], "--tokenizer-type"),
        (["--merge-file", "few.txt"], "--merge-file: GPT-2's tokenizer needs --vocab-file, too"),
    ],
)
def test_errors_of_sentences(stories: Path, here: Here, arguments: list[str], message: str) -> None:
    (stories / "few.txt").write_text("\n".join(SPECIAL[:4]) + "\n")
    done = here("--input", "stories.jsonl", "--split-sentences", *arguments, "--output-prefix", "out")
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not list(stories.glob("out*"))


def test_sentences_need_their_package(stories: Path, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencex", None)  # as if it were not installed
    done = here("--input", "stories.jsonl", "--split-sentences", *BPE, "--output-prefix", "out")
    assert done.returncode == 2 and "pip install '.[bert]'" in done.stderr


def test_an_error_late_in_the_input_leaves_the_old_output(inputs: Path, here: Here) -> None:
    assert here("--input", "0.txt", *BPE, "--output-prefix", "out").returncode == 0
    before = {path.name: path.read_bytes() for path in inputs.iterdir()}
    tokenizer = ["--tokenizer-model", "out-tokenizer.json"]
    done = here("--input", "1.txt", "bad.jsonl", *tokenizer, "--output-prefix", "out", "--overwrite")
    assert done.returncode == 2 and "line 2" in done.stderr
    assert {path.name: path.read_bytes() for path in inputs.iterdir()} == before


@pytest.mark.long
@pytest.mark.slow
def test_stdlib_text() -> None:
    documents = list(stdlib_text.documents())
    assert sum(map(len, documents)) > 1_500_000
    assert len(set(documents)) == len(documents) > 300
    assert min(map(len, documents)) >= 200
    assert any("Parse the source into an AST node." in text for text in documents)


@pytest.mark.slow
def test_from_stdlib(inputs: Path, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = list(itertools.islice(stdlib_text.documents(), 180))  # to make all takes seconds
    monkeypatch.setattr(stdlib_text, "documents", lambda: iter(documents))
    done = here("--from-stdlib", "--train-bpe", "1000", "--output-prefix", "std", "--workers", "1")
    assert done.returncode == 0, done.stderr
    found = [text.removesuffix(END_OF_DOCUMENT) for text in read(inputs / "std")]
    assert sorted(found) == sorted(documents)
    # Shuffled: the help topics, which come first, reach the last tenth.
    topics = set(documents[:70])
    assert 0 < len(topics.intersection(found[-len(found) // 10 :])) < 18


@pytest.mark.long
@pytest.mark.slow
@needs("wikitext-2-raw", "gpt2-bpe")
def test_wikitext(tmp_path: Path) -> None:
    source = DATA / "wikitext-2-raw/wiki.valid.raw"
    done = run(tmp_path, "--input", str(source), *GPT2, "--output-prefix", "wiki", "--no-append-eod")
    assert done.returncode == 0, done.stderr
    assert read(tmp_path / "wiki") == [source.read_text()]
    data, gpt2 = IndexedDataset(tmp_path / "wiki"), Tokenizer.from_gpt2(GPT2[1], GPT2[3])
    assert data.tokens.tolist() == gpt2.encode(source.read_text())  # as if it had not been cut
