"""The first step at which two runs' digests differ."""

import json

import pytest

from commengine import UsageError
from trainers.comparison.steps import compare_steps

SAME = {"loss_digest": 1, "norm_digest": 2, "weights_digest": 3}


def run(folder, rows):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def row(iteration, loss=1.0, **changed):
    return {"iteration": iteration, "lm_loss": loss, "grad_norm": 2.0, "tokens_per_second": iteration} | SAME | changed


def test_equal_runs(tmp_path):
    """Rows without digests do not count. Steps of one run only are named, and not compared."""
    one = run(tmp_path / "one", [row(1), row(2), {"iteration": 2, "validation_loss": 3.0}, row(3)])
    found = compare_steps(one, run(tmp_path / "other", [row(2), row(3), row(4)]))
    assert found.compared == [2, 3] and found.different is None
    assert found.lines() == [
        "steps 2 to 3, 2 of them: the loss, the gradient's norm and the weights have the same bits",
        "step 1 is in the first run only, and is not compared",
        "step 4 is in the second run only, and is not compared",
        "tensor x data ranks, which may differ between deterministic runs:",
        "  first run: not known",
        "  second run: not known",
    ]


def test_the_first_difference(tmp_path):
    one = run(tmp_path / "one", [row(1), row(2), row(3, 5.0, loss_digest=9)])
    other = run(tmp_path / "other", [row(1), row(2, 1.25, norm_digest=8, weights_digest=9), row(3)])
    found = compare_steps(one, other)
    assert (found.different, found.names) == (2, ("norm", "weights"))
    lines = found.lines()
    assert lines[0] == "step 2 is the first that differs (steps 1 to 3, 3 of them are compared): norm, weights"
    assert lines[1] == "  lm_loss: 1.0 and 1.25, 0.25 apart" and lines[2].startswith("tensor x data ranks")


def test_a_single_step(tmp_path):
    """One step is no range of steps."""
    one, same = (run(tmp_path / name, [row(1)]) for name in ("one", "same"))
    assert compare_steps(one, same).lines()[0].startswith("step 1: the loss, ")
    other = run(tmp_path / "other", [row(1, loss_digest=9)])
    assert compare_steps(one, other).lines()[0] == "step 1 is the first that differs (step 1 is compared): loss"


def test_runs_without_digests(tmp_path):
    one, none = run(tmp_path / "one", [row(1)]), run(tmp_path / "none", [{"iteration": 1, "lm_loss": 1.0}])
    with pytest.raises(UsageError, match=r"none/metrics.jsonl: has no digests; train with --deterministic"):
        compare_steps(one, none)
    with pytest.raises(UsageError, match=r"nowhere/metrics.jsonl: No such file"):
        compare_steps(one, tmp_path / "nowhere")
    assert compare_steps(one, run(tmp_path / "later", [row(7), row(9)])).lines()[:3] == [
        "no step has digests in both runs",
        "step 1 is in the first run only, and is not compared",
        "steps 7 to 9, 2 of them, are in the second run only, and are not compared",
    ]
