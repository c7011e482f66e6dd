"""Whole runs with ``--expert-model-parallel-size``: losses, evaluations, texts, checkpoints are those of one rank."""

import json

import pytest
import torch

from tests.support.training.runs import Runs, measured, weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EXPERTS = [
    "--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "16", "--disable-bias-linear", "--swiglu",
    "--position-embedding-type", "rope", "--normalization", "RMSNorm", "--untie-embeddings-and-output-weights",
    "--moe-aux-loss-coeff", "0.1", "--moe-z-loss-coeff", "0.01", "--train-iters", "4",
]  # fmt: skip
EVALUATED = ["--eval-iters", "2", "--eval-interval", "2"]
#: ranks, and what each run has besides
LAYOUTS = {
    "two": (2, ["--expert-model-parallel-size", "2"]),
    "zero1": (2, ["--expert-model-parallel-size", "2", "--use-distributed-optimizer", "--overlap-grad-reduce"]),
    "four": (4, ["--expert-model-parallel-size", "4", "--micro-batch-size", "2"]),
    "blocks": (4, ["--expert-model-parallel-size", "2", "--use-distributed-optimizer", "--micro-batch-size", "2"]),
    "tensor": (
        4, ["--expert-model-parallel-size", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel"],
    ),
    "pipeline": (4, ["--expert-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]),
    "context": (4, ["--expert-model-parallel-size", "2", "--context-parallel-size", "2"]),
}  # fmt: skip
#: those of them that make test runs
USUAL = ("zero1", "tensor")


@pytest.fixture(scope="module")
def runs(pretrain, mock, tmp_path_factory):
    root = tmp_path_factory.mktemp("experts")
    words = [*mock, *EXPERTS, *EVALUATED, "--check-replicas", "1", "--log-digests", "--save-interval", "2"]
    words[words.index("--sample-tokens") + 1] = "4"
    commands = {name: (ranks, [*words, *more]) for name, (ranks, more) in {"one": (1, []), **LAYOUTS}.items()}
    return Runs(commands, {name: root / name for name in commands}, pretrain, timeout=300)


@pytest.mark.parametrize(
    "name", [name if name in USUAL else pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS]
)
def test_a_run_is_that_of_one_rank(runs, rows, name):
    truth = measured(runs["one"], rows)
    assert len(truth) > 16
    assert measured(runs[name], rows) == pytest.approx(truth, rel=2e-5)
    torch.testing.assert_close(weights(runs[name], 4), weights(runs["one"], 4), rtol=1e-3, atol=1e-5)
    report, alone = (json.loads((runs[one] / "report.json").read_text()) for one in (name, "one"))
    assert report["sample"] == alone["sample"] != ""
    assert report["expert_model_parallel_size"] == (4 if name == "four" else 2)
    (row,) = [row for row in rows(runs[name], "weights_digest") if row["iteration"] == 4]
    assert row["weights_digest"] > 0 and row["expert_model_parallel_size"] == report["expert_model_parallel_size"]


@pytest.mark.long
def test_a_run_goes_on_at_another_layout(runs, pretrain, mock, rows, tmp_path):
    """From one rank to expert groups, back, and from one kind to another. The moments go along."""
    words = [*mock, *EXPERTS, *EVALUATED]
    ways = [("one", "two"), ("one", "blocks"), ("four", "one"), ("blocks", "tensor"), ("zero1", "pipeline")]
    halves = [next(runs[before].glob("iter_*2")) for before, _ in ways]
    commands = []
    for half, (before, after) in zip(halves, ways, strict=True):
        ranks, more = LAYOUTS.get(after, (1, []))
        commands.append((ranks, [*words, *more, "--load", half, "--save", tmp_path / f"{before}-{after}"]))
    outcomes = pretrain(*commands, timeout=300)
    later = {key: value for key, value in measured(runs["one"], rows).items() if key[0] > 2}
    for (before, after), outcome in zip(ways, outcomes, strict=True):
        assert set(outcome.codes) == {0}, outcome.err
        assert measured(tmp_path / f"{before}-{after}", rows) == pytest.approx(later, rel=2e-5), (before, after)


def test_bad_sizes_end_with_one_line(pretrain, mock):
    (outcome,) = pretrain((2, [*mock, *EXPERTS, "--num-experts", "3", "--expert-model-parallel-size", "2"]))
    assert outcome.codes == [2, 2]
    said = "".join(outcome.err)
    assert said.count("\n") == 1 and "--expert-model-parallel-size 2: does not divide --num-experts 3" in said
