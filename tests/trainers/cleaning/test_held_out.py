"""Overlap by 8-grams against brute force; pieces against a plain version of Megatron-LM's rule."""

import random
import re

import pytest

from tests.support.corpora import paragraphs, vocabulary
from trainers.cleaning import held_out
from trainers.cleaning.documents import Document, StageCount
from trainers.cleaning.held_out import Decontaminate, words


def plain_words(text):
    return [word.lower() for word in re.findall(r"\w+", text)]


def ngrams(text, n):
    found = plain_words(text)
    return [tuple(found[at : at + n]) for at in range(len(found) - n + 1)]


def quoting(rng, texts, sources):
    """Texts into which passages of sources are put, of 3 to 30 words, with other punctuation and case."""
    made = []
    for text in texts:
        parts = text.split(" ")
        for _ in range(rng.choice((0, 0, 1, 3))):
            source = rng.choice(sources).split(" ")
            length, at = rng.randint(3, 30), rng.randrange(len(source))
            parts.insert(rng.randrange(len(parts)), ", ".join(source[at : at + length]).upper())
        made.append(" ".join(parts))
    return made


@pytest.fixture(scope="module")
def sources():
    return paragraphs(40, seed=11)


@pytest.fixture(scope="module")
def texts(sources):
    return [*quoting(random.Random(1), paragraphs(150, seed=12), sources), "", "one", "İstanbul " * 9]


@pytest.mark.mpi
@pytest.mark.sizes(1)
def test_overlap_equals_brute_force(world, sources, texts):
    parts = {"a": sources[:25], "b": sources[25:]}
    stage = Decontaminate(parts.items(), "nothing", 0.1)
    files = [{gram for text in part for gram in ngrams(text, 8)} for part in parts.values()]
    for output, some in enumerate((texts, texts[::2])):
        for text in some:
            hits = [gram in files[0] | files[1] for gram in ngrams(text, 8)]
            assert stage.overlap(text, output) == (sum(hits) / len(hits) if hits else 0)
    both = [{gram for text in some for gram in ngrams(text, 8)} for some in (texts, texts[::2])]
    for row, name, grams in zip(stage.shares(world), parts, files, strict=True):
        assert (row["file"], row["ngrams"]) == (name, len(grams))
        found = [len(grams & corpus) for corpus in both]
        assert [row["found_in_input"], row["found_in_output"]] == found and found[0] > found[1] > 0
        assert [row["share_in_input"], row["share_in_output"]] == [one / len(grams) for one in found]


def plain_pieces(text, sources):
    """filter_ngrams.py's rule for one size of n-grams, word by word. Matches end where they end in the text."""
    cut = {gram for source in sources for gram in ngrams(source, 13)}
    cut |= {tuple(plain_words(source)) for source in sources if 8 <= len(plain_words(source)) < 13}
    done, todo = [], [text]
    while todo:
        part = todo.pop(0)
        found = list(re.finditer(r"\w+", part))
        spans = [
            (found[at].start(), found[at + n - 1].end())
            for at in range(len(found))
            for n in range(13, 7, -1)
            if at + n <= len(found) and tuple(word[0].lower() for word in found[at : at + n]) in cut
        ]
        if not spans:
            done.append(part)
            continue
        begin, end = spans[0]
        stop = begin - 200
        while stop > 0 and part[stop] not in ".!?":
            stop -= 1
        before = part[: stop + 1] if stop > 0 else ""
        start = end + 200
        while start < len(part) and part[start] not in ".!?":
            start += 1
        after = part[start + 1 :]
        done += [before] if len(before) >= 200 else []
        todo += [after] if len(after) >= 200 else []
    return done


@pytest.mark.slow
def test_pieces_are_those_of_the_rule(sources):
    rng = random.Random(2)
    short = [" ".join(rng.sample(vocabulary(3000), n)) for n in (7, 8, 10, 12)]
    texts = quoting(rng, paragraphs(60, words=500, seed=13), sources)
    texts += [f"{text} {phrase} {text}" for text, phrase in zip(paragraphs(4, words=200, seed=14), short, strict=True)]
    held = Decontaminate([("a", sources + short)], "pieces", 0.1)
    found = [held.pieces(text) for text in texts]
    assert found == [plain_pieces(text, sources + short) for text in texts]
    numbers = [len(pieces) for pieces in found]
    assert 1 in numbers and max(numbers) >= 3
    assert [len(pieces) for pieces in found[-4:]] == [1, 2, 2, 2]  # 7 words are too few to cut out


def run(stage, texts):
    count = StageCount("stage")
    documents = count.counted(stage, [Document({"n": n}, text) for n, text in enumerate(texts)])
    return documents, count


def test_a_planted_article_is_removed(sources):
    clean = paragraphs(30, seed=21)
    texts = [*clean, sources[3], f"{clean[0]} {sources[4]}", f"{' '.join(clean[:20])} {sources[5][:150]}"]
    stage = Decontaminate([("a", sources)], "document", 0.1)
    kept, count = run(stage, texts)
    assert [document.row["n"] for document in kept] == [*range(30), 32]
    assert count.dropped == {"more than 0.1 of its 8-grams are held out": 2}
    assert [document.overlaps for document in kept] == [False] * 30 + [True]
    kept, _ = run(Decontaminate([("a", sources)], "document", 0.0), texts)  # a single 8-gram is too much
    assert len(kept) == 30


def test_measuring_alone_drops_nothing(sources):
    kept, count = run(Decontaminate([("a", sources)], "nothing", 0.1), sources[:3])
    assert len(kept) == 3 and not count.dropped and all(document.overlaps for document in kept)


def test_pieces_replace_the_document_and_too_many_drop_it(sources, monkeypatch):
    gap = paragraphs(12, words=200, seed=31)
    planted = sources[0]
    two = f"{gap[0]} {planted} {gap[1]}"
    many = "".join(f"{text} {planted} " for text in gap)
    kept, count = run(Decontaminate([("a", sources)], "pieces", 0.1), [gap[2], two, many, planted])
    assert [document.row["n"] for document in kept] == [0, 1, 1]
    assert kept[0].text == gap[2] and gap[0].startswith(kept[1].text) and kept[2].text.endswith(gap[1])
    assert count.dropped == {"more than 10 pieces are left": 1, "no piece is left": 1} and count.changed == 1
    assert [document.overlaps for document in kept] == [False, True, True]  # the output's pieces are measured
    monkeypatch.setattr(held_out, "MOST_PIECES", 12)
    kept, _ = run(Decontaminate([("a", sources)], "pieces", 0.1), [many])
    assert len(kept) == 12


def test_words_are_cut_before_they_are_lowered():
    assert words("İstanbul, ISN'T It_2?") == plain_words("İstanbul, ISN'T It_2?")
    assert words("Plain: TEXT") == ["plain", "text"]
