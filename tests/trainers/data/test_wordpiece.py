"""WordPiece: a vocabulary that does not change from process to process, and what its tokens are for."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import BertTokenizer

from tests.support.data import DATA, needs
from trainers.data import wordpiece
from trainers.data.tokenizer import Tokenizer
from trainers.data.wordpiece import SPECIAL, WordPieces, cut_words

TEXTS = [
    "The cats sat on the mats, and the dog's cat sat there, too.",
    "Unaffable naïveté; 漢字 and others: 12 times 34!\nA second line.",
    "playing played plays player, walking walked walks walker",
] * 3
VOCABULARY = [*SPECIAL, *"abcdefghijklmnopqrstuvwxyz", "un", "##aff", "##able", "##s", "cat", ",", "."]


def texts() -> list[str]:
    return TEXTS


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return Tokenizer.train_wordpiece(texts, 120)


@pytest.mark.long
@pytest.mark.slow
def test_the_same_texts_give_the_same_vocabulary_in_another_process(small: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "here.json").write_bytes(small.to_bytes())
    program = (
        "import sys; from tests.trainers.data.test_wordpiece import texts;"
        "from pathlib import Path; from trainers.data.tokenizer import Tokenizer;"
        "Path(sys.argv[1]).write_bytes(Tokenizer.train_wordpiece(texts, 120).to_bytes())"
    )
    root = Path(__file__).parents[3]
    for n in range(2):  # the order of the library's hash tables differs in each
        subprocess.run([sys.executable, "-c", program, str(tmp_path / f"{n}.json")], cwd=root, check=True)
        assert (tmp_path / f"{n}.json").read_bytes() == (tmp_path / "here.json").read_bytes()


def test_a_trained_vocabulary_has_the_special_tokens_first_and_every_character(small: Tokenizer) -> None:
    vocabulary = small.vocabulary()
    assert [vocabulary[token] for token in SPECIAL] == [0, 1, 2, 3, 4]
    assert small.vocab_size == 120 == len(vocabulary)
    assert sorted(vocabulary.values()) == list(range(120))
    assert vocabulary["[UNK]"] not in small.encode(" ".join(TEXTS))
    assert {"c", "##c", "漢", ","} <= vocabulary.keys()
    assert not {"##漢", "##,"} & vocabulary.keys()  # these are words by themselves
    assert any(len(token) > 3 and not token.startswith("[") for token in vocabulary)  # and it has learnt words


def test_room_for_the_characters_is_needed() -> None:
    with pytest.raises(ValueError, match=r"want at least \d+ tokens for the characters of this text, got 20"):
        wordpiece.train(texts, 20, lowercase=True)


def test_the_use_of_each_token() -> None:
    pieces = WordPieces.of({token: number for number, token in enumerate(VOCABULARY)})
    assert (pieces.pad, pieces.cls, pieces.sep, pieces.mask) == (0, 2, 3, 4)
    assert [VOCABULARY[n] for n in range(len(VOCABULARY)) if pieces.continues[n]] == ["##aff", "##able", "##s"]
    assert pieces.ordinary.tolist() == list(range(5, len(VOCABULARY)))
    assert pieces.continuing(pieces.ordinary + 1000).shape == pieces.ordinary.shape  # no id is an error here


@pytest.mark.parametrize("missing", SPECIAL)
def test_a_vocabulary_without_a_special_token_is_refused(missing: str, tmp_path: Path) -> None:
    lines = [token for token in VOCABULARY if token != missing]
    (tmp_path / "vocab.txt").write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=rf"vocab.txt: .* the vocabulary has no \{missing}; BERT needs"):
        Tokenizer.from_vocab(tmp_path / "vocab.txt")


@pytest.mark.parametrize(
    ("content", "message"), [(b"a\nb\na\n", "the token 'a' is there twice"), (b"\xff\n", "'utf-8' codec")]
)
def test_a_file_that_is_no_vocabulary(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_vocab(tmp_path / "vocab.txt")


@pytest.mark.parametrize("vocab_size", [0, 5])
def test_mock_data_needs_a_word(vocab_size: int) -> None:
    with pytest.raises(ValueError, match="no token besides"):
        WordPieces.mock(vocab_size)
    assert WordPieces.mock(6).ordinary.tolist() == [5]


def agrees(ours: Callable[[str], list[int]], theirs: BertTokenizer, text: str) -> None:
    assert ours(text) == theirs(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("lowercase", [True, False])
def test_ids_are_those_of_transformers(lowercase: bool, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    ours = Tokenizer.from_vocab(tmp_path / "vocab.txt", lowercase=lowercase)
    theirs = BertTokenizer(str(tmp_path / "vocab.txt"), do_lower_case=lowercase)
    for text in ("unaffable cats, Cats.", "Ünaffable  cat\tS", "", "漢字 cat"):
        agrees(ours.encode, theirs, text)
    assert ours.encode("[MASK]") != [4]  # a special token that is spelt out in a text is text


@needs("bert-vocab")
def test_ids_of_bert_base_uncased() -> None:
    tokenizer = Tokenizer.from_file(DATA / "bert-vocab/bert-base-uncased-vocab.txt")
    assert tokenizer.vocab_size == 30522
    assert tokenizer.encode("Hello world") == [7592, 2088]
    pieces = tokenizer.wordpieces()
    assert (pieces.pad, pieces.cls, pieces.sep, pieces.mask) == (0, 101, 102, 103)
    assert tokenizer.decode([101, 7592, 103, 102]) == "[CLS] hello [MASK] [SEP]"


@pytest.mark.parametrize("text", ["", "a b", "x" * 25, " " * 31 + "a", "ab " * 20, "a" * 10, "b\n" + "c" * 12 + "\td"])
def test_only_long_words_are_cut(text: str) -> None:
    parts = list(cut_words([text], longest=10))
    assert "".join(parts) == text
    assert len(parts) == 1 or all(not part.strip() or len(part) <= 10 or " " in part for part in parts)
    runs = [run for part in parts for run in re.findall(r"\s+|\S+", part)]
    assert max(map(len, runs), default=0) <= 10
    assert (parts == [text]) == (max(map(len, re.findall(r"\s+|\S+", text)), default=0) < 10)


def test_an_error_of_the_texts_is_raised_from_training() -> None:
    def texts() -> Iterator[str]:
        yield "a b"
        raise OSError("cannot be read")

    with pytest.raises(OSError, match="cannot be read"):
        Tokenizer.train_bpe(texts(), 300)
