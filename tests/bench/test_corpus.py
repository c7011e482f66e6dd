"""The documents of the measurement, the arithmetic of its report, wrong options, and a short run."""

import json
import sys

import pytest

from bench import corpus
from bench.corpus import PLAIN, MadeCorpus, make_documents, markdown, report
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


def test_speeds_are_ratios_within_a_round():
    texts = {str(n) for n in range(1000)}
    found = {
        PLAIN: MadeCorpus([10.0, 20.0], [9.0, 19.0], texts),
        "ours, 1 rank": MadeCorpus([5.0, 16.0], [4.0, 15.0], texts | {"more"}),
        "ours, 2 ranks": MadeCorpus([4.0, 8.0], [3.0, 7.0], texts | {"more"}),
    }
    result = report(found, 3000)
    plain, one, two = result["rows"]
    assert one["speed_over_plain"] == {"median": 1.625, "low": 1.25, "high": 2.0} and one["differing"] == 1
    assert two["documents_per_second"] == 500 and plain["whole"]["median"] == 15 and not result["errors"]
    about = {"command": "c", "date": "d", "load_average_before": 0.0, "hardware": "h", "versions": {}}
    text = markdown(about | result | {"rounds": 2, "bytes": 1, "stages": "s"})
    assert "ours, 1 rank 1.2 times as fast as datasketch: reached, 1.62" in text
    assert "ours, 2 ranks 2.2 times as fast as datasketch: reached, 2.50" in text
    found["ours, 2 ranks"].kept = texts | {"a", "b", "c"}
    assert len(report(found, 3000)["errors"]) == 2  # the plain script and the ranks differ
    found["ours, 2 ranks"].seconds = [9.0, 18.0]
    assert "2.2 times as fast as datasketch: NOT reached, 1.11" in markdown(
        about | report(found, 3000) | {"rounds": 2, "bytes": 1, "stages": "s"}
    )


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (["--documents", "0"], "--documents 0: must be at least 1"),
        (["--rounds", "0"], "--rounds 0"),
        (["--text", "none.txt"], "--text none.txt: there is no such file"),
        (["--vocab-file", __file__], "--vocab-file and --merge-file"),
        (["--text", "/dev/null"], "--text"),
        (["--output", "none/x.md"], "--output none/x.md: there is no folder none"),
    ],
)
def test_a_wrong_option_is_named(capsys, arguments, problem):
    with pytest.raises(SystemExit) as caught:
        corpus.main(arguments)
    assert caught.value.code == 2
    assert problem in (error := capsys.readouterr().err) and error.count("\n") == 1


@pytest.mark.slow
def test_a_short_contest(tmp_path):
    (tmp_path / "text.txt").write_text("\n\n".join(paragraphs(60)))
    (tmp_path / "held.txt").write_text("\n\n".join(paragraphs(60)[:2]))
    words = ["-m", "bench.corpus", "--text", "text.txt", "--documents", "80", "--rounds", "1", "--decontaminate",
             "held.txt", "--output", "c.md", "--json", "c.json"]  # fmt: skip
    done = mpirun.command([sys.executable, *words], timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "c.md").read_text() == done.stdout
    rows = json.loads((tmp_path / "c.json").read_text())["rows"]
    assert [row["name"] for row in rows] == [PLAIN, "ours, 1 rank", "ours, 2 ranks"]
    assert len({row["kept"] for row in rows}) == 1 and 30 < rows[0]["kept"] < 60
    assert all(row["differing"] == 0 for row in rows)
