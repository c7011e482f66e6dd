"""What a run writes for programs to read: JSON as everybody's parser knows it, whatever became of the loss."""

import json

import pytest

from trainers.run.metrics import Metrics
from trainers.run.report import Report


def strictly(text):
    """The JSON value; NaN and Infinity, which Python reads and RFC 8259 does not have, are errors."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_loss_that_is_no_number_is_null(tmp_path):
    """An fp16 step whose forward pass overflowed is skipped, and has such a one."""
    metrics = Metrics(tmp_path, 0, 2, tensorboard=None, active=True)
    metrics.log({"iteration": 1, "lm_loss": float("nan"), "grad_norm": None})
    metrics.log({"iteration": 2, "lm_loss": 3.5, "grad_norm": float("inf")})
    metrics.close()
    rows = [strictly(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    expected = [
        {"iteration": 1, "lm_loss": None, "grad_norm": None},
        {"iteration": 2, "lm_loss": 3.5, "grad_norm": None},
    ]
    assert rows == metrics.rows == expected

    report = Report(2, 10, 1, 1, float("nan"), float("inf"), 4.0, 8, 100.0, "", "", [], 1.0)
    report.save(tmp_path, metrics.rows, ["lm_loss"], "nats/token")  # the plot, too
    written = strictly((tmp_path / "report.json").read_text())
    assert (written["train_loss"], written["validation_loss"], written["unigram_entropy"]) == (None, None, 4.0)
    assert "training loss                  nan nats/token" in (tmp_path / "report.txt").read_text()
