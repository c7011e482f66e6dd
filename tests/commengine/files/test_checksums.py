"""Lists of checksums: each byte of each file, and of the list, is covered; every change is found and named."""

import random
from pathlib import Path

import pytest

from commengine.files import checksums
from commengine.files.checksums import ChecksumError, Digester, Piece


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of no byte, one piece and several pieces, and their list."""
    monkeypatch.setattr(checksums, "PIECE", 100)
    monkeypatch.setattr(checksums, "_BLOCK", 64)
    content = random.Random(1)
    pieces = []
    for name, size in (("empty", 0), ("many.bin", 250), ("one file", 100)):
        (tmp_path / name).write_bytes(data := content.randbytes(size))
        made = Digester(name)
        made.update(data)
        pieces += made.pieces()
    (tmp_path / "list").write_text(checksums.text(pieces))
    return tmp_path


def verified(folder: Path, parts: int = 1) -> int:
    """The bytes that all ``parts`` ranks verify."""
    pieces = checksums.read(folder / "list")
    return sum(sum(checksums.verify(folder / "list", pieces, part, parts)) for part in range(parts))


def test_the_digest_is_the_published_one() -> None:
    """Values of xxhsum 0.8, so that other programs can compare."""
    assert checksums.digest(b"") == "2d06800538d394c2"
    assert checksums.digest(b"a") == "e6c632b61e964e1f"


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_all_bytes_are_verified_once_by_any_number_of_ranks(folder: Path, parts: int) -> None:
    assert verified(folder, parts) == 350
    assert [(piece.name, piece.start, piece.stop) for piece in checksums.read(folder / "list")] == [
        ("empty", 0, 0), ("many.bin", 0, 100), ("many.bin", 100, 200), ("many.bin", 200, 250), ("one file", 0, 100),
    ]  # fmt: skip


def test_bytes_that_come_in_any_portions_have_the_same_pieces(folder: Path) -> None:
    data = (folder / "many.bin").read_bytes()
    for size in (1, 7, 100, 249, 250):
        made = Digester("many.bin")
        for start in range(0, len(data), size):
            made.update(data[start : start + size])
        assert made.pieces() == [piece for piece in checksums.read(folder / "list") if piece.name == "many.bin"]


@pytest.mark.slow
def test_every_changed_byte_of_every_file_is_named(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        right = path.read_bytes()
        for place in range(len(right)):
            for bit in (1, 0x20):
                path.write_bytes(right[:place] + bytes([right[place] ^ bit]) + right[place + 1 :])
                with pytest.raises(ChecksumError, match=rf"^{path}: damaged"):
                    verified(folder)
        path.write_bytes(right)
    assert verified(folder) == 350


def test_a_file_that_is_longer_shorter_or_missing_is_named(folder: Path) -> None:
    many = folder / "many.bin"
    right = many.read_bytes()
    for wrong in (right + b"x", right[:-1], right[:100], b""):
        many.write_bytes(wrong)
        with pytest.raises(ChecksumError, match=rf"many\.bin: {len(wrong)} bytes, where list says 250"):
            verified(folder)
    many.unlink()
    with pytest.raises(ChecksumError, match=r"many\.bin: no such file"):
        verified(folder)


@pytest.mark.parametrize(
    "pieces",
    [
        [Piece("a", 1, 2, "0" * 16)],
        [Piece("a", 0, 2, "0" * 16), Piece("a", 3, 4, "0" * 16)],
        [Piece("a", 0, -2, "0" * 16)],
        [Piece("a", 0, 1, "0" * 16), Piece("b", 0, 1, "0" * 16), Piece("a", 1, 2, "0" * 16)],
    ],
)
def test_a_list_whose_pieces_do_not_cover_their_files_is_refused(tmp_path: Path, pieces: list[Piece]) -> None:
    (tmp_path / "list").write_text(checksums.text(pieces))
    with pytest.raises(ChecksumError, match=r"list: damaged"):
        checksums.read(tmp_path / "list")


@pytest.mark.parametrize("name", ["../a", "b/a", "", "a\nb", "/a", ".."])
def test_no_list_names_a_file_outside_its_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not the name of a file"):
        checksums.text([Piece(name, 0, 1, "0" * 16)])
