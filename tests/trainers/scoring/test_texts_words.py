"""WikiText's words and its text: a fixture, each rule, and the published counts where the data are at hand."""

import math
from pathlib import Path

import pytest

from tests.support.data import DATA, needs
from trainers.data.tokenizer import Tokenizer
from trainers.scoring import texts
from trainers.scoring.texts import encoded

FIXTURE = Path(__file__).with_name("articles.raw")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("the players ' union", "the players' union"),
        ("a well @-@ known 1 @,@ 000 and 2 @.@ 5", "a well-known 1,000 and 2.5"),
        ("so : one ; two . Three ! Four ? five , six", "so: one; two. Three! Four? five, six"),
        ("( in brackets ) [ square ] { curly }", "(in brackets) [square] {curly}"),
        ("he said \" never \" and ' ever '", "he said \"never\" and 'ever'"),
        ("a \n = = = = Deep = = = = \n b", "a\n==== Deep ====\nb"),
        (" = = = Notes = = = ", " === Notes === "),
        ("45 ° north , N people and the dog 's tail", "45°north, 1 people and the dog's tail"),
    ],
)
def test_text_is_as_a_writer_spells_it(before, after):
    assert texts.detokenized_wikitext(before) == after


def test_words_between_spaces_and_between_white_space():
    assert texts.paper_words(" a b\nc  d ") == 4  # "a", "b\nc", "" and "d"
    assert texts.harness_words(" a b\nc  d ") == 6  # an empty one at either end
    assert [texts.paper_words(""), texts.harness_words("")] == [1, 1]


def test_the_fixture_has_the_counts_of_other_programs():
    """Such as ``wc -w`` and a count of spaces."""
    text = FIXTURE.read_text(encoding="utf-8")
    articles = texts.wikitext_documents(text)
    assert [one.split("\n")[0].strip() for one in articles] == ["= The Long Mole =", "= Harbour Clock ="]
    assert "\n".join(articles) == text[text.index(" = The Long") :]
    assert texts.paper_words(text) == 456 == text.strip().count(" ") + 1
    assert list(map(texts.harness_words, articles)) == [252, 182]
    assert len(text.split()) == 430 == 252 + 182 - 4  # as "wc -w" counts; an article has white space at both ends
    spelt = texts.detokenized_wikitext(text)
    for piece in (
        '(known locally as the "Arm") is a 1,240-metre', "7.5 metres", "== Construction ==", "54°north. Some",
        "[Halloran & Sons], who", 'Visitors ask: "Which of them is right?" The', "=== Copies ===",
    ):  # fmt: skip
        assert piece in spelt


@needs("wikitext-2-raw", "gpt2-bpe")
def test_the_published_counts():
    raw = (DATA / "wikitext-2-raw" / "wiki.test.raw").read_bytes().decode()
    bpe = DATA / "gpt2-bpe"
    assert texts.paper_words(raw) == 245_570
    articles = texts.wikitext_documents(raw)
    assert (len(articles), sum(map(texts.harness_words, articles))) == (62, 241_335)
    tokenizer = Tokenizer.from_gpt2(bpe / "encoder.json", bpe / "vocab.bpe")
    assert len(encoded(tokenizer, texts.detokenized_wikitext(raw))) == 272_045


def test_perplexity_beyond_what_a_float_holds():
    assert texts.perplexity(math.log(7) * 5, 5) == pytest.approx(7, rel=1e-15)
    assert texts.perplexity(1e9, 3) == math.inf and math.isnan(texts.perplexity(1.0, 0))
