"""Bytes on disk come back; nothing is left on disk; runs keep to their limit."""

import json
import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.cleaning.owned_documents import SpillFile, chunks, row_line
from trainers.data.text_files import AsWritten


@pytest.mark.parametrize("nameless", [True, False])
def test_bytes_come_back_and_no_file_is_left(tmp_path, monkeypatch, nameless):
    if not nameless:  # a file system that does not know files without a name
        monkeypatch.setattr(tempfile, "_O_TMPFILE_WORKS", False, raising=False)
    file = SpillFile(tmp_path)
    parts = [b"one", b"", np.arange(1000, dtype=np.uint64), b"end"]
    places = [(file.append(part), len(bytes(part))) for part in parts]
    for part, (offset, length) in reversed(list(zip(parts, places, strict=True))):
        assert file.read(offset, length) == bytes(part)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="ended early"):
        file.read(8000, 7)
    file.close()


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(OSError, match="none"):
        SpillFile(tmp_path / "none")


@settings(deadline=None)
@given(st.lists(st.integers(0, 20)), st.integers(1, 30))
def test_runs_keep_to_their_limit(sizes, limit):
    runs = list(chunks(np.array(sizes, np.int64), limit))
    assert [n for begin, end in runs for n in range(begin, end)] == list(range(len(sizes)))
    for begin, end in runs:
        assert sum(sizes[begin:end]) <= limit or end == begin + 1
        assert end == len(sizes) or sum(sizes[begin : end + 1]) > limit


def test_rows_keep_what_stands_beside_the_text():
    row = {"id": 7, "text": "é\n", "meta": {"half": "\ud800"}}
    assert row_line(row).count(b"\n") == 1 and json.loads(row_line(row)) == row
    assert row_line({"text": "é"}) == '{"text": "é"}\n'.encode()
    spelled = {"n": AsWritten("1e400"), "text": "é", "m": AsWritten("[1E2, -0]")}
    assert row_line(spelled) == '{"n": 1e400, "text": "é", "m": [1E2, -0]}\n'.encode()
