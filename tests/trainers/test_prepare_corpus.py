"""The command: files in, files out, on two ranks; what each wrong command line is told."""

import json

import pytest

from commengine import UsageError
from tests.support import mpirun
from tests.support.corpora import in_order, paragraphs
from trainers import prepare_corpus
from trainers.cleaning.settings import CorpusSettings
from trainers.data.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    held, clean = paragraphs(3, words=300, seed=2), paragraphs(12, words=300, seed=1)
    (folder / "tokenizer.json").write_bytes(Tokenizer.train_bpe(clean, 500).to_bytes())
    rows = [{"id": n, "body": text} for n, text in enumerate(clean)]
    rows.append({"id": 12, "body": f"{clean[0]} {held[0]} {clean[1]}"})  # falls into two pieces
    rows += [{"id": 13, "body": "too short"}, {"id": 14, "body": clean[5] + " end"}, {"id": 15, "body": clean[6]}]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "held.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in held))
    (folder / "bad.jsonl").write_text('{"body": "a"}\nthis is no JSON\n')
    (folder / "latin.json").write_bytes(b'{"body": "caf\xe9"}\n')
    (folder / "folder.jsonl").mkdir()
    (folder / "there.jsonl").touch()
    (folder / "run.yaml").write_text("decontaminate-by: pieces\n")
    return folder


def command(folder, *arguments):
    words = ["-m", "trainers.prepare_corpus", "--json-key", "body", *arguments]
    return mpirun.run(2, *words, timeout=60, cwd=folder)


@pytest.mark.slow
def test_a_corpus_and_its_report(folder):
    done = command(
        folder, "--input", "in.jsonl", "--output", "out.jsonl", "--tokenizer-model", "tokenizer.json",
        "--decontaminate", "held.jsonl", "--config", "run.yaml",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no bars where there is no terminal
    rows = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert [row["body"] for row in rows] == in_order(row["body"] for row in rows)
    # Pieces are like the documents that they come from, or shorter: either may be the one that is kept.
    assert 12 <= len(rows) <= 14 and {row["id"] for row in rows} >= {2, 3, 4, 7, 8, 9, 10, 11}
    report = json.loads((folder / "out-report.json").read_text())
    stages = {stage["name"]: stage for stage in report["stages"]}
    assert report["ranks"] == 2 and report["documents_in"] == 16 and report["documents_out"] == len(rows)
    assert stages["decontaminate"]["documents_out"] == 17 and stages["length"]["documents_out"] == 16
    assert report["held_out"][0]["share_in_input"] > 0.15 > 0.05 > report["held_out"][0]["share_in_output"]
    assert (folder / "out-report.txt").read_text() == done.stdout
    assert (folder / "out-report.png").read_bytes().startswith(b"\x89PNG")
    for line in (f"{len(rows)} of 16 documents kept, 2 ranks", "length: 1 dropped: fewer than 128 tokens",
                 "  too short", "duplicates: 1 dropped: equal text", "held.jsonl"):  # fmt: skip
        assert line in done.stdout
    assert sorted(path.name for path in folder.glob("*out*")) == [
        "out-report.json", "out-report.png", "out-report.txt", "out.jsonl"
    ]  # fmt: skip
    assert not list(folder.glob(".*"))


@pytest.mark.slow
def test_a_file_that_is_not_json_is_one_error(folder):
    done = command(folder, "--input", "in.jsonl", "bad.jsonl", "--output", "none.jsonl")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: --input: bad.jsonl: line 2: not JSON: ") and done.stderr.count("\n") == 1
    assert not list(folder.glob("*none*")) and not list(folder.glob(".*none*"))


IN, OUT = ("--input", "in.jsonl"), ("--output", "x.jsonl")


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (OUT, "required: --input"),
        (IN, "required: --output"),
        ((*IN, *OUT, "--no-such"), "--no-such"),
        (("--input", "none.jsonl", *OUT), "--input: none.jsonl: not a file that can be read; valid: .jsonl"),
        (("--input", "folder.jsonl", *OUT), "--input: folder.jsonl: not a file"),
        ((*IN, "--output", "x.json"), "--output x.json: the name ends in .jsonl"),
        ((*IN, "--output", "none/x.jsonl"), "--output: none: there is no such folder"),
        ((*IN, "--output", "folder.jsonl"), "--output folder.jsonl: folder.jsonl is a folder"),
        ((*IN, "--output", "in.jsonl"), "--output in.jsonl: in.jsonl is an --input"),
        ((*IN, "--output", "there.jsonl"), "--output there.jsonl: exists; give another name, or --overwrite"),
        ((*IN, *OUT, "--work-dir", "none"), "--work-dir: none: there is no such folder"),
        ((*IN, *OUT, "--min-tokens", "10"), "--min-tokens 10 needs a tokenizer"),
        ((*IN, *OUT, "--min-tokens", "-1"), "--min-tokens -1: must be at least 0"),
        ((*IN, *OUT, "--vocab-file", "v", "--merge-file", "m", "--tokenizer-model", "t"), "give one tokenizer"),
        ((*IN, *OUT, "--jaccard", "0.5"), "--jaccard 0.5: must be at least 0.7, and at most 1"),
        ((*IN, *OUT, "--jaccard", "nan"), "--jaccard nan: must be at least 0.7"),
        ((*IN, *OUT, "--decontaminate", "none.txt"), "--decontaminate: none.txt: not a file"),
        ((*IN, *OUT, "--decontaminate-by", "words"), "--decontaminate-by"),
        ((*IN, *OUT, "--decontaminate-share", "1"), "--decontaminate-share 1.0: must be at least 0 and below 1"),
        ((*IN, *OUT, "--buffer-megabytes", "0"), "--buffer-megabytes 0: must be at least 1"),
    ],
)
def test_a_wrong_command_line_names_the_option(folder, monkeypatch, arguments, problem):
    monkeypatch.chdir(folder)
    with pytest.raises((UsageError, ValueError)) as caught:
        prepare_corpus.settings(arguments)
    assert problem in str(caught.value)


def test_tokens_are_counted_where_there_is_a_tokenizer(folder, monkeypatch):
    monkeypatch.chdir(folder)
    tokenizer = ["--tokenizer-model", "tokenizer.json"]
    assert prepare_corpus.settings([*IN, *OUT]).min_tokens == 0
    assert prepare_corpus.settings([*IN, *OUT, *tokenizer]).min_tokens == 128
    assert prepare_corpus.settings([*IN, *OUT, *tokenizer, "--min-tokens", "0"]).min_tokens == 0
    made = prepare_corpus.settings([*IN, *OUT, "--languages", "en", "de", "--no-fix-text"])
    assert CorpusSettings(**json.loads(json.dumps(made.to_json()))) == made
    assert prepare_corpus.settings([*IN, "--output", "there.jsonl", "--overwrite"]).overwrite
    assert made.languages == ["en", "de"] and not made.fix_text


@pytest.mark.parametrize("name", ["held.jsonl", "latin.json"])
def test_a_file_that_is_no_tokenizer_is_named(folder, name):
    with pytest.raises(UsageError, match=r"--tokenizer-model: .*not a tokenizer.json"):
        CorpusSettings(["in.jsonl"], output="x.jsonl", tokenizer_model=str(folder / name)).read_tokenizer()
