"""Prompts are read from lines and from JSON, and each that cannot be used is named."""

import json

import pytest

from commengine import UsageError
from trainers.data.tokenizer import Tokenizer
from trainers.generation.texts import Prompt, encoded, read_prompts

TEXT = "A line with “quotes”\x85and a next-line character"


def test_lines_are_prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"\xef\xbb\xbfone \r\n\n   \n\ttwo\n" + TEXT.encode())
    assert read_prompts(str(path)) == [
        Prompt(f"{path}: line 1", "one "), Prompt(f"{path}: line 4", "\ttwo"), Prompt(f"{path}: line 5", TEXT)
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["prompts.jsonl", "PROMPTS.JSON"])
def test_json_lines_are_prompts(tmp_path, name):
    path = tmp_path / name
    path.write_text(json.dumps({"prompt": "two\nlines ", "id": 3}) + "\n\n" + json.dumps({"prompt": TEXT}))
    assert read_prompts(str(path)) == [Prompt(f"{path}: line 1", "two\nlines "), Prompt(f"{path}: line 3", TEXT)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "a.txt: holds no prompt; want one in each line"),
        ("a.jsonl", b"\n \n", "a.jsonl: holds no prompt"),
        ("a.jsonl", b'{"prompt": "x"}\n{"text": "y"}\n', "a.jsonl: line 2: no key 'prompt'; the keys are 'text'"),
        ("a.jsonl", b'{"prompt": 3}\n', "a.jsonl: line 1: 'prompt' is int, not text"),
        ("a.jsonl", b'["x"]\n', "a.jsonl: line 1: want a JSON object, got list"),
        ("a.jsonl", b"{\n", "a.jsonl: line 1: not JSON"),
        ("a.txt", b"\xff\xfe", "a.txt: line 1: not UTF-8 text"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_prompts(str(tmp_path / name))


def test_a_file_that_is_none_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere: there is no such file"):
        read_prompts(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="is a folder, not a file"):
        read_prompts(str(tmp_path))


def test_a_prompt_that_does_not_fit_is_named():
    tokenizer = Tokenizer.train_bpe(["aaaa"], 257)  # the bytes alone
    assert encoded([Prompt("x", "abc")], tokenizer, 3) == [tokenizer.encode("abc")]
    with pytest.raises(UsageError, match="--prompt: has 4 tokens; the model knows 3 positions"):
        encoded([Prompt("f: line 1", "abc"), Prompt("--prompt", "abcd")], tokenizer, 3)
    with pytest.raises(UsageError, match="f: line 2: holds no token"):
        encoded([Prompt("f: line 2", "")], tokenizer, 3)
