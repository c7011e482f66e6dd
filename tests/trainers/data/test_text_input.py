"""Each document is in exactly one block, wherever the blocks are cut; errors name file and line."""

import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainers.data.text_files import LONGEST_LINE, TextFileError, read_json_lines, read_paragraphs
from trainers.data.text_input import TextInput

LINES = st.lists(st.sampled_from(["", " ", "\t", "a", "bcdef ghi", "é ü", "x" * 30]), max_size=20)


def every(paths, text, size):
    found = text.blocks([str(path) for path in paths], size)
    return [row[text.json_key] for one in found for row in text.rows(one.path, one.begin, one.end)]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LINES, st.sampled_from(["\n", "\r\n"]), st.booleans(), st.booleans(), st.integers(1, 60))
def test_paragraphs_of_all_blocks_are_those_of_the_file(tmp_path, lines, newline, end, mark, size):
    path = tmp_path / "text.txt"
    path.write_bytes(("\ufeff" * mark + newline.join(lines) + newline * end).encode())
    assert every([path], TextInput(split_on_blank_lines=True), size) == [piece.text for piece in read_paragraphs(path)]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LINES, st.integers(1, 200))
def test_json_lines_of_all_blocks_are_those_of_the_file(tmp_path, texts, size):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"n": n, "body": text}) + "\n" * (1 + n % 3) for n, text in enumerate(texts)))
    assert (
        every([path], TextInput(json_key="body"), size)
        == [piece.text for piece in read_json_lines(path, "body")]
        == texts
    )


def test_a_text_file_is_a_document(tmp_path):
    texts = {"a.txt": "one\n\ntwo " * 5000, "empty.txt": "", "blank.txt": " \n", "c.md": "three"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    rows = TextInput()
    assert every([tmp_path / name for name in texts], rows, 10) == [texts["a.txt"], "three"]


@pytest.mark.parametrize("size", [7, 1000])
@pytest.mark.parametrize(
    "line, problem",
    [
        (b"{'text': 1}", "not JSON"),
        (b'["text"]', "want a JSON object, got list"),
        (b'{"body": "x"}', "no key 'text'; the keys are 'body'"),
        (b'{"text": null}', "'text' is NoneType, not text"),
        (b'{"text": "\\ud800"}', "not valid Unicode"),
        (b'{"text": "\xff"}', "not UTF-8 text"),
    ],
)
def test_a_line_that_is_no_document_is_named(tmp_path, size, line, problem):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n{"text": "b"}\n' + line + b'\n{"text": "c"}\n')
    with pytest.raises(TextFileError) as caught:
        every([path], TextInput(), size)
    assert str(caught.value).startswith(f"{path}: line 4: ") and problem in str(caught.value)


def test_paragraphs_that_are_not_utf8_are_named(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"a\n\ncaf\xe9\n")
    with pytest.raises(TextFileError, match="line 3: not UTF-8"):
        every([path], TextInput(split_on_blank_lines=True), 2)


def test_a_line_that_may_not_fit_into_memory_is_named(tmp_path):
    with (tmp_path / "a.jsonl").open("wb") as file:
        file.write(b'{"text": "x"}\n')
        file.seek(LONGEST_LINE, os.SEEK_CUR)  # zero bytes that take no room on the disk
        file.write(b"\n")
    (block,) = TextInput().blocks([str(tmp_path / "a.jsonl")], 1 << 30)
    with pytest.raises(TextFileError, match=r"a\.jsonl: line 2: more than 33,554,432 bytes"):
        list(TextInput().rows(block.path, block.begin, block.end))
