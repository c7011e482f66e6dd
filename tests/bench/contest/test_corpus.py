"""The documents of the measurement, the arithmetic of its report, wrong options, and a short run."""

import json
import sys
from pathlib import Path

import pytest

from bench.contest import corpus
from bench.contest.corpus import PLAIN, MadeCorpus, make_documents
from tests.support import mpirun
from tests.support.corpora import paragraphs, similarity


def test_documents_are_originals_and_altered_copies():
    source = paragraphs(300, words=40)
    made = make_documents(source, 200, seed=1)
    assert len(made) == 200 == len(make_documents(source[:10], 200, seed=1)) and made == make_documents(source, 200, 1)
    originals = [text for text in made if text in set(source)]
    assert 140 <= len(originals) < 175  # copies without a replaced word, too
    copies = [text for text in made if text not in set(source)]
    assert all(max(similarity(copy, text) for text in set(originals)) > 0.3 for copy in copies)


def made(ranks, inside, kept):
    one = MadeCorpus(ranks, Path("x"), [])
    one.inside, one.kept = inside, kept
    return one


@pytest.mark.slow
def test_speeds_are_ratios_within_a_round():
    texts = {str(n) for n in range(1000)}
    found = [made(0, [9.0, 19.0], texts), made(1, [4.0, 15.0], texts | {"more"}), made(2, [3.0, 7.0], texts | {"more"})]
    seconds = {PLAIN: [10.0, 20.0], "ours, 1 rank": [5.0, 16.0], "ours, 2 ranks": [4.0, 8.0]}
    case = corpus.compared(seconds, found, 3000)
    assert case.over("ours, 2 ranks").median == 0.4 and case.facts["ours, 1 rank"]["differing"] == 1
    assert case.facts["ours, 2 ranks"]["documents/s"] == 500 and not case.errors
    found[2].kept = texts | {"a", "b", "c"}
    assert len(corpus.compared(seconds, found, 3000).errors) == 2  # the plain script and the ranks differ


@pytest.mark.slow
@pytest.mark.long
def test_a_short_contest(tmp_path):
    (tmp_path / "text.txt").write_text("\n\n".join(paragraphs(60)))
    (tmp_path / "held.txt").write_text("\n\n".join(paragraphs(60)[:2]))
    words = ["-m", "bench.contest", "corpus", "--text", "text.txt", "--documents", "80", "--rounds", "1"]
    words += ["--decontaminate", "held.txt", "--output", "c.md", "--json", "c.json"]
    done = mpirun.command([sys.executable, *words], timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "c.md").read_text() == done.stdout
    (case,) = json.loads((tmp_path / "c.json").read_text())["cases"]
    rows = case["rows"]
    assert [row["name"] for row in rows] == [PLAIN, "ours, 1 rank", "ours, 2 ranks"]
    assert len({row["kept"] for row in rows}) == 1 and 30 < rows[0]["kept"] < 60
    assert all(row["differing"] == 0 for row in rows)
