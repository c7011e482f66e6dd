"""Whole corpora: survivors against brute force, the same at 1, 2 and 4 ranks and in any order; memory stays bounded."""

import base64
import json
import random

import numpy as np
import pytest

from commengine import UsageError
from tests.support import mpirun
from tests.support.corpora import greedy, in_order, paragraphs, similarities, with_copies
from trainers.cleaning.pipeline import prepare
from trainers.cleaning.settings import CorpusSettings


@pytest.fixture
def folder(world, tmp_path_factory):
    """A folder that all ranks of ``world`` see."""
    path = str(tmp_path_factory.mktemp("corpus")) if world.rank == 0 else None
    return type(tmp_path_factory.getbasetemp())(world.mpi.bcast(path))


def write(world, path, rows):
    if world.rank == 0:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    world.barrier()
    return str(path)


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def wanted(texts):
    """The texts that the rule keeps, in their order, and the similarities of all."""
    texts = in_order(texts)
    values = similarities(texts)
    return [texts[row] for row in greedy(values >= 0.7)], texts, values


@pytest.fixture(scope="module")
def six_hundred():
    texts = with_copies(600, seed=1)
    return texts, *wanted(texts)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.sizes(1, 2)
def test_survivors_of_600_paragraphs_with_altered_copies(world, folder, six_hundred):
    texts, kept, distinct, values = six_hundred
    orders = [texts, sorted(texts), random.Random(3).sample(texts, len(texts))]
    outputs = []
    for number, order in enumerate(orders):
        half = len(order) // 2
        files = [write(world, folder / f"{number}-{n}.jsonl", [{"id": 1, "text": text} for text in part])
                 for n, part in enumerate((order[:half], order[half:]))]  # fmt: skip
        output = folder / f"out{number}.jsonl"
        summary = prepare(world, CorpusSettings(files, output=str(output)))
        world.barrier()
        outputs.append(output.read_bytes())
        if world.rank == 0:
            assert summary["documents_in"] == len(texts) and summary["documents_out"] == len(kept)
            last = summary["stages"][-1]
            assert sum(last["dropped"].values()) == len(texts) - len(kept)
            assert last["dropped"]["equal text"] == len(texts) - len(distinct) > 0
            assert last["bytes_out"] == sum(len(text) for text in kept)
    assert outputs[0] == outputs[1] == outputs[2]
    survivors = [row["text"] for row in rows_of(output)]
    # What the issue asks for, by itself ...
    places = {text: place for place, text in enumerate(distinct)}
    found = np.array([places[text] for text in survivors])
    pairs = int((np.triu(values, 1) >= 0.7).sum())
    left = int((np.triu(values[np.ix_(found, found)], 1) >= 0.7).sum())
    assert pairs > 500 and left < 0.01 * pairs
    dropped = np.setdiff1d(np.arange(len(distinct)), found)
    assert (values[np.ix_(dropped, found)].max(axis=1) >= 0.7).all()
    assert survivors == kept  # ... and with these texts no pair is missed at all


@pytest.mark.mpi
@pytest.mark.every_size
def test_equal_texts_with_other_keys_beside_them(world, folder):
    rows = [{"text": text, "from": n} for text in paragraphs(5) for n in range(9)]
    outputs = set()
    for order in (rows, rows[::-1]):
        prepare(world, CorpusSettings([write(world, folder / "in.jsonl", order)], output=str(folder / "out.jsonl")))
        world.barrier()
        outputs.add((folder / "out.jsonl").read_bytes())
        world.barrier()
    assert len(outputs) == 1 and len(rows_of(folder / "out.jsonl")) == 5


@pytest.mark.slow
@pytest.mark.sizes(1, 2)
@pytest.mark.mpi
def test_all_stages_together(world, folder):
    clean, held = paragraphs(20, words=20, seed=41), paragraphs(6, words=60, seed=42)
    german = "Der Ausschuss wird im Frühjahr wieder zusammentreten, wenn der Bericht erschienen ist. " * 5
    english = "The committee will meet again in the spring, when the report has been published. It is long. "
    expected = [*(english * 5 + text for text in clean), "schön " + english * 4 + "end"]
    planted = [english * 3 + held[2], english * 2 + held[0]]
    texts = [*expected[:-1], german, "schÃ¶n " + english * 4 + "end", *planted]
    if world.rank == 0:
        (folder / "in.txt").write_text("\n\n".join(texts))
        (folder / "held.txt").write_text("\n\n".join(held))
        (folder / "other.txt").write_text(" ".join(paragraphs(1, seed=77)))
    world.barrier()
    settings = CorpusSettings(
        [str(folder / "in.txt")], output=str(folder / "out.jsonl"), split_on_blank_lines=True, languages=["en"],
        decontaminate=[str(folder / "held.txt"), str(folder / "other.txt")], deduplicate=False,
    )  # fmt: skip
    summary = prepare(world, settings)
    world.barrier()
    assert [row["text"] for row in rows_of(folder / "out.jsonl")] == in_order(expected)
    assert list(map(set, rows_of(folder / "out.jsonl"))) == [{"text"}] * len(expected)
    if world.rank != 0:
        assert summary == {}
        return
    stages = {stage["name"]: stage for stage in summary["stages"]}
    assert list(stages) == ["read", "fix", "language", "decontaminate", "deduplicate"]
    assert [stage["documents_out"] for stage in stages.values()] == [24, 24, 23, 21, 21]
    assert stages["fix"]["changed"] == 1 and stages["language"]["dropped"] == {"language de": 1}
    ((reason, count),) = stages["decontaminate"]["dropped"].items()
    assert count == 2 and {text for _, text, _ in stages["decontaminate"]["examples"][reason]} == {
        text[:160] for text in planted
    }
    first, other = summary["held_out"]
    assert first["share_in_input"] > 0.2 and first["share_in_output"] == 0.0 == other["share_in_input"]
    assert len(summary["peak_memory_bytes"]) == world.size and summary["seconds"] > 0


@pytest.mark.mpi
@pytest.mark.every_size
def test_the_share_of_8_grams_equals_brute_force(world, folder):
    held, texts = paragraphs(10, seed=51), paragraphs(30, seed=52)
    texts += [f"{texts[n]} {held[n]}" for n in range(4)] + [held[5][:200]]
    source = write(world, folder / "in.jsonl", [{"text": text} for text in texts])
    target = write(world, folder / "held.jsonl", [{"text": text} for text in held])
    settings = CorpusSettings(
        [source], output=str(folder / "out.jsonl"), decontaminate=[target], decontaminate_by="nothing"
    )
    summary = prepare(world, settings)

    def ngrams(texts):
        words = [text.lower().replace(".", "").split() for text in texts]
        return {tuple(found[at : at + 8]) for found in words for at in range(len(found) - 7)}

    if world.rank == 0:
        (row,) = summary["held_out"]
        wanted = ngrams(held)
        survivors = [row["text"] for row in rows_of(folder / "out.jsonl")]
        assert row["ngrams"] == len(wanted)
        assert row["share_in_input"] == len(wanted & ngrams(texts)) / len(wanted) > 0.3
        assert row["share_in_output"] == len(wanted & ngrams(survivors)) / len(wanted)


@pytest.mark.mpi
@pytest.mark.parametrize("fix_text, found", [(True, 1.0), (False, 0.0)])
def test_a_held_out_text_is_mended_as_the_input_is(world, folder, fix_text, found):
    (text,) = paragraphs(1, words=60, seed=53)
    broken = " ".join(f"{word} caf&eacute; schÃ¶n ﬁn" for word in text.split())
    mended = broken.replace("&eacute;", "é").replace("Ã¶", "ö").replace("ﬁ", "fi")
    for source, copy in ((broken, broken), (mended, broken), (broken, mended)) if fix_text else ((broken, mended),):
        held = write(world, folder / "held.jsonl", [{"text": copy}])
        given = write(world, folder / "in.jsonl", [{"text": source}, {"text": "another text"}])
        settings = CorpusSettings(
            [given], output=str(folder / "out.jsonl"), decontaminate=[held], fix_text=fix_text, deduplicate=False
        )
        summary = prepare(world, settings)
        world.barrier()
        assert len(rows_of(folder / "out.jsonl")) == (1 if fix_text else 2)
        if world.rank == 0:
            assert summary["held_out"][0]["share_in_input"] == found


@pytest.mark.mpi
@pytest.mark.parametrize("content, problem", [
    ('{"text": "a"}\nno json\n', "--input: .*in.jsonl: line 2: not JSON"),
    ("\n\n", "--input: no text in .*in.jsonl"),
])  # fmt: skip
def test_bad_input_is_an_error_of_every_rank(world, folder, content, problem):
    if world.rank == 0:
        (folder / "in.jsonl").write_text('{"text": "x"}\n' * 30000 * ("no" in content) + content)
    world.barrier()
    if "no" in content:
        problem = problem.replace("line 2", "line 30002")
    with pytest.raises(UsageError, match=problem):
        prepare(world, CorpusSettings([str(folder / "in.jsonl")], output=str(folder / "out.jsonl")))
    world.barrier()
    assert sorted(path.name for path in folder.iterdir()) == ["in.jsonl"]


@pytest.mark.mpi
def test_without_deduplication_equal_documents_stay(world, folder):
    texts = paragraphs(4) * 3 + ["ab", "ab", ""]
    source = write(world, folder / "in.jsonl", [{"body": text} for text in texts])
    for number, more in enumerate(({"deduplicate": False}, {"fix_text": False})):
        settings = CorpusSettings([source], output=str(folder / f"{number}.jsonl"), json_key="body", **more)
        prepare(world, settings)
    world.barrier()
    assert len(rows_of(folder / "0.jsonl")) == 14  # ftfy leaves nothing of an empty text
    assert sorted(row["body"] for row in rows_of(folder / "1.jsonl")) == sorted({*paragraphs(4), "ab", ""})


MEASURE = """
import json, sys
from commengine import launch
from trainers.cleaning.pipeline import prepare
from trainers.cleaning.settings import CorpusSettings
def main(world):
    result = prepare(world, CorpusSettings(sys.argv[1:2], output=sys.argv[1] + ".out.jsonl", buffer_megabytes=8))
    if world.rank == 0:
        print(json.dumps([result["documents_out"], result["peak_memory_bytes"]]))
launch.run(main)
"""


@pytest.mark.slow
@pytest.mark.long
def test_text_larger_than_the_bound_on_memory(tmp_path):
    """A rank's peak grows by far less than the text that it holds, and by no more than its buffer allows."""
    (tmp_path / "measure.py").write_text(MEASURE)
    peaks = {}
    for name, megabytes in (("small", 2), ("large", 64)):
        rng = random.Random(0)
        with (tmp_path / f"{name}.jsonl").open("w") as file:
            for _ in range(8 * megabytes):  # documents of 128 kB without a common 5-gram
                file.write(json.dumps({"text": base64.b64encode(rng.randbytes(3 << 15)).decode()}) + "\n")
        done = mpirun.run(2, str(tmp_path / "measure.py"), str(tmp_path / f"{name}.jsonl"), timeout=100)
        assert done.returncode == 0, done.stderr
        kept, peak = json.loads(done.stdout)
        assert kept == 8 * megabytes
        peaks[name] = np.array(peak) / (1 << 20)
    grown = peaks["large"] - peaks["small"]
    assert (grown < 12).all(), f"{grown} MB more for 31 MB more of text a rank"
