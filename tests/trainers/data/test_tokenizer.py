"""Tokenizer: known ids, text that survives the round trip, and nothing that other text can trigger."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

from tests.support.data import DATA, needs
from trainers.data.tokenizer import END_OF_DOCUMENT, Tokenizer

CORPUS = [
    "the cat sat on the mat, the cat sat",
    "a dog and a cat\n\nsat there 12 times",
    "é漢字 \t mixed",
] * 5
AWKWARD = ["", " ", "\n\n x\t", "naïve 漢字 🙂\x00", "a <|endoftext|> b", "[CLS] [UNK]", "\r\n\u2028end "]


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return Tokenizer.train_bpe(CORPUS, 290)


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return Tokenizer.from_gpt2(DATA / "gpt2-bpe/encoder.json", DATA / "gpt2-bpe/vocab.bpe")


@needs("gpt2-bpe")
def test_gpt2(gpt2: Tokenizer) -> None:
    assert gpt2.encode("Hello world") == [15496, 995]
    assert gpt2.decode([15496, 995, 50256]) == "Hello world<|endoftext|>"
    assert (gpt2.vocab_size, gpt2.eod) == (50257, 50256)
    assert gpt2.can_cut_text


@needs("gpt2-bpe")
@pytest.mark.parametrize("text", AWKWARD)
def test_gpt2_round_trip(gpt2: Tokenizer, text: str) -> None:
    assert gpt2.decode(gpt2.encode(text)) == text


@pytest.mark.parametrize("text", AWKWARD)
def test_round_trip(small: Tokenizer, text: str) -> None:
    ids = small.encode(text)
    assert small.decode(ids) == text
    assert small.eod not in ids


def test_batch_is_one_by_one(small: Tokenizer) -> None:
    assert small.encode_batch(AWKWARD + CORPUS) == [small.encode(text) for text in AWKWARD + CORPUS]
    assert small.encode_batch([]) == []


def test_trained_vocabulary(small: Tokenizer) -> None:
    assert small.vocab_size == 290 and small.eod == 0
    assert len(small.encode("the cat sat")) < len("the cat sat")
    assert Tokenizer.train_bpe([], 400).vocab_size == 257


@pytest.mark.slow
@pytest.mark.parametrize("hash_seed", ["1", pytest.param("2", marks=pytest.mark.long)])
def test_training_repeats_itself_in_another_process(small: Tokenizer, tmp_path: Path, hash_seed: str) -> None:
    (tmp_path / "here.json").write_bytes(small.to_bytes())
    program = (
        "import sys; from pathlib import Path; from trainers.data.tokenizer import Tokenizer; import ast;"
        "Path(sys.argv[2]).write_bytes(Tokenizer.train_bpe(ast.literal_eval(sys.argv[1]), 290).to_bytes())"
    )
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program, repr(CORPUS), str(tmp_path / "there.json")]
    subprocess.run(command, env=environment, check=True)
    assert (tmp_path / "there.json").read_bytes() == (tmp_path / "here.json").read_bytes()


def test_save_and_load(small: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(small.to_bytes())
    again = Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert again.encode_batch(CORPUS) == small.encode_batch(CORPUS)
    assert (again.eod, again.vocab_size, again.can_cut_text) == (0, 290, True)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_the_identity_is_that_of_the_vocabulary(small: Tokenizer, tmp_path: Path) -> None:
    """It does not depend on the format of the file, and tells a vocabulary of equal size from another."""
    (tmp_path / "small.json").write_bytes(small.to_bytes())
    assert Tokenizer.from_file(tmp_path / "small.json").identity() == small.identity()
    other = Tokenizer.train_bpe([text[::-1] for text in CORPUS], 290)
    assert other.vocab_size == small.vocab_size and other.identity() != small.identity()
    ids = small.vocabulary()
    one, two = (token for token, number in ids.items() if number in (270, 280))
    swapped = tokenizers.Tokenizer(models.WordLevel(ids | {one: ids[two], two: ids[one]}, unk_token=one))
    assert Tokenizer(tokenizers.Tokenizer(models.WordLevel(ids, unk_token=one))).identity() == small.identity()
    assert Tokenizer(swapped).identity() != small.identity()


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A foreign tokenizer.json that truncates, pads, frames and folds case, without an end of document."""
    vocabulary = {"[PAD]": 0, "[CLS]": 1, "[UNK]": 2, "cat": 3, "dog": 7}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.normalizer = normalizers.Lowercase()
    backend.post_processor = processors.TemplateProcessing("[CLS] $A", None, [("[CLS]", 1)])
    backend.enable_truncation(4)
    backend.enable_padding(length=6)
    backend.save(str(tmp_path / "words.json"))
    return tmp_path / "words.json"


def test_a_foreign_tokenizer_only_encodes(words: Path) -> None:
    foreign = Tokenizer.from_file(words)
    assert foreign.encode("Cat dog cat cat cat dog cat") == [3, 7, 3, 3, 3, 7, 3]
    assert foreign.encode_batch(["cat", "dog dog"]) == [[3], [7, 7]]
    assert foreign.vocab_size == 8  # ids 4 to 6 have no token, but an embedding needs their rows
    assert not foreign.can_cut_text
    with pytest.raises(ValueError, match=r"no <\|endoftext\|>"):
        _ = foreign.eod


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.json"):
        Tokenizer.from_file(tmp_path / "none.json")
    with pytest.raises(FileNotFoundError, match=r"none\.json"):
        Tokenizer.from_gpt2(tmp_path / "none.json", tmp_path / "none.bpe")


def test_files_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({END_OF_DOCUMENT: 0}))
    (tmp_path / "a.bpe").write_text("x y z w\n")
    with pytest.raises(ValueError, match=r"a\.json"):
        Tokenizer.from_file(tmp_path / "a.json")
    with pytest.raises(ValueError, match=r"a\.bpe"):
        Tokenizer.from_gpt2(tmp_path / "a.json", tmp_path / "a.bpe")


def test_offsets_name_the_characters_of_each_token(tmp_path: Path) -> None:
    """Also where the tokenizer changes the text: capitals, accents, white space."""
    (tmp_path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "naive", "##s", "cat"])
    )
    tokenizer = Tokenizer.from_vocab(tmp_path / "vocab.txt")
    texts = ["  Naïves\tCAT", "", "cat漢"]
    found = tokenizer.encode_with_offsets(texts)
    spelt = [[text[a:b] for a, b in offsets] for text, (_, offsets) in zip(texts, found, strict=True)]
    assert spelt == [["Naïve", "s", "CAT"], [], ["cat", "漢"]]
    assert [ids for ids, _ in found] == tokenizer.encode_batch(texts)


def test_sentinels_are_the_last_ids_and_the_vocabulary_keeps_its_identity():
    own = Tokenizer.train_bpe(["the cat the cat sat"], 262)
    size = own.vocab_size
    for vocab_size, count in ((None, 4), (size + 4, 4), (size + 9, 4), (size + 2, 2)):
        found = own.with_sentinels(4, vocab_size)
        last = size + 4 if vocab_size is None else vocab_size
        ids = [last - 1 - number for number in range(count)]
        assert found.encode_around("".join(f"<extra_id_{number}>" for number in range(count))) == ids
        assert found.decode([*own.encode("the"), ids[0]]) == "the<extra_id_0>"
        assert (found.vocab_size, found.identity()) == (last, own.identity())
        assert found.with_sentinels(9) is found
        assert found.encode("<extra_id_0>") == own.encode("<extra_id_0>")  # a document's own letters
    assert own.with_sentinels(4, size) is own


def test_sentinels_have_no_place_among_ids_that_are_left_out():
    described = json.loads(Tokenizer.train_bpe(["the cat"], 260).to_bytes())
    described["model"]["vocab"] = {token: 2 * number for token, number in described["model"]["vocab"].items()}
    described["added_tokens"] = []
    found = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(described)))
    with pytest.raises(ValueError, match="leaves out ids below"):
        found.with_sentinels(4)
