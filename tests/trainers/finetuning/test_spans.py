"""SQuAD: measures and submissions from logits that are made here, and an ensemble of them."""

import json

import numpy as np
import pytest
import torch

from tests.support.finetuning import toy_tasks
from trainers.data.tokenizer import Tokenizer
from trainers.finetuning.settings import FinetuneSettings
from trainers.finetuning.spans import SQuADTask


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("data")
    toy_tasks.vocabulary(found / "vocab.txt")
    for version in ("1.1", "2.0"):
        toy_tasks.squad(found, version)
    return found


def made(folder, version, **changes):
    config = FinetuneSettings(
        task="squad",
        data=str(folder),
        seq_length=24,
        doc_stride=6,
        max_query_length=8,
        squad_version=version,
        **changes,
    )
    return SQuADTask(config, Tokenizer.from_vocab(folder / "vocab.txt"))


def right(part, strength=9.0):
    """Logits that name the labels of each window."""
    logits = 0.01 * torch.randn(len(part.samples), *part.samples.shape, generator=torch.Generator().manual_seed(1))
    for number in range(len(part.samples)):
        first, last = part.samples[number].labels
        logits[number, first, 0] += strength
        logits[number, last, 1] += strength
    return {"dev": logits}


def test_version_1(folder):
    task = made(folder, "1.1")
    (part,) = parts = task.read("dev")
    assert len(part.samples) > 40  # several windows of some paragraphs
    assert task.measures(parts, right(part)) == {"exact_match": 100.0, "f1": 100.0}
    logits = right(part)
    wrong = {number for number, window in enumerate(part.samples.windows) if window.question < 10}
    for number in wrong:  # one token, the first of the text, in place of the answer
        logits["dev"][number] = 0.0
        logits["dev"][number, part.samples.begin(part.samples.windows[number])] = 20.0
    found = task.measures(parts, logits)
    assert found["exact_match"] == 75.0 and 75.0 <= found["f1"] < 80.0
    files = task.predictions(parts, right(part), None)
    assert set(files) == {"predictions.json", "nbest_predictions.json"}
    texts, ranked = json.loads(files["predictions.json"]), json.loads(files["nbest_predictions.json"])
    for question in part.samples.questions:
        assert texts[question.identity] == question.answers[0][0] == ranked[question.identity][0]["text"]
        assert sum(one["probability"] for one in ranked[question.identity]) == pytest.approx(1)
        assert len(ranked[question.identity]) <= 20


def test_version_2(folder):
    """The threshold is between the odds of the questions with and without an answer; a fixed one is used as it is."""
    task = made(folder, "2.0")
    (part,) = parts = task.read("dev")
    logits = right(part)
    logits["dev"][:, 0] += 2.0
    found = task.measures(parts, logits)
    assert {found[name] for name in ("f1", "exact_match", "best_f1", "best_exact")} == {100.0}
    assert {found[name] for name in ("has_answer_f1", "no_answer_f1")} == {100.0}
    strict = made(folder, "2.0", null_score_diff_threshold=-1000.0).measures(parts, logits)
    assert strict["f1"] == pytest.approx(100 * 14 / 40) and strict["threshold"] == -1000.0
    assert (strict["has_answer_f1"], strict["no_answer_f1"], strict["best_f1"]) == (0.0, 100.0, 100.0)
    files = task.predictions(parts, logits, found["threshold"])
    texts, odds = json.loads(files["predictions.json"]), json.loads(files["null_odds.json"])
    for question in part.samples.questions:
        assert texts[question.identity] == (question.answers[0][0] if question.answers else "")
        assert (odds[question.identity] > found["threshold"]) == question.impossible
    assert set(json.loads(task.predictions(parts, logits, -1000.0)["predictions.json"]).values()) == {""}


def test_an_ensemble_is_the_mean_of_the_probabilities_of_begins_and_of_ends(folder):
    task = made(folder, "1.1")
    (part,) = parts = task.read("dev")
    rng = torch.Generator().manual_seed(2)
    every = [{"dev": 4 * torch.randn(len(part.samples), *part.samples.shape, generator=rng)} for _ in range(4)]
    mean = np.mean([torch.softmax(logits["dev"], 1).numpy() for logits in every], axis=0)
    averaged = task.averaged(every)["dev"]
    np.testing.assert_allclose(averaged.exp().numpy(), mean, rtol=1e-5)
    assert set(task.measures(parts, {"dev": averaged})) == {"exact_match", "f1"}
    sure = [right(part), right(part), {"dev": torch.randn(len(part.samples), 24, 2, generator=rng)}]
    assert task.measures(parts, task.averaged(sure))["f1"] == 100.0
