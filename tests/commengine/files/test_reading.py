"""Files that users name: what is not a plain file of the right kind is one short line that names the file."""

import os
import signal
from pathlib import Path

import pytest

from commengine.files.reading import InputFileError, read_json, read_text
from commengine.files.yaml_files import read_yaml


def message(read, path: Path) -> str:
    with pytest.raises(InputFileError) as caught:
        read(path)
    text = str(caught.value)
    assert len(text) < 500 and "\n" not in text
    return text


@pytest.fixture(autouse=True)
def no_wait():
    """A pipe without a writer would be waited for."""
    signal.alarm(20)
    yield
    signal.alarm(0)


@pytest.mark.parametrize("read", [read_text, read_json, read_yaml])
def test_what_is_no_regular_file_is_refused_and_not_opened(tmp_path: Path, read) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert message(read, tmp_path / "pipe") == f"{tmp_path / 'pipe'}: is a pipe or a device; give a regular file"
    assert "is a pipe or a device" in message(read, Path("/dev/zero"))
    assert message(read, tmp_path) == f"{tmp_path}: is a folder, not a file"
    assert message(read, tmp_path / "none") == f"{tmp_path / 'none'}: there is no such file"
    assert "not the name of a file" in message(read, tmp_path / ("x" * 300))
    assert "there is no such file" in message(read, "a\0b") or "not the name" in message(read, "a\0b")


def test_text_has_a_limit_and_is_utf_8(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"\xef\xbb\xbfna\xc3\xafve")
    assert read_text(file) == "naïve" and read_text(file, most=9) == "naïve"
    assert "has more than 8 bytes" in message(lambda path: read_text(path, most=8), file)
    file.write_bytes(b"caf\xe9")
    assert message(read_text, file) == f"{file}: not UTF-8 text: unexpected end of data at byte 3"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[" * 100_000, "within each other without end"),
        ('{"a":' * 100_000, "within each other without end"),
        ("", "not JSON"),
        ("{1: 2}", "not JSON"),
        ("[" + "9" * 5000 + "]", "more than 64 bits"),
        ("9223372036854775808", "more than 64 bits"),
        ("-9223372036854775809", "more than 64 bits"),
        ("x" * 1_000_000, "not JSON"),
    ],
)
def test_json_that_cannot_be_used(tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / "a.json").write_text(content)
    text = message(read_json, tmp_path / "a.json")
    assert text.startswith(f"{tmp_path / 'a.json'}: not ") and problem in text


def test_json_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": [1, -9223372036854775808, 9223372036854775807, 1e400, NaN, null]}')
    numbers = read_json(tmp_path / "a.json")["a"]
    assert numbers[:4] == [1, -(2**63), 2**63 - 1, float("inf")] and numbers[4] != numbers[4] and numbers[5] is None
