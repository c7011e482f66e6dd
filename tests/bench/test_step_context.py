"""bench.step and bench.replay of ranks that share sequences: their messages, by formula and again without compute."""

import re
from collections import Counter

import pytest

from bench import step
from bench.step_study import recording, replaying
from tests.bench.test_step import BERT, LLAMA, TINY, TP2, traced_by_formulas

CP2 = ["--context-parallel-size", "2", "--global-batch-size", "8"]
ZERO1 = ["--use-distributed-optimizer"]


@pytest.mark.some(2)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--cp-comm-type", "a2a", *LLAMA, "--bf16", *ZERO1], marks=pytest.mark.sizes(2, 4)),
        ["--cp-comm-type", "p2p", *LLAMA, "--recompute-granularity", "full", "--fp16", "--initial-loss-scale", "16"],
        ["--cp-comm-type", "all_gather", "--overlap-grad-reduce"],
        ["--cp-comm-type", "a2a", *BERT, "--recompute-granularity", "selective"],
        ["--cp-comm-type", "p2p", *BERT, "--bf16", "--bert-no-binary-head"],
        pytest.param(
            ["--cp-comm-type", "p2p", *TP2, "--sequence-parallel", *ZERO1, "--bf16"],
            marks=[pytest.mark.sizes(4), pytest.mark.mpi(min_size=4)],
        ),
        pytest.param(
            ["--cp-comm-type", "a2a", *LLAMA, "--pipeline-model-parallel-size", "2"],
            marks=[pytest.mark.sizes(4), pytest.mark.mpi(min_size=4)],
        ),
    ],
)
def test_formulas_hold_on_every_rank(options, world, folder):
    found = traced_by_formulas(world, folder, [*CP2, *options])
    assert {"context"} <= {row["group"] for row in found["formulas"]}


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, only=True)
@pytest.mark.parametrize(
    ("way", "drawn", "each"), [("p2p", "sendrecv", {"sendrecv": 3}), ("a2a", "all-to-all", {"all_to_all": 4})]
)
def test_a_recording_is_replayed_and_drawn(world, folder, way, drawn, each):
    argv = [*TINY, *CP2, "--cp-comm-type", way, "--warmup", "0", "--steps", "1", "--save", str(folder / "steps")]
    assert step.main(world, [*argv, "--timeline", str(folder / "a.svg")]) == 0
    world.barrier()
    words = Counter(re.findall("<!-- (.*) -->", (folder / "a.svg").read_text()))  # each text that was drawn
    assert {"replicas all-reduce", f"context {drawn}"} <= set(words)
    what = recording.parse(recording.read(folder / "steps"))
    rows = replaying.measure(world, what, warmup=0, rounds=2)
    assert all(row["replayed_bytes"] == row["bytes"] for row in rows)
    counts = Counter(row["operation"] for row in rows if row["group"] == "context")
    layers, microbatches = 3, 4
    assert counts == {operation: count * layers * microbatches for operation, count in each.items()}
