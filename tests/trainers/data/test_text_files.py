"""Documents from files, and cuts in them that no tokenizer of ours can see."""

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from commengine.files.reading import InputFileError
from trainers.data.text_files import (
    LONGEST_LINE,
    TextFileError,
    TextPiece,
    cut,
    read_json_lines,
    read_lines,
    read_paragraphs,
    read_rows,
    read_text,
    sentences,
    whole,
)
from trainers.data.tokenizer import Tokenizer


def texts(pieces: list[TextPiece]) -> list[str]:
    return [piece.text for piece in whole(pieces)]


@pytest.mark.parametrize("text", ["x", "a\r\nb\rc\n\n", "é漢🙂 " * 20000])
def test_text_keeps_every_character(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_bytes(text.encode())
    pieces = list(read_text(tmp_path / "a.txt"))
    assert texts(pieces) == [text]
    assert sum(piece.size for piece in pieces) == len(text.encode())


def test_empty_text_is_no_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    assert list(read_text(tmp_path / "a.txt")) == []


def test_byte_order_mark_goes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text('{"text": "x"}', encoding="utf-8-sig")
    assert texts(list(read_text(tmp_path / "a.txt"))) == ['{"text": "x"}']
    assert texts(list(read_json_lines(tmp_path / "a.txt", "text"))) == ["x"]


def test_paragraphs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\n \n one\nline\n\t\r\ntwo\r\n\n\n three")
    assert texts(list(read_paragraphs(tmp_path / "a.txt"))) == [" one\nline", "two", " three"]


def test_json_lines(tmp_path: Path) -> None:
    rows: list[dict[str, str]] = [{"text": "one\n\ntwo"}, {"id": "3", "text": ""}, {"text": "é🙂"}]
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    assert texts(list(read_json_lines(tmp_path / "a.jsonl", "text"))) == [row["text"] for row in rows]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "A.JSON"])
def test_lines_are_texts_and_blank_ones_are_none(tmp_path: Path, name: str) -> None:
    """A next-line character and a line separator do not end a line; white space within a text stays."""
    found = ["one ", "\ttwo", "a\x85b\u2028é🙂"]
    lines = found if name == "a.txt" else [json.dumps({"id": 1, "key": text}, ensure_ascii=False) for text in found]
    path = tmp_path / name
    path.write_bytes("\ufeff{}\r\n\n  \r\n{}\n{}".format(*lines).encode())
    expected = [(f"{path}: line {number}", text) for number, text in zip((1, 4, 5), found, strict=True)]
    assert list(read_lines(path, "key")) == expected
    path.write_bytes(b"\n \n")
    assert not list(read_lines(path, "key"))


def test_a_line_that_holds_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'{"key": "x"}\n\n{"text": "x"}\n')
    with pytest.raises(TextFileError, match=r"a\.json: line 3: no key 'key'; the keys are 'text'"):
        list(read_lines(tmp_path / "a.json", "key"))
    (tmp_path / "a.txt").write_bytes(b"one\n\xff\n")
    with pytest.raises(TextFileError, match=r"a\.txt: line 2: not UTF-8"):
        list(read_lines(tmp_path / "a.txt", "key"))
    with pytest.raises(InputFileError, match="is a folder, not a file"):
        list(read_lines(tmp_path, "key"))


@pytest.mark.parametrize(
    "line,message",
    [
        (b'{"text": ', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'["text"]', "want a JSON object, got list"),
        (b'{"body": "x", "id": 1}', "no key 'text'; the keys are 'body', 'id'"),
        (b"{}", "the keys are none"),
        (b'{"text": null}', "NoneType, not text"),
        (b'{"text": "\\ud800"}', "not valid Unicode"),
        (b'{"text": "\xff"}', "not UTF-8"),
    ],
)
def test_bad_json_line(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x"}\n\n' + line + b"\n")
    with pytest.raises(TextFileError, match=rf"a\.jsonl: line 3: .*{message}"):
        list(read_json_lines(tmp_path / "a.jsonl", "text"))


@pytest.mark.parametrize("read", [lambda path: read_json_lines(path, "text"), read_paragraphs])
def test_a_line_that_may_not_fit_into_memory_is_named(tmp_path: Path, read: Callable[[Path], Iterator[object]]) -> None:
    with (tmp_path / "a.jsonl").open("wb") as file:
        file.write(b'{"text": "x"}\n')
        file.seek(LONGEST_LINE, os.SEEK_CUR)  # zero bytes that take no room on the disk
        file.write(b"\n")
    with pytest.raises(TextFileError, match=r"a\.jsonl: line 2: more than 33,554,432 bytes"):
        list(read(tmp_path / "a.jsonl"))


def test_text_in_another_encoding(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(TextFileError, match=r"a\.txt: not UTF-8"):
        list(read_text(tmp_path / "a.txt"))
    with pytest.raises(TextFileError, match=r"a\.txt: line 1: not UTF-8"):
        list(read_paragraphs(tmp_path / "a.txt"))


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_utf_16_without_a_mark_and_lines_that_end_with_cr_alone_are_named(
    encoding: str, name: str, tmp_path: Path
) -> None:
    """ASCII in UTF-16 is UTF-8 with zero bytes, and old computers' text has one line."""
    path = tmp_path / name
    reads: list[Callable[[Path], Iterator[object]]] = [
        read_text, read_paragraphs, lambda path: read_json_lines(path, "text"), lambda path: read_lines(path, "text")
    ]  # fmt: skip
    lines = '{"text": "one"}\n{"text": "two"}\n'
    for content, words in (
        (("x" * 20_000 + lines).encode(encoding), "has zero bytes: text must be UTF-8, and this may be UTF-16"),
        (lines.replace("\n", "\r").encode(), "its lines end with CR alone"),
    ):
        path.write_bytes(content)
        for read in reads:
            with pytest.raises(TextFileError, match=words):
                list(read(path))
    for kept in (lines, lines.replace("\n", "\r\n"), "a\rb\nc", '{"text": "a\\u0000b"}', "one\r"):
        path.write_bytes(kept.encode())
        assert texts(list(read_text(path))) == [kept]


def test_values_beside_the_text_are_as_they_are_spelled(tmp_path: Path) -> None:
    line = ' {"a" : 1E2, "text": "caf\\u00e9", "b":1e400 , "c": [ -0, {"x,}": "\\ud800\\"]"} ], "\\u0064": null}'
    (tmp_path / "a.jsonl").write_text(f"{line}\n")
    ((row, _),) = read_rows(tmp_path / "a.jsonl", "text", written=True)
    assert row == {
        "a": "1E2", "text": "café", "b": "1e400", "c": '[ -0, {"x,}": "\\ud800\\"]"} ]', "d": "null"
    }  # fmt: skip
    for number in ("NaN", "-Infinity", "[Infinity]"):
        (tmp_path / "a.jsonl").write_text(f'{{"text": "x"}}\n{{"text": "x", "n": {number}}}\n')
        with pytest.raises(TextFileError, match=r"a\.jsonl: line 2: not JSON: -?\w+ is a number of no JSON"):
            list(read_rows(tmp_path / "a.jsonl", "text", written=True))
        assert len(list(read_json_lines(tmp_path / "a.jsonl", "text"))) == 2  # who takes the text alone takes it


def in_blocks(text: str, size: int) -> list[TextPiece]:
    return [
        TextPiece(text[i : i + size], i + size >= len(text), len(text[i : i + size].encode()))
        for i in range(0, len(text), size)
    ]


def test_cut_changes_neither_text_nor_tokens() -> None:
    tokenizer = Tokenizer.train_bpe(["  a\n\n aa 1\t\t'aa", "\n \n \n\n--  --\r\n\r\n"] * 3, 300)
    rng = random.Random(0)
    for _ in range(2000):
        text = "".join(rng.choices("aZ 1'.\n\t\r\u00a0\x1c\u2003é漢-\x85s", k=rng.randint(1, 60)))
        pieces = list(cut(in_blocks(text, rng.randint(1, 10)), rng.randint(1, 12)))
        assert texts(pieces) == [text]
        assert sum(piece.size for piece in pieces) == len(text.encode())
        parts = tokenizer.encode_batch([piece.text for piece in pieces])
        assert [token for part in parts for token in part] == tokenizer.encode(text), pieces


WORDS = ["a", "aa", "aab", "é", "漢", "1", "'s", "<x>", "x", "Z"]


def backends() -> dict[str, tokenizers.Tokenizer]:
    """Tokenizers of each kind, whose vocabularies have the characters of WORDS. Only the first ones can be cut."""
    letters = sorted({letter for word in WORDS for letter in word} | set("\u2581 \n\t.-"))
    text = [" ".join(WORDS), "  a\n\n aa 1\t\t'aa <x>", "\n \n \n\n--  --\r\n\r\n"] * 3
    found = {"byte-level": tokenizers.Tokenizer.from_str(Tokenizer.train_bpe(text, 300).to_bytes().decode())}
    metaspace = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), *((one, -2.0) for one in letters)], unk_id=0))
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace()
    found["Unigram with Metaspace"] = metaspace
    prepended = tokenizers.Tokenizer(models.BPE({one: n for n, one in enumerate(["<unk>", *letters])}, []))
    prepended.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    found["BPE with a normalizer that prepends"] = prepended
    pieces = ["[UNK]", *letters, *(f"##{letter}" for letter in letters)]
    wordpiece = tokenizers.Tokenizer(models.WordPiece({one: n for n, one in enumerate(pieces)}, unk_token="[UNK]"))
    wordpiece.pre_tokenizer, wordpiece.normalizer = pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer()
    found["WordPiece"] = wordpiece
    prefixed = tokenizers.Tokenizer.from_str(found["byte-level"].to_str())
    prefixed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return found | {"byte-level with a prefix": prefixed}


@pytest.mark.parametrize("kind", backends())
def test_pieces_have_the_tokens_of_the_whole_text_whatever_tokens_are_added(kind: str) -> None:
    """Added tokens of blanks and words, with each flag, in texts of them: where `can_cut_text` allows it, pieces."""
    rng, cuts, changed, plain = random.Random(1), 0, 0, backends()[kind].to_str()
    for _ in range(200):
        backend = tokenizers.Tokenizer.from_str(plain)
        added = []
        for _ in range(rng.randint(1, 3)):
            content = "".join(rng.choices([*WORDS, *" \n"], [3] * len(WORDS) + [1, 1], k=rng.randint(1, 3)))
            flags = {name: rng.random() < 0.2 for name in ("lstrip", "rstrip", "single_word", "normalized")}
            added.append(content)
            token = tokenizers.AddedToken(content, **flags)
            (backend.add_special_tokens if rng.random() < 0.4 else backend.add_tokens)([token])
        tokenizer = Tokenizer(backend)
        for _ in range(5):
            text = "".join(rng.choices([*WORDS, *added * 3, *"     \n\n\t\r\u00a0\u3000."], k=rng.randint(1, 30)))
            pieces = [piece.text for piece in cut([TextPiece(text, True, 0)], rng.randint(1, 12))]
            parts = [token for ids in tokenizer.encode_batch(pieces) for token in ids]
            if tokenizer.can_cut_text:
                cuts += len(pieces) > 1
                assert parts == tokenizer.encode(text), (pieces, backend.get_added_tokens_decoder())
            changed += parts != tokenizer.encode(text)
    assert changed  # without `can_cut_text`
    assert (cuts > 200) is (kind == "byte-level")


def test_cut_keeps_documents_apart() -> None:
    documents = ["a b c d e f", "", "g", "h i j k l m n"]
    pieces = list(cut([TextPiece(text, True, 1) for text in documents], 4))
    assert texts(pieces) == documents
    assert max(len(piece.text) for piece in pieces) <= 4


def test_text_without_whitespace_stays_whole() -> None:
    pieces = list(cut(in_blocks("x" * 100_000 + " y" * 10, 7), 100))
    assert [len(piece.text) for piece in pieces] == [100_000, 20]


def test_sentences_are_pieces_of_their_document() -> None:
    first = "Dr. Ada wrote it. Was it good?  Yes!\n\nA heading\n\nThe end"
    documents = [TextPiece(text, True, 10) for text in (first, "", " \n", "One.")]
    found = list(sentences(documents, "en"))
    assert [piece.text.strip() for piece in found] == [
        "Dr. Ada wrote it.", "Was it good?", "Yes!", "A heading", "The end", "", "", "One."
    ]  # fmt: skip
    assert [piece.last for piece in found] == [False] * 4 + [True] * 4
    assert sum(piece.size for piece in found) == 40
    joined = " ".join(piece.text for piece in found[:5])
    assert joined.split() == first.split()  # only blank text between sentences is lost
