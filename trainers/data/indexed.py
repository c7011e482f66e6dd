r"""Megatron-core's indexed data set: tokens without gaps in ``.bin``, and their boundaries in ``.idx``.

The layout of ``.idx`` (megatron-core 0.16.1, ``megatron/core/datasets/indexed_dataset.py``), little endian: 9 bytes
``MMIDIDX\0\0``; u64 version 1; u8 type code; u64 S sequences; u64 D documents + 1; i32[S] tokens of each sequence;
i64[S] byte offsets of the sequences in ``.bin``; i64[D] first sequence of each document, with S as the last entry. A
document is one sequence, or several (sentences).
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from commengine.files import checksums

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1

#: the types of token ids, by their code in the format
# Codes 6 and 7 are float64 and float32. They are legal in the format but never token ids, and GPT-NeoX swaps them.
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
HEADER = struct.Struct("<9sQBQQ")
_ENDS = 1 << 16  # bytes at either end of a file that its identity is made of

TokenArray = npt.NDArray[np.integer[Any]]


def best_dtype(vocab_size: int) -> np.dtype[Any]:
    """The type in which Megatron-core stores a vocabulary of this size: uint16 below 65,500 tokens, else int32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def bin_path(prefix: str | os.PathLike[str]) -> Path:
    """``PREFIX.bin``; a dot in the prefix is part of the name."""
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike[str]) -> Path:
    """``PREFIX.idx``; a dot in the prefix is part of the name."""
    return Path(f"{os.fspath(prefix)}.idx")


def tokenizer_path(prefix: str | os.PathLike[str]) -> Path:
    """``PREFIX-tokenizer.json``, which `preprocess_data` writes beside a data set."""
    return Path(f"{os.fspath(prefix)}-tokenizer.json")


def settings_path(prefix: str | os.PathLike[str]) -> Path:
    """``PREFIX-tokenizer_config.json``, which says the names of its tokens, where files of a folder said them."""
    return Path(f"{os.fspath(prefix)}-tokenizer_config.json")


def checksums_path(prefix: str | os.PathLike[str]) -> Path:
    """``PREFIX.xxh3``, the checksums of a data set's files (`commengine.files.checksums`)."""
    return Path(f"{os.fspath(prefix)}.xxh3")


class IndexedDataset:
    """A memory-mapped reader of ``PREFIX.bin`` and ``PREFIX.idx``.

    tokens: [N] read-only memory map of all tokens, in the stored type.
    document_offsets: int64 [D + 1]; document i is ``tokens[document_offsets[i]:document_offsets[i + 1]]``.
    document_tokens: int64 [D], the tokens of each document.
    sequence_lengths: int32 [S], the tokens of each sequence. document_sequences: int64 [D + 1], the first sequence of
    each document.

    Opening reads the whole index and checks it against ``.bin``. Raises FileNotFoundError for a missing file, and
    ValueError for a file that is damaged or holds no token ids. Both errors name the file.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        self._bin, self._idx = bin_path(prefix), idx_path(prefix)
        for path in (self._idx, self._bin):
            if not path.is_file():
                raise FileNotFoundError(
                    f"{path}: no such file; a data set is PREFIX.idx and PREFIX.bin, named by PREFIX alone"
                )
        self._read_index()
        self.tokens: TokenArray = self._map_tokens()

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.document_tokens)

    def document(self, i: int) -> TokenArray:
        """The tokens of document i, 0 <= i < len: a view of the map. Raises IndexError."""
        return self.tokens[self.document_offsets[i] : self.document_offsets[i + 1]]

    def identity(self) -> str:
        """A digest that tells this data set from others, wherever its files lie: hexadecimal, 32 digits.

        It is made of the sizes of both files and of the first and last 64 KB of each. `trainers.data.same_data` uses
        what else is known.
        """
        digest = hashlib.sha256()
        for path in (self._idx, self._bin):
            size = path.stat().st_size
            digest.update(size.to_bytes(8, "little"))
            with path.open("rb") as file:
                digest.update(file.read(_ENDS))
                file.seek(max(0, size - _ENDS))
                digest.update(file.read(_ENDS))
        return digest.hexdigest()[:32]

    def checksums(self) -> str:
        """A digest of the checksums of both files, as PREFIX.xxh3 has them: 16 hexadecimal digits; "" if it has none.

        Raises ValueError that names the file where the list is damaged, or says another size.
        """
        path = checksums_path(self.prefix)
        if not path.is_file():
            return ""
        pieces, parts = checksums.read(path), []
        for file in (self._bin, self._idx):
            mine = [piece for piece in pieces if piece.name == file.name]
            if not mine:
                return ""
            checksums.require_size(path, file, mine)
            parts += [f"{piece.start} {piece.stop} {piece.digest}\n" for piece in mine]
        return checksums.digest("".join(parts).encode())

    def written(self) -> int:
        """When its files were last written: seconds since 1970."""
        return int(max(path.stat().st_mtime for path in (self._idx, self._bin)))

    def _read_index(self) -> None:
        raw = np.memmap(self._idx, dtype=np.uint8, mode="r") if self._idx.stat().st_size else np.empty(0, "u1")
        if len(raw) < HEADER.size:
            raise ValueError(f"{self._idx}: truncated: {len(raw)} bytes, the header alone has {HEADER.size}")
        magic, version, code, sequences, documents = HEADER.unpack(raw[: HEADER.size].tobytes())
        if magic != MAGIC:
            hint = " (the older TNTIDX format)" if magic.startswith(b"TNTIDX") else ""
            raise ValueError(f"{self._idx}: not a Megatron-core index: it starts with {magic!r}{hint}")
        if version != VERSION:
            raise ValueError(f"{self._idx}: version {version}; this reader knows version {VERSION}")
        if code not in DTYPES:
            raise ValueError(f"{self._idx}: type code {code} is not one of token ids; valid: {type_names()}")
        expected = HEADER.size + 12 * sequences + 8 * documents
        if len(raw) != expected:
            kind = "truncated" if len(raw) < expected else "too long (a multimodal index?)"
            raise ValueError(f"{self._idx}: {kind}: {len(raw)} bytes where its header asks for {expected}")
        self.dtype = DTYPES[code]

        a, b = HEADER.size + 4 * sequences, HEADER.size + 12 * sequences
        lengths = raw[HEADER.size : a].view("<i4")
        offsets = raw[a:b].view("<i8")
        starts = np.array(raw[b:].view("<i8"), dtype=np.int64)
        if sequences and lengths.min() < 0:
            raise ValueError(f"{self._idx}: damaged: a sequence of {lengths.min()} tokens")
        ends = np.zeros(sequences + 1, dtype=np.int64)
        np.cumsum(lengths, dtype=np.int64, out=ends[1:])
        # A document is read as one slice of .bin, so the sequences must lie there in order, without gaps.
        if not np.array_equal(offsets, ends[:-1] * self.dtype.itemsize):
            raise ValueError(f"{self._idx}: damaged: byte offsets do not follow from the sequence lengths")
        if documents < 1 or starts[0] != 0 or starts[-1] != sequences or np.any(np.diff(starts) < 0):
            raise ValueError(f"{self._idx}: damaged: document starts must rise from 0 to {sequences} sequences")
        self.sequence_lengths: npt.NDArray[np.int32] = np.array(lengths, dtype=np.int32)
        self.document_sequences: npt.NDArray[np.int64] = starts
        self.document_offsets: npt.NDArray[np.int64] = ends[starts]
        self.document_tokens: npt.NDArray[np.int64] = np.diff(self.document_offsets)

    def _map_tokens(self) -> TokenArray:
        size, count = self._bin.stat().st_size, int(self.document_offsets[-1])
        if size != count * self.dtype.itemsize:
            raise ValueError(
                f"{self._bin}: {size} bytes where {self._idx.name} asks for {count * self.dtype.itemsize} "
                f"({count} tokens of {self.dtype}): truncated, or not written with it"
            )
        if count == 0:  # an empty file cannot be mapped
            return np.empty(0, dtype=self.dtype)
        return np.memmap(self._bin, dtype=self.dtype, mode="r")


def type_names() -> str:
    """The types of token ids with their codes in the format, for messages."""
    return ", ".join(f"{dtype.name} ({code})" for code, dtype in DTYPES.items())
