"""A data set that was changed under its name: what a run that goes on notices, and what only --verify-data does."""

import os
import shutil
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from commengine import UsageError
from trainers import preprocess_data
from trainers.data.blend import WeightedPrefix, verify
from trainers.data.corpus import file_remarks, open_corpus
from trainers.data.indexed import bin_path, checksums_path
from trainers.data.indexed_writer import IndexedDatasetWriter
from trainers.settings.commands import GPTSettings

#: bytes of a data set, whose middle lies in neither end that an identity is made of
TOKENS = 200_000


def write(prefix, middle=7):
    """A data set whose sizes and ends are always the same."""
    tokens = np.arange(TOKENS) % 40
    tokens[TOKENS // 3 : -TOKENS // 3] = middle
    with IndexedDatasetWriter(prefix, "u2") as writer:
        for part in np.split(tokens, 100):
            writer.add_document(part)
    return str(prefix)


def rewrite_middle(prefix, *, keep_time=False):
    before = bin_path(prefix).stat()
    with bin_path(prefix).open("r+b") as file:
        file.seek(TOKENS)
        file.write(b"\x09\x00" * 500)
    later = before.st_mtime_ns + (0 if keep_time else 5_000_000_000)
    os.utime(f"{prefix}.bin", ns=(later, later))


def stream_of(*prefixes, n=None, record=None):
    words = [str(word) for prefix in prefixes for word in ("1", prefix)]
    config = GPTSettings(seq_length=8, vocab_size=50, split="80,20", hidden_size=24, eval_iters=1, data_path=words)
    stream = open_corpus(config).stream(1)
    return stream if record is None else (stream, stream.continue_from(n, record))


def test_a_run_that_goes_on_notices_a_change(tmp_path):
    a = write(tmp_path / "a")
    record = stream_of(a).record(10)
    stream, said = stream_of(a, n=10, record=record)
    assert said == []
    rewrite_middle(a)
    stream, (line,) = stream_of(a, n=10, record=record)
    assert line.startswith(f"{a} was written at 20") and "--verify-data compares every byte" in line
    assert stream.consumed(10) == [10] and stream_of(a, n=10, record=stream.record(10))[1] == []  # said once
    with pytest.raises(UsageError, match=r"--verify-data: .*a\.bin: damaged"):
        verify([WeightedPrefix(Fraction(1), a)], 0, 1)
    write(a, middle=8)  # with other checksums
    stream, (line, *_) = stream_of(a, n=10, record=record)
    assert line.startswith("other data from sample 10 on") and stream.consumed(10) == [0]
    with bin_path(a).open("ab") as file:
        file.write(b"\x09\x00")
    with pytest.raises(ValueError, match=r"a\.bin"):
        stream_of(a)


def test_a_list_of_other_sizes_is_refused_at_the_start(tmp_path):
    a, b = write(tmp_path / "a"), write(tmp_path / "b", 8)
    with IndexedDatasetWriter(b, "u2") as writer:
        writer.add_document(np.arange(40))
    for end in ("bin", "idx"):
        shutil.copy(f"{b}.{end}", f"{a}.{end}")
    with pytest.raises(ValueError, match=r"a\.bin: 80 bytes, where a\.xxh3 says 400000"):
        stream_of(a)


def test_a_file_that_is_newer_than_its_checksums_is_said_at_every_start(tmp_path):
    a, b = write(tmp_path / "a"), write(tmp_path / "b", 8)
    config = GPTSettings(seq_length=8, vocab_size=50, hidden_size=24, data_path=["1", a, "1", b])
    assert file_remarks(config) == [] and file_remarks(GPTSettings(mock_data=True)) == []
    rewrite_middle(b)
    (line,) = file_remarks(config)
    assert line == f"{b}.bin was written after b.xxh3. --verify-data compares every byte with the checksums"
    assert file_remarks(replace(config, verify_data=True)) == []


def test_only_reading_notices_a_change_that_keeps_the_time(tmp_path):
    """As docs/training.md says."""
    a = write(tmp_path / "a")
    record = stream_of(a).record(10)
    rewrite_middle(a, keep_time=True)
    assert stream_of(a, n=10, record=record)[1] == []
    with pytest.raises(UsageError, match="damaged"):
        verify([WeightedPrefix(Fraction(1), a)], 0, 1)


def test_different_data_of_equal_sizes_and_ends_is_not_refused_as_one(tmp_path):
    """With checksums and without, and resumed: each goes on where it was."""
    a, b = write(tmp_path / "a"), write(tmp_path / "b", 8)
    for _ in range(2):
        stream = stream_of(a, b)
        assert stream.consumed(9) != [9, 0]
        assert stream_of(b, a, n=9, record=stream.record(9))[1] == []
        for prefix in (a, b):
            checksums_path(prefix).unlink(missing_ok=True)
    (tmp_path / "c").mkdir()
    shutil.copy(f"{a}.bin", tmp_path / "c/a.bin"), shutil.copy(f"{a}.idx", tmp_path / "c/a.idx")
    with pytest.raises(UsageError, match="hold the same data"):
        stream_of(a, tmp_path / "c/a")


def test_checksums_are_written_for_a_data_set_of_another_program(tmp_path, capsys):
    a = write(tmp_path / "a")
    made = (tmp_path / "a.xxh3").read_bytes()
    checksums_path(a).unlink()
    with pytest.raises(UsageError, match=f"--write-checksums {a} writes it"):
        verify([WeightedPrefix(Fraction(1), a)], 0, 1)
    record = stream_of(a).record(10)
    preprocess_data.main(["--write-checksums", a])
    assert (tmp_path / "a.xxh3").read_bytes() == made and "checksums of 402,042" in capsys.readouterr().out
    assert stream_of(a, n=10, record=record)[1] == []  # a list that comes later makes it no other data
    for argv, said in ((["--write-checksums", a], "a.xxh3 exists; --overwrite replaces it"),
                       (["--write-checksums", a, "--workers", "2"], "leave out --workers"),
                       (["--write-checksums", f"{a}x"], "ax.idx: no such file")):  # fmt: skip
        with pytest.raises(SystemExit):
            preprocess_data.main(argv)
        assert said in capsys.readouterr().err
