"""Checkpoints that an older version wrote are still read, and the run goes on as the older version would have.

``written_by_21090a0`` holds one checkpoint for each precision, after 2 of 4 steps of the run below, and the losses of
the remaining steps as commit 21090a0 computed them on 2 ranks.
"""

import json
import math
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

OLD = Path(__file__).with_name("written_by_21090a0")
RUN = [
    "--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "4", "--seq-length", "8", "--mock-data",
    "--vocab-size", "32", "--make-vocab-size-divisible-by", "32", "--micro-batch-size", "2", "--global-batch-size", "8",
    "--log-interval", "1", "--eval-iters", "1", "--sample-tokens", "0", "--lr", "1e-2", "--lr-warmup-iters", "2",
    "--lr-decay-iters", "4", "--train-iters", "4",
]  # fmt: skip
#: by precision: its options, and how far a loss may be off on another CPU
KINDS = {
    "fp32": (["--tensor-model-parallel-size", "2"], 1e-5),
    "bf16-zero1": (["--bf16", "--use-distributed-optimizer"], 1e-2),
    "fp16": (["--tensor-model-parallel-size", "2", "--fp16"], 2e-3),
}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory, pretrain):
    """By precision: the folder of the run that went on from the old checkpoint. One MPI job runs all of them."""
    folder = tmp_path_factory.mktemp("resumed")
    runs = [
        (2, [*RUN, *options, "--load", OLD / kind, "--save", folder / kind]) for kind, (options, _) in KINDS.items()
    ]
    for outcome in pretrain(*runs):
        assert outcome.codes == [0, 0], outcome.err
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_run_goes_on(resumed, kind):
    lines = (resumed / kind / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    old, tolerance = json.loads((OLD / "losses.json").read_text())[kind], KINDS[kind][1]
    losses = [row["lm_loss"] for row in rows if "lm_loss" in row]
    assert [row["iteration"] for row in rows if "lm_loss" in row] == [3, 4]
    assert all(math.isclose(mine, his, rel_tol=tolerance) for mine, his in zip(losses, old["lm_loss"], strict=True))
    assert math.isclose(rows[-1]["validation_loss"], old["validation_loss"], rel_tol=tolerance)
