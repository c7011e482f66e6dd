"""IndexedDataset and its writer: byte for byte Megatron-core's format, complete or absent, clear errors."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from tests.support import data
from trainers.data.indexed import IndexedDataset, best_dtype
from trainers.data.indexed_writer import IndexedDatasetWriter

SAMPLES = data.DATA / "megatron-indexed"
DOCUMENTS = [[15496, 995, 50256], [464, 2068, 7586, 21831, 50256], [1, 2, 3, 4, 5, 6, 50256]]


def write(prefix: Path, documents: list[list[int]] = DOCUMENTS, dtype: str = "u2") -> Path:
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for tokens in documents:
            writer.add_document(tokens)
    return prefix


def patch(path: Path, offset: int, raw: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[offset : offset + len(raw)] = raw
    path.write_bytes(data)


def test_layout_spelt_out(tmp_path: Path) -> None:
    write(tmp_path / "a", [[7, 8], [9]])
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<3H", 7, 8, 9)
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2, 3)
    assert (tmp_path / "a.idx").read_bytes() == header + struct.pack("<2i2q3q", 2, 1, 0, 4, 0, 1, 2)


@data.needs("megatron-indexed")
def test_reads_what_megatron_wrote() -> None:
    data = IndexedDataset(SAMPLES / "megatron_sample")
    assert len(data) == 3 and data.dtype == np.uint16
    assert [data.document(i).tolist() for i in range(3)] == DOCUMENTS
    assert data.document_tokens.tolist() == [3, 5, 7]
    assert data.document_offsets.tolist() == [0, 3, 8, 15]
    sentences = IndexedDataset(SAMPLES / "megatron_sample_sents")
    assert np.diff(sentences.document_sequences).tolist() == [2, 1]
    assert sentences.dtype == np.int32


@data.needs("megatron-indexed")
@pytest.mark.parametrize("name", ["megatron_sample", "megatron_sample_sents"])
def test_writes_the_bytes_that_megatron_wrote(tmp_path: Path, name: str) -> None:
    theirs = IndexedDataset(SAMPLES / name)
    with IndexedDatasetWriter(tmp_path / name, theirs.dtype) as writer:
        for i in range(len(theirs)):
            writer.add_document(
                theirs.document(i),
                theirs.sequence_lengths[theirs.document_sequences[i] : theirs.document_sequences[i + 1]].tolist(),
            )
    for suffix in (".bin", ".idx"):
        assert (tmp_path / (name + suffix)).read_bytes() == (SAMPLES / (name + suffix)).read_bytes()


@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "i4", "i8", "u2"])
def test_megatron_core_agrees(tmp_path: Path, dtype: str) -> None:
    theirs = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    torch = pytest.importorskip("torch")
    kind = np.dtype(dtype)
    high = min(int(np.iinfo(kind).max), 50256)
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, high, n, endpoint=True) for n in (1, 40, 7)]
    lengths = [[1], [30, 10], [3, 3, 1]]
    with IndexedDatasetWriter(tmp_path / "ours", dtype) as writer:
        for tokens, sentences in zip(documents, lengths, strict=True):
            writer.add_document(tokens, sentences)
    builder = theirs.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=kind.type)
    for tokens, sentences in zip(documents, lengths, strict=True):
        builder.add_document(torch.from_numpy(tokens), sentences)
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in (".bin", ".idx"):
        ours = (tmp_path / f"ours{suffix}").read_bytes()
        assert ours == (tmp_path / f"theirs{suffix}").read_bytes()
    read = theirs.IndexedDataset(str(tmp_path / "ours"))
    assert np.concatenate([read[i] for i in range(len(read))]).tolist() == np.concatenate(documents).tolist()


def test_a_dot_in_the_prefix_is_kept(tmp_path: Path) -> None:
    assert len(IndexedDataset(write(tmp_path / "v1.2"))) == 3


def test_no_documents(tmp_path: Path) -> None:
    data = IndexedDataset(write(tmp_path / "a", []))
    assert len(data) == 0 and len(data.tokens) == 0 and data.document_offsets.tolist() == [0]


def test_tokens_cannot_be_written_through_the_map(tmp_path: Path) -> None:
    data = IndexedDataset(write(tmp_path / "a"))
    with pytest.raises(ValueError, match="read-only"):
        data.tokens[0] = 1


def test_document_out_of_range(tmp_path: Path) -> None:
    data = IndexedDataset(write(tmp_path / "a"))
    with pytest.raises(IndexError):
        data.document(3)


@pytest.mark.parametrize("vocab_size,name", [(50257, "uint16"), (65499, "uint16"), (65500, "int32")])
def test_best_dtype(vocab_size: int, name: str) -> None:
    assert best_dtype(vocab_size).name == name


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_missing_file(tmp_path: Path, suffix: str) -> None:
    write(tmp_path / "a").with_suffix(suffix).unlink()
    with pytest.raises(FileNotFoundError, match=rf"a\{suffix}"):
        IndexedDataset(tmp_path / "a")


# Of the three documents' index: 34 bytes header, 12 lengths, 24 byte offsets, 32 document starts.
@pytest.mark.parametrize(
    "offset,raw,message",
    [
        (0, b"TNTIDX\0\0\0", "older TNTIDX"),
        (0, b"X", "not a Megatron-core index"),
        (9, b"\x02", "version 2"),
        (17, b"\x07", "type code 7"),
        (17, b"\x63", "type code 99"),
        (18, b"\x04", "truncated"),
        (18, b"\xff" * 8, "truncated"),
        (18, b"\x02", "too long"),
        (34, struct.pack("<i", -3), "sequence of -3 tokens"),
        (34, struct.pack("<i", 4), "byte offsets"),
        (46, struct.pack("<q", 2), "byte offsets"),
        (70, struct.pack("<q", 1), "document starts"),
        (78, struct.pack("<q", 9), "document starts"),
        (94, struct.pack("<q", 2), "document starts"),
    ],
)
def test_damaged_index(tmp_path: Path, offset: int, raw: bytes, message: str) -> None:
    write(tmp_path / "a")
    patch(tmp_path / "a.idx", offset, raw)
    with pytest.raises(ValueError, match=rf"a\.idx.*{message}"):
        IndexedDataset(tmp_path / "a")


@pytest.mark.parametrize("size", [0, 10, 33, 34, 101])
def test_truncated_index(tmp_path: Path, size: int) -> None:
    write(tmp_path / "a")
    os.truncate(tmp_path / "a.idx", size)
    with pytest.raises(ValueError, match=r"a\.idx: truncated"):
        IndexedDataset(tmp_path / "a")


@pytest.mark.parametrize("size", [0, 29, 32])
def test_tokens_that_disagree_with_the_index(tmp_path: Path, size: int) -> None:
    write(tmp_path / "a")
    os.truncate(tmp_path / "a.bin", size)
    with pytest.raises(ValueError, match=rf"a\.bin: {size} bytes where a\.idx asks for 30"):
        IndexedDataset(tmp_path / "a")
