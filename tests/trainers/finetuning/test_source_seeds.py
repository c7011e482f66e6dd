"""Several seeds: the best checkpoint of each run, and the median run."""

import json
from pathlib import Path

import pytest

from commengine import UsageError
from trainers.finetuning.source import best_measures, median_run, seeds_text, summarize


def run(folder: Path, *accuracies: float | None) -> Path:
    """A run with a row of steps, and one for each evaluation."""
    folder.mkdir()
    rows = [{"iteration": 1, "label_loss": 2.0}]
    for number, value in enumerate(accuracies, start=1):
        rows.append({"iteration": 10 * number, "validation_loss": 1.0 / number, "validation_accuracy": value})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_first_of_the_best_evaluations(tmp_path):
    found = best_measures(run(tmp_path / "one", 0.5, None, 0.8, 0.7, 0.8), "accuracy")
    assert found == {"iteration": 30, "loss": pytest.approx(1 / 3), "accuracy": 0.8}


def test_an_evaluation_at_a_stop_does_not_count(tmp_path):
    folder = run(tmp_path / "one", 0.5, 0.7)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"iteration": 25, "validation_accuracy": 0.9, "at_stop": 1}) + "\n")
    assert best_measures(folder, "accuracy")["iteration"] == 20


@pytest.mark.parametrize(
    "values, median", [([0.7, 0.9, 0.8, 0.6, 0.5], 0.7), ([0.9, 0.7, 0.8, 0.6], 0.7), ([0.4], 0.4)]
)
def test_the_median_is_that_of_a_run(tmp_path, values, median):
    runs = [run(tmp_path / f"seed_{number}", 0.1, value) for number, value in enumerate(values)]
    summary = summarize(tmp_path, runs, "accuracy")
    assert summary["median"] == median and summary["median_run"] == f"seed_{values.index(median)}"
    assert json.loads((tmp_path / "seeds.json").read_text()) == summary
    assert median_run(tmp_path / "seeds.json") == summary["median_run"]
    table = seeds_text(summary).splitlines()
    assert len(table) == len(values) + 2 and table[-1] == f"median accuracy: {median:.4f} ({summary['median_run']})"


def test_a_run_without_an_evaluation_has_no_median(tmp_path):
    with pytest.raises(UsageError, match="has no evaluation, so there is no median"):
        summarize(tmp_path, [run(tmp_path / "seed_1", None)], "accuracy")
    with pytest.raises(UsageError, match="No such file"):
        best_measures(tmp_path / "none", "accuracy")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"median_run": "../other"}', '{"median_run": 3}'])
def test_a_damaged_summary_is_refused(tmp_path, content):
    (tmp_path / "seeds.json").write_text(content)
    with pytest.raises(UsageError, match=r"cannot be read|names no run"):
        median_run(tmp_path / "seeds.json")
