"""The words of --data-path: a prefix, or weights and prefixes."""

from fractions import Fraction
from pathlib import Path

import pytest

from commengine import UsageError
from trainers.data.blend import WeightedPrefix, read_blend, require_files, verify
from trainers.data.indexed import tokenizer_path
from trainers.data.indexed_writer import IndexedDatasetWriter

AB = [WeightedPrefix(Fraction(7, 10), "A"), WeightedPrefix(Fraction(3, 10), "B")]


@pytest.mark.parametrize(
    ("data_path", "expected"),
    [
        ("A", [WeightedPrefix(Fraction(1), "A")]),
        (["A"], [WeightedPrefix(Fraction(1), "A")]),
        ("0.7 A 0.3 B", AB),
        (["0.7 A 0.3 B"], AB),
        (["0.7", "A", "0.3", "B"], AB),
        ([0.7, "A", 0.3, "B"], AB),
        ("7e-1 A\n 3e-1   B", AB),
        ("1 'a b' 0 c", [WeightedPrefix(Fraction(1), "a b"), WeightedPrefix(Fraction(0), "c")]),
        ("2 2", [WeightedPrefix(Fraction(2), "2")]),
        ("1e-999999999 A 1 B", [WeightedPrefix(Fraction(0), "A"), WeightedPrefix(Fraction(1), "B")]),
    ],
)
def test_what_it_names(data_path: str | list[str], expected: list[WeightedPrefix]) -> None:
    assert read_blend(data_path) == expected


def test_a_prefix_with_spaces_needs_no_quotes_if_it_is_there(tmp_path: Path) -> None:
    prefix = str(tmp_path / "1 A")
    for suffix in (".bin", ".idx"):
        Path(f"{prefix}{suffix}").touch()
    assert read_blend(prefix) == [WeightedPrefix(Fraction(1), prefix)]
    require_files(read_blend(["1", prefix]))


@pytest.mark.parametrize(
    ("data_path", "says"),
    [
        (
            "-0.7 A 0.3 B",
            r"--data-path -0.7 A 0.3 B \(valid: PREFIX, or WEIGHT .*'-0.7' is not a weight, .* least 0",
        ),
        ("nan A 0.3 B", "'nan' is not a weight"),
        ("0.3 A inf B", "'inf' is not a weight"),
        ("A B", "such as 0.7 A 0.3 B.*'A' is not a weight"),
        ("A 0.7 B 0.3", "'A' is not a weight"),
        ("1e999999999 A 1 B", "'1e999999999' is not a weight"),
        ("0 A 0 B", "--data-path 0 A 0 B: all weights are 0; at least one must be positive"),
        ("0.7 A 0.3", "--data-path 0.7 A 0.3: a weight has no prefix, or a prefix no weight; valid: "),
        ("0.7 A B", "a weight has no prefix, or a prefix no weight"),
        ("0.5 A 0.5 A", "A is named twice; add up its weights"),
        ("0.5 x/../A 0.5 ./A", "./A is named twice"),
        ("0.5 'A", r"--data-path 0.5 'A \(valid: .*: No closing quotation"),
    ],
)
def test_what_it_refuses(data_path: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        read_blend(data_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for name in ("a.bin", "a.idx", "b.bin"):
        (tmp_path / name).touch()
    require_files(read_blend(str(tmp_path / "a")))
    with pytest.raises(UsageError, match=r"--data-path .*/b: .*/b.idx does not exist$"):
        require_files(read_blend(f"1 {tmp_path}/a 1 {tmp_path}/b"))
    with pytest.raises(UsageError, match=r"a.idx.bin does not exist; give the prefix alone: .*/a$"):
        require_files(read_blend(str(tmp_path / "a.idx")))


@pytest.fixture
def verified(tmp_path: Path) -> list[WeightedPrefix]:
    """Two data sets with checksums."""
    for name in ("a", "b"):
        with IndexedDatasetWriter(tmp_path / name, "u2") as writer:
            writer.add_document(list(range(100)))
            writer.add_file(tokenizer_path(tmp_path / name), b"{}")
    return [WeightedPrefix(Fraction(1), str(tmp_path / name)) for name in ("a", "b")]


def test_a_blend_may_be_longer_than_a_name() -> None:
    assert len(read_blend(" ".join(f"1 set{number}" for number in range(100)))) == 100


@pytest.mark.parametrize("parts", [1, 3])
def test_all_ranks_together_verify_every_byte(verified: list[WeightedPrefix], parts: int, tmp_path: Path) -> None:
    files = [path for path in tmp_path.iterdir() if path.suffix != ".xxh3"]
    assert sum(verify(verified, part, parts) for part in range(parts)) == sum(path.stat().st_size for path in files)


def test_a_changed_byte_in_any_file_of_a_data_set_is_refused_by_name(
    verified: list[WeightedPrefix], tmp_path: Path
) -> None:
    """A flip within the vocabulary, in the tokens, is one that no reader can see."""
    for name in ("b.bin", "b.idx", "b-tokenizer.json", "b.xxh3"):
        right = (tmp_path / name).read_bytes()
        for place in (0, len(right) // 2, len(right) - 1):
            (tmp_path / name).write_bytes(right[:place] + bytes([right[place] ^ 1]) + right[place + 1 :])
            with pytest.raises(UsageError, match=rf"^--verify-data: {tmp_path / name}: damaged"):
                sum(verify(verified, part, 2) for part in range(2))
        (tmp_path / name).unlink()
        with pytest.raises(UsageError, match=rf"^--verify-data: {tmp_path / name}.*(no such file|does not exist)"):
            verify(verified, 0, 1)
        (tmp_path / name).write_bytes(right)


def test_checksums_of_other_files_are_none(verified: list[WeightedPrefix], tmp_path: Path) -> None:
    (tmp_path / "b.xxh3").write_bytes((tmp_path / "a.xxh3").read_bytes())
    with pytest.raises(UsageError, match=r"b\.xxh3: has no checksum of b\.bin"):
        verify(verified, 0, 1)
