"""bench.step and bench.replay of a pipeline: its messages and sums, its bubble, and its picture."""

import json
import re
from collections import Counter

import pytest

from bench import step
from bench.step_study import recorder, stages, volumes
from bench.step_study.spans import Span
from bench.step_study.traced_step import TracedCollective, TracedStep, with_skew
from tests.bench.test_step import BERT, LLAMA, TINY, TP2, traced_by_formulas
from trainers.tasks.kinds import task_of

PP2 = ["--pipeline-model-parallel-size", "2", "--global-batch-size", "8"]
INTERLEAVED = ["--num-layers", "4", "--num-layers-per-virtual-pipeline-stage", "1"]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--overlap-grad-reduce"], marks=pytest.mark.sizes(2, 4)),  # on 4, of two replicas
        [*INTERLEAVED, "--bf16", "--use-distributed-optimizer", "--overlap-grad-reduce"],
        [*LLAMA, "--fp16", "--initial-loss-scale", "16", "--overlap-p2p-communication"],
        [*BERT, *INTERLEAVED, "--recompute-granularity", "full", "--bert-no-binary-head"],
        pytest.param(
            [*BERT, *TP2, "--sequence-parallel", "--bf16", "--use-distributed-optimizer"],
            marks=[pytest.mark.sizes(4), pytest.mark.mpi(min_size=4)],
        ),
    ],
)
def test_formulas_hold_on_every_stage(options, world, folder):
    found = traced_by_formulas(world, folder, [*PP2, *options])
    assert {row["stage"] for row in found["stages"]} == {0, 1}
    for row in found["stages"]:
        assert 0 < row["waits"][0] < 1 and 0 <= row["scheduled"] < 1
        assert row["pass"][0] < found["seconds"]["step"][row["rank"]][0]


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, only=True)
def test_a_recording_is_replayed_and_drawn(world, folder):
    from bench.step_study import recording, replaying

    argv = [*TINY, *INTERLEAVED, *PP2, "--warmup", "0", "--steps", "1", "--save", str(folder / "steps")]
    assert step.main(world, [*argv, "--timeline", str(folder / "a.svg"), "--chrome", str(folder / "a.json")]) == 0
    world.barrier()
    words = Counter(re.findall("<!-- (.*) -->", (folder / "a.svg").read_text()))  # each text that was drawn
    assert {"rank 0", "rank 1", "pipeline recv", "pipeline send"} <= set(words)
    entries = json.loads((folder / "a.json").read_text())["traceEvents"]
    layers = Counter(
        (entry["pid"], entry["name"], entry["args"]["microbatch"]) for entry in entries
        if entry.get("cat") == "part" and entry["name"].startswith(("layer", "embedding"))
    )  # fmt: skip
    assert layers == Counter(
        (number % 2, f"layer {number} {phase}", one)
        for number in range(4) for phase in ("forward", "backward") for one in range(4)
    ) + Counter((0, f"embedding {phase}", one) for phase in ("forward", "backward") for one in range(4))  # fmt: skip
    what = recording.parse(recording.read(folder / "steps"))
    rows = replaying.measure(world, what, warmup=0, rounds=2)
    counts = Counter(row["operation"] for row in rows if row["group"] == "pipeline" and row["stream"])
    # Three boundaries; rank 0 sends activations over two of them, rank 1 over one.
    each = {"send": 12, "recv": 12}
    assert counts == each
    assert all(row["replayed_bytes"] == row["bytes"] for row in rows)


@pytest.mark.parametrize("untied", [[], ["--untie-embeddings-and-output-weights"]])
@pytest.mark.parametrize("shape", [[], INTERLEAVED, [*BERT, "--norm-placement", "post"]])
def test_each_parameter_belongs_to_the_stage_that_has_it(shape, untied):
    """The formulas' parameters of a stage against those of the model that the trainer builds there."""
    from types import SimpleNamespace

    import torch

    import tplayers

    if untied and "bert" in shape:
        pytest.skip("a BERT's output layer is tied")
    config = recorder.from_json(step.read([*TINY, *PP2, *shape, *untied], 2))
    kind = tplayers.BERT if "bert" in shape else tplayers.GPT
    for part in task_of(config).parts():
        with torch.device("meta"):
            model = kind(task_of(config).model(), SimpleNamespace(size=1, rank=0), part=part)
        named = [(name, parameter.numel()) for name, parameter in model.named_parameters()]
        assert volumes.parameter_sizes(config, part) == named


# ---- pure parts


def a_message(operation, peer, start, end, waited=None):
    return TracedCollective(
        operation, "float32", 8, "pipeline", (0, 1), "pipeline/stream1", "pipeline", "forward", "", start, start, end,
        waited, peer=peer,
    )  # fmt: skip


def test_a_receive_has_skew_until_its_sender_begins_and_a_send_ends_with_it():
    sent = (a_message("send", 1, 2.0, 9.0, waited=(8.0, 9.0)), a_message("send", 1, 4.0, 9.0))
    back = a_message("recv", 1, 0.0, 8.0)
    got = (a_message("recv", 0, 1.0, 3.0), a_message("recv", 0, 3.0, 5.0), a_message("send", 0, 7.0, 7.5))
    steps = [[TracedStep(0.0, 10.0, (), events, False)] for events in ((*sent, back), got)]
    first, second = (steps[0].events for steps in with_skew(steps))
    assert [(one.end, one.skew, one.waited) for one in first] == [(3.0, 0.0, None), (5.0, 0.0, None), (7.5, 7.0, None)]
    assert [(one.end, one.skew) for one in second] == [(3.0, 1.0), (5.0, 1.0), (7.5, 0.0)]


def test_the_waits_of_a_drawn_pass_are_those_of_the_schedule():
    """Spans of 1F1B on two stages by hand: forward 1 s, backward 2 s, three micro-batches, messages that take none."""
    config = recorder.from_json(step.read([*TINY, "--num-layers", "2", *PP2[:2], "--global-batch-size", "6"], 2))

    def spans(stage, *actions):
        return tuple(Span(at, at + (2.0 if back else 1.0), f"layer {stage}", "backward" if back else "forward", number)
                     for at, back, number in actions)  # fmt: skip

    first = spans(0, (0, 0, 0), (1, 0, 1), (4, 1, 0), (6, 0, 2), (7, 1, 1), (10, 1, 2))
    last = spans(1, (1, 0, 0), (2, 1, 0), (4, 0, 1), (5, 1, 1), (7, 0, 2), (8, 1, 2))
    found = stages.stage_rows(config, [[TracedStep(0.0, 12.5, one, (), False)] for one in (first, last)])
    assert [row["pass"] for row in found] == [[12.0], [12.0]]
    assert [row["waits"] for row in found] == [[0.25], [0.25]] and found[0]["formula"] == 0.25
    assert [row["scheduled"] for row in found] == [pytest.approx(0.25)] * 2
    text = "\n".join(stages.stage_table(found))
    assert "| 1 | 1 | 3000.0 | 6000.0 | 25.0% | 25.0% |" in text and "12000.0 ms" in text
