"""Tokenizers in and out: the ids of transformers' tokenizer on many lines are ours."""

import json
import random
import shutil

import pytest

from trainers.data.tokenizer import Tokenizer
from trainers.weights.tokenizer_files import tokenizer_file, without_tokenizer, written_tokenizer

WORDS = ["abra", "cad", "Sesame", "über", "naïve", "x" * 30, "<|endoftext|>", "[MASK]", "3.14", "!?", "日本語", "\t"]


@pytest.fixture(scope="module")
def lines():
    drawn = random.Random(5)
    return [" ".join(drawn.choices(WORDS, k=drawn.randrange(12))) for _ in range(10_000)]


def byte_level(folder):
    (folder / "tokenizer.json").write_bytes(Tokenizer.train_bpe(WORDS * 3, 320).to_bytes())
    return folder / "tokenizer.json"


def wordpiece(folder):
    vocabulary = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *"abcdrsemxnüïv3.14!?",
        *(f"##{c}" for c in "abcdrsemx"),
    ]
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(vocabulary)) + "\n")
    return folder / "vocab.txt"


def cased(folder):
    path = wordpiece(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False, "model_max_length": 10**30}))
    path.write_text(path.read_text() + "S\n")
    return path


def first_gpt2(folder):
    kept = json.loads(byte_level(folder).read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(kept["vocab"]))
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in kept["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    return folder / "vocab.json"


@pytest.mark.slow
@pytest.mark.parametrize(
    "write", [byte_level, *(pytest.param(one, marks=pytest.mark.long) for one in (wordpiece, cased, first_gpt2))]
)
def test_the_written_tokenizer_gives_our_ids(tmp_path, lines, write):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "in").mkdir()
    path = write(tmp_path / "in")
    assert tokenizer_file(tmp_path / "in") == str(path)
    ours = Tokenizer.from_file(path).encode_batch(lines)
    (tmp_path / "out").mkdir()
    for name, content in written_tokenizer(str(path)).items():
        (tmp_path / "out" / name).write_bytes(content)
    assert Tokenizer.from_file(tokenizer_file(tmp_path / "out")).encode_batch(lines) == ours
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    plain = theirs(lines, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert plain == ours
    lower = write is wordpiece
    assert (Tokenizer.from_file(path).encode("S") == Tokenizer.from_file(path).encode("s")) == lower
    if write is not wordpiece and write is not cased:
        assert theirs.eos_token == "<|endoftext|>"
    else:
        assert theirs.mask_token == "[MASK]" and theirs.pad_token_id == 0
    assert len(ours) == 10_000 and sum(map(len, ours)) > 100_000


def test_a_folder_without_a_tokenizer(tmp_path):
    assert tokenizer_file(tmp_path) is None
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    assert tokenizer_file(tmp_path) is None
    assert "has its tokenizer in tokenizer.model alone, which is not read here" in without_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").unlink()
    assert "has no tokenizer: no tokenizer.json, vocab.txt or vocab.json" in without_tokenizer(tmp_path)
    shutil.rmtree(tmp_path)
