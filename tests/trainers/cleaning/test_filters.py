"""Mending equals ftfy's; length counts a tokenizer's tokens exactly; other languages are dropped."""

import json

import ftfy
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from commengine import UsageError
from tests.support.corpora import paragraphs
from trainers.cleaning.documents import Document, StageCount
from trainers.cleaning.filters import DropShort, FixText, KeepLanguages
from trainers.data.tokenizer import Tokenizer

# Letters of which mojibake, entities, escapes and line breaks are made.
BROKEN = st.lists(
    st.sampled_from([
        "a", "é", "Ã©", "â€™", "“", "ﬁ", "&amp;", "&lt;", "<b>", "&", "\n", "\r\n", "\r", "\t", "\x00", "\x1b[31m",
        "\x85", "ＬＯＵＤ", "\u2028", "\xa0", "e\u0301", "plain words ", "Â", "\ufeff", "it’s", "\x7f",
    ]),
    max_size=12,
)  # fmt: skip


def run(stage, texts):
    count = StageCount("stage")
    documents = count.counted(stage, [Document({"n": n}, text) for n, text in enumerate(texts)])
    return [(document.row["n"], document.text) for document in documents], count


@settings(max_examples=300, deadline=None)
@given(BROKEN)
@example(["a &amp; b", "\n", "<b>", "\n", "&amp;"])  # after a line with "<", ftfy decodes no entity
@example(["<b>", "\n", "&amp;"])
def test_mending_is_ftfys(pieces):
    text = "".join(pieces)
    assert FixText().fixed(text) == ftfy.fix_text(text)


@settings(deadline=None)
@given(st.text(st.characters(max_codepoint=127), max_size=200))
def test_mending_ascii_is_ftfys(text):
    assert FixText().fixed(text) == ftfy.fix_text(text)


def test_mended_documents_are_counted():
    kept, count = run(FixText(), ["plain", "schÃ¶n", "\x00\x01", "grün"])
    assert kept == [(0, "plain"), (1, "schön"), (3, "grün")]
    assert (count.changed, count.dropped) == (2, {"empty": 1})
    assert (count.documents_in, count.documents_out) == (4, 3)
    assert count.bytes_out == len("plainschöngrün".encode())


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train_bpe(paragraphs(50), 600)


@pytest.mark.parametrize("can_cut", [True, False])
def test_127_tokens_are_dropped_and_128_kept(tokenizer, tmp_path, can_cut):
    if not can_cut:  # a tokenizer of which words and bytes say nothing
        (tmp_path / "t.json").write_bytes(tokenizer.to_bytes())
        settings = json.loads((tmp_path / "t.json").read_text())
        settings["normalizer"] = {"type": "Lowercase"}
        (tmp_path / "t.json").write_text(json.dumps(settings))
        tokenizer = Tokenizer.from_file(tmp_path / "t.json")
    assert tokenizer.can_cut_text is can_cut
    starts = [tokenizer.decode(tokenizer.encode(text)[:size]) for text in paragraphs(40) for size in (126, 127)]
    below = next(text for text in starts if len(tokenizer.encode(text)) == 126)  # the end token comes on top
    enough = next(text for text in starts if len(tokenizer.encode(text)) == 127)
    kept, count = run(DropShort(tokenizer, 128), [below, enough, below])
    assert kept == [(1, enough)] and count.dropped == {"fewer than 128 tokens": 2}


def test_length_is_that_of_the_tokenizer(tokenizer):
    texts = [text[:size] for text, size in zip(paragraphs(150, words=70), range(0, 300, 2), strict=True)]
    texts += ["a" * 60, " " * 300, "\u2003 é" * 30, "x\x1cy\x1dz " * 12, "a b " * 14, "a b " * 15, ""]
    kept, _ = run(DropShort(tokenizer, 31), texts)
    assert [n for n, _ in kept] == [n for n, text in enumerate(texts) if len(tokenizer.encode(text)) + 1 >= 31]
    assert 40 < len(kept) < len(texts) - 40


@pytest.mark.slow
def test_other_languages_are_dropped():
    texts = {
        "en": "The committee will meet again in the spring, when the report on the harbour has been published.",
        "de": "Der Ausschuss wird im Frühjahr wieder zusammentreten, wenn der Bericht über den Hafen erschienen ist.",
        "fr": "Le comité se réunira de nouveau au printemps, lorsque le rapport sur le port aura été publié.",
    }
    kept, count = run(KeepLanguages(["en", "fr"]), list(texts.values()))
    assert [n for n, _ in kept] == [0, 2] and count.dropped == {"language de": 1}
    assert count.examples["language de"][0][1] == texts["de"]


def test_a_language_that_is_not_known():
    with pytest.raises(UsageError, match=r"--languages xx: not known; valid: .*\ben\b"):
        KeepLanguages(["en", "xx"])


@pytest.mark.parametrize("module, stage", [("ftfy", FixText), ("py3langid.langid", lambda: KeepLanguages(["en"]))])
def test_a_library_that_is_not_installed_is_named(monkeypatch, module, stage):
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(UsageError, match=r"pip install '\.\[corpus\]'"):
        stage()
