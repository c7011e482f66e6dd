"""Writing a data set: all of its files or none, each byte with a checksum; a full disk leaves the older one whole."""

import errno
from pathlib import Path

import pytest

from commengine.files import checksums
from tests.support.full_disk import room_for
from trainers.data.indexed import IndexedDataset
from trainers.data.indexed_writer import IndexedDatasetWriter

DOCUMENTS = [[1, 2, 3], [4], [5, 6]]


def write(prefix: Path, documents: list[list[int]] = DOCUMENTS, dtype: str = "u2", tokenizer: bytes = b"") -> Path:
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for tokens in documents:
            writer.add_document(tokens)
        if tokenizer:
            writer.add_file(f"{prefix}-tokenizer.json", tokenizer)
    return prefix


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("file", ["a.bin", "a.idx", "a-tokenizer.json", "a.xxh3"])
def test_no_room_for_a_file_leaves_the_older_data_set_whole_and_names_the_file(tmp_path: Path, file: str) -> None:
    """100,000 tokens have 100,000 bytes in .bin; the index has 20 bytes for each document."""
    write(tmp_path / "a", tokenizer=b"old")
    before = content(tmp_path)
    long, short = [[1] * 100_000], [[1]] * 1000
    documents, tokenizer, room = {
        "a.bin": (long, b"new", 90_000), "a.idx": (short, b"new", 10_000),
        "a-tokenizer.json": ([[1]], b"x" * 10_000, 5000), "a.xxh3": ([[1]], b"x", 90),
    }[file]  # fmt: skip
    with pytest.raises(OSError, match=rf"{file}'$") as found, room_for(room):
        write(tmp_path / "a", documents, "u1", tokenizer)
    assert found.value.errno == errno.EFBIG
    assert content(tmp_path) == before
    write(tmp_path / "a", documents, "u1", tokenizer)  # where there is room
    assert len(IndexedDataset(tmp_path / "a")) == len(documents)
    assert (tmp_path / "a-tokenizer.json").read_bytes() == tokenizer


def test_checksums_cover_all_files(tmp_path: Path) -> None:
    write(tmp_path / "v1.2", tokenizer=b"{}")
    pieces = checksums.read(tmp_path / "v1.2.xxh3")
    files = ["v1.2.bin", "v1.2.idx", "v1.2-tokenizer.json"]
    assert [piece.name for piece in pieces] == files
    assert sum(checksums.verify(tmp_path / "v1.2.xxh3", pieces)) == sum(
        (tmp_path / name).stat().st_size for name in files
    )
    assert sorted(content(tmp_path)) == sorted([*files, "v1.2.xxh3"])


def test_an_exception_leaves_the_old_data_set_alone(tmp_path: Path) -> None:
    write(tmp_path / "a")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(TypeError):
        write(tmp_path / "a", [[1], None])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_nothing_in_place_before_the_end(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "a", "u2") as writer:
        writer.add_document([1])
        with pytest.raises(FileNotFoundError):
            IndexedDataset(tmp_path / "a")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx", "a.xxh3"]


def test_a_failed_end_leaves_no_temporary_files(tmp_path: Path) -> None:
    (tmp_path / "a.bin").mkdir()
    with pytest.raises(OSError), IndexedDatasetWriter(tmp_path / "a", "u2") as writer:
        writer.add_document([1])
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]


def test_float_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"float32.*uint16"):
        IndexedDatasetWriter(tmp_path / "a", "f4")
