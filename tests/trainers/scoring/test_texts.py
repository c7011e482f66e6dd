"""Texts are encoded whole, counted before they are detokenized, and are the same on all ranks; bad files are named."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from commengine import UsageError
from trainers.data.indexed import IndexedDataset
from trainers.data.indexed_writer import IndexedDatasetWriter
from trainers.data.same_data import KnownData
from trainers.data.tokenizer import Tokenizer
from trainers.scoring import texts
from trainers.settings.commands import GPTSettings

FIXTURE = Path(__file__).with_name("articles.raw")


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train_bpe([FIXTURE.read_text(encoding="utf-8")], 400)


def test_a_long_text_has_the_tokens_that_it_has_as_one(tokenizer):
    """It is cut for the tokenizer's threads where no token is."""
    text = FIXTURE.read_text(encoding="utf-8") * 40
    assert len(text) > 70_000 and tokenizer.can_cut_text
    found = texts.encoded(tokenizer, text)
    assert found.dtype == np.int32 and found.tolist() == tokenizer.encode(text)


def test_wikitext_is_counted_before_and_encoded_after(tokenizer):
    raw = FIXTURE.read_bytes().decode()
    (tokens,), counts = texts.read_whole(str(FIXTURE), tokenizer, wikitext=True)
    assert tokens.tolist() == tokenizer.encode(texts.detokenized_wikitext(raw))
    assert counts == texts.TextCounts(1, 456, 434, len(tokens))
    (tokens,), counts = texts.read_whole(str(FIXTURE), tokenizer, wikitext=False)
    assert tokens.tolist() == tokenizer.encode(raw) and counts == texts.TextCounts(1, 456, 432, len(tokens))


def test_lines_of_json_are_texts_of_their_own(tmp_path, tokenizer):
    rows = [{"body": "The mole"}, {"body": ""}, {"body": "a clock \n", "id": 3}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    tokens, counts = texts.read_json_lines(str(tmp_path / "a.jsonl"), "body", tokenizer)
    assert [one.tolist() for one in tokens] == [tokenizer.encode(row["body"]) for row in rows]
    assert counts == texts.TextCounts(3, 2 + 2, 2 + 3, sum(map(len, tokens)))  # the empty one has no word


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "a.jsonl: has no text"),
        (b'{"text": "a"}\n{"words": "b"}\n', "a.jsonl: line 2: no key 'text'; the keys are 'words'"),
        (b'{"text": "a"\n', "a.jsonl: line 1: not JSON"),
    ],
)
def test_a_bad_row_is_named(tmp_path, tokenizer, content, said):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=said):
        texts.read_json_lines(str(tmp_path / "a.jsonl"), "text", tokenizer)


@pytest.mark.parametrize(("content", "said"), [(b" \n\n", "a: has no text"), (b"a\xff", "a: not UTF-8 text")])
def test_a_bad_file_is_named(tmp_path, tokenizer, content, said):
    (tmp_path / "a").write_bytes(content)
    for wikitext in (False, True):
        with pytest.raises(ValueError, match=said):
            texts.read_whole(str(tmp_path / "a"), tokenizer, wikitext=wikitext)


def test_the_held_out_text_of_a_run_is_one_stream_for_each_data_set(tmp_path, tokenizer, capsys):
    documents = [[*tokenizer.encode(f"The mole of {year}"), tokenizer.eod] for year in range(1871, 1891)]
    for name in "ab":
        with IndexedDatasetWriter(tmp_path / name, np.uint16) as writer:
            for document in documents:
                writer.add_document(np.array(document))
    settings = GPTSettings(
        data_path=["1", str(tmp_path / "a"), "0", str(tmp_path / "b")], split="8,2", vocab_size=tokenizer.vocab_size
    )
    (tokens,), counts = texts.read_held_out(settings, tokenizer)
    assert (
        tokens.tolist() == [token for document in documents[16:] for token in document]
        and len(IndexedDataset(tmp_path / "a")) == 20
    )
    assert counts == texts.TextCounts(1, 16, 16, len(tokens))
    assert texts.read_held_out(settings, None).counts == texts.TextCounts(1, 0, 0, len(tokens))
    now = KnownData.of(IndexedDataset(tmp_path / "a"))
    old, moved = now._replace(identity="12ab"), now._replace(name="moved", identity="other")
    for sources in ([now], [old, now], [moved], [now._replace(checksums="", written=0)]):
        assert texts.read_held_out(settings, None, sources).counts.tokens == len(tokens)
    assert not capsys.readouterr().err
    texts.read_held_out(settings, None, [now._replace(written=9)])
    assert "the run read what was written at 1970-01-01 00:00:09; sizes" in capsys.readouterr().err
    found = f"{now.identity} {now.checksums}"
    said = (
        f"--task held-out: {now.name} holds other data (identity {found}) than the run was trained on (identity 12ab "
    )
    with pytest.raises(UsageError, match=r"identity .* 00ff"):
        texts.read_held_out(settings, None, [now._replace(checksums="00ff")])
    with pytest.raises(UsageError) as raised:
        texts.read_held_out(settings, None, [now._replace(name=str(tmp_path / "b")), old])
    assert str(raised.value).startswith(said)
    for changed, said in (
        ({"data_path": None, "mock_data": True}, "trained on --mock-data"),
        ({"data_path": None}, "trained by another program"),  # as hf:FOLDER gives the settings
        ({"split": "1"}, "--split 1 of the run leaves no validation documents"),
        ({"vocab_size": 5}, "outside the run's vocabulary of 5"),
    ):
        with pytest.raises(UsageError, match=f"--task held-out: .*{said}"):
            texts.read_held_out(GPTSettings(**(asdict(settings) | changed)), tokenizer)


@pytest.mark.mpi
def test_every_rank_gets_the_texts_of_rank_0_or_its_error(world):
    def read():
        assert world.rank == 0
        tokens = [np.arange(3, dtype=np.int32), np.arange(0, dtype=np.int32), np.array([70_000], dtype=np.int32)]
        return texts.Texts(tokens, texts.TextCounts(3, 1, 2, 4))

    tokens, counts = texts.on_all_ranks(world, "--data", read)
    assert [one.tolist() for one in tokens] == [[0, 1, 2], [], [70_000]]
    assert counts == texts.TextCounts(3, 1, 2, 4)
    assert texts.broadcast_tokens(world, []) == []
    assert [one.tolist() for one in texts.broadcast_tokens(world, [np.arange(0)])] == [[]]
    for error, said in (
        (ValueError("f: has no text"), "--data f: has no text"),
        (FileNotFoundError(2, "No such file", "f"), "--data f: No such file"),
        (FileNotFoundError("f.idx: no such file"), "--data f.idx: no such file"),
        (UsageError("--load: no tokenizer"), "--load: no tokenizer"),
    ):

        def fail(error=error):
            raise error

        with pytest.raises(UsageError) as raised:
            texts.on_all_ranks(world, "--data", fail)
        assert str(raised.value) == said


def test_the_words_of_held_out_documents_do_not_count_the_token_that_ends_them(tmp_path):
    """Llama 2's tokenizer has another one than GPT-2's. This one has a space between tokens."""
    vocabulary = {token: number for number, token in enumerate(["<unk>", "</s>", "a", "mole"])}
    llama = Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>")))
    assert llama.end_token == "</s>" and llama.decode([2, 3, 1]) == "a mole </s>"
    with IndexedDatasetWriter(tmp_path / "a", np.uint16) as writer:
        for document in ([3, 1], [2, 3, 1]):
            writer.add_document(np.array(document))
    settings = GPTSettings(data_path=[str(tmp_path / "a")], split="0,1", vocab_size=4)
    assert texts.read_held_out(settings, llama).counts.words == 1 + 2
