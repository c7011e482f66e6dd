"""MNLI, QQP and RACE: their parts, their accuracies and their submissions, from logits that are made here."""

import dataclasses
import json

import pytest
import torch

from commengine.files.reading import InputFileError
from tests.support.finetuning import toy_tasks
from trainers.data.tokenizer import Tokenizer
from trainers.finetuning.downstream import PairTask, RACETask
from trainers.finetuning.settings import FinetuneSettings


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.from_vocab(toy_tasks.vocabulary(tmp_path_factory.mktemp("vocab") / "vocab.txt"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("data")
    for name, make in toy_tasks.MAKERS.items():
        make(found / name)
    return found


def settings(folder, **changes):
    return FinetuneSettings(data=str(folder), seq_length=32, **changes)


def right(parts, wrong=0):
    """Logits whose largest is the label's, but for the first ``wrong`` samples of each part."""
    found = {}
    for part in parts:
        labels = [int(part.samples[n].labels) for n in range(len(part.samples))]
        shifted = [(label + (n < wrong)) % part.samples.shape[0] for n, label in enumerate(labels)]
        found[part.name] = torch.nn.functional.one_hot(torch.tensor(shifted), part.samples.shape[0]).float()
    return found


def test_mnli(folder, tokenizer):
    task = PairTask(settings(folder / "mnli", task="mnli"), tokenizer)
    parts = task.read("dev")
    assert [(part.name, len(part.samples)) for part in parts] == [("matched", 51), ("mismatched", 41)]
    found = task.measures(parts, right(parts, 10))
    assert found == {"accuracy": 72 / 92, "accuracy/matched": 41 / 51, "accuracy/mismatched": 31 / 41}
    files = task.predictions(parts, right(parts), None)
    assert set(files) == {"MNLI-m.tsv", "MNLI-mm.tsv"}
    head, *rows = files["MNLI-m.tsv"].splitlines()
    lines = (folder / "mnli" / "dev_matched.tsv").read_text().splitlines()[1:]
    assert head == "index\tprediction" and rows == [f"{line.split()[0]}\t{line.split()[-1]}" for line in lines]
    tests = task.read("test")
    logits = {part.name: torch.randn(len(part.samples), 3) for part in tests}
    assert task.measures(tests, logits) == {}
    assert len(task.predictions(tests, logits, None)["MNLI-m.tsv"].splitlines()) == 8
    (train,) = task.read("train")
    assert len(train.samples) == 240


def test_one_of_two_dev_files_is_enough(tmp_path, tokenizer):
    task = PairTask(settings(toy_tasks.mnli(tmp_path / "mnli"), task="mnli"), tokenizer)
    (tmp_path / "mnli" / "dev_mismatched.tsv").unlink()
    parts = task.read("dev")
    assert task.measures(parts, right(parts)) == {"accuracy": 1.0}
    (tmp_path / "mnli" / "dev_matched.tsv").unlink()
    with pytest.raises(InputFileError, match=r"dev_matched.tsv: there is no such file"):
        task.read("dev")


def test_qqp(folder, tokenizer):
    task = PairTask(settings(folder / "qqp", task="qqp"), tokenizer)
    parts = task.read("dev")
    assert task.measures(parts, right(parts, 5)) == {"accuracy": 0.9}
    tests = task.read("test")
    (text,) = task.predictions(tests, {"test": torch.eye(2).repeat(5, 1)[:9]}, None).values()
    assert text.splitlines() == ["index\tprediction", *(f"{n}\t{n % 2}" for n in range(9))]
    assert task.remarks == []


def test_damaged_rows_that_are_left_out_are_said(tmp_path, tokenizer):
    path = toy_tasks.qqp(tmp_path / "qqp") / "train.tsv"
    path.write_text(path.read_text() + "999\t1\t2\tonly three\n")
    task = PairTask(settings(tmp_path / "qqp", task="qqp", skip_damaged_rows=True), tokenizer)
    assert len(task.read("train")[0].samples) == 240
    assert task.remarks == [f"{path}: 1 damaged rows are left out (lines 242)"]
    with pytest.raises(InputFileError, match="line 242: has 4 columns"):
        PairTask(settings(tmp_path / "qqp", task="qqp"), tokenizer).read("train")


@pytest.mark.parametrize("level", ["both", "middle", "high"])
def test_race(folder, tokenizer, level):
    task = RACETask(settings(folder / "race", task="race", race_level=level), tokenizer)
    parts = task.read("dev")
    assert [part.name for part in parts] == (["middle", "high"] if level == "both" else [level])
    found = task.measures(parts, right(parts, 3))
    assert found["accuracy"] == pytest.approx(0.8)
    assert set(found) == {"accuracy"} | ({"accuracy/middle", "accuracy/high"} if level == "both" else set())
    (train,) = task.read("train")
    assert len(train.samples) == (180 if level == "both" else 90)
    answers = json.loads(task.predictions(parts, right(parts), None)["RACE.json"])
    assert len(answers) == 5 * len(parts)
    for name, letters in answers.items():
        assert json.loads((folder / "race" / "dev" / name).read_text())["answers"] == letters


def test_an_ensemble_is_the_mean_of_the_probabilities(folder, tokenizer):
    task = PairTask(dataclasses.replace(settings(folder / "qqp", task="qqp")), tokenizer)
    every = [{"dev": 3 * torch.randn(50, 2, generator=torch.Generator().manual_seed(n))} for n in range(3)]
    mean = torch.stack([logits["dev"].softmax(-1) for logits in every]).mean(0)
    torch.testing.assert_close(task.averaged(every)["dev"].exp(), mean)
