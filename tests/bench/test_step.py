"""bench.step: every collective in its layer, what the formulas say and nothing else, and times that add up."""

import json
import re
import sys
from statistics import median
from types import SimpleNamespace

import pytest
import torch

from bench import step
from bench.step_study import recorder, recording, step_tables, volumes
from bench.step_study.spans import Span
from bench.step_study.traced_step import TracedCollective, TracedStep, with_skew
from commengine import CollectiveEvent, UsageError
from tests.support import mpirun
from tplayers import formulas
from tplayers.formulas import step_model
from trainers.tasks.commands import PRETRAIN_GPT
from trainers.tasks.kinds import task_of

TINY = [
    "--mock-data", "--vocab-size", "100", "--num-layers", "3", "--hidden-size", "32", "--num-attention-heads", "4",
    "--seq-length", "16", "--make-vocab-size-divisible-by", "128", "--micro-batch-size", "2",
    "--ddp-bucket-size", "5000",
]  # fmt: skip
TP2 = ["--tensor-model-parallel-size", "2"]
BERT = ["--model", "bert", "--mask-prob", "0.25"]  # 3 masked tokens in a sample of 16
LLAMA = [
    "--normalization", "RMSNorm", "--swiglu", "--position-embedding-type", "rope", "--disable-bias-linear",
    "--add-qkv-bias", "--group-query-attention", "--untie-embeddings-and-output-weights", "--kv-channels", "16",
]  # fmt: skip
ALSO_ON_FOUR = pytest.mark.sizes(2, 4)
SBH = 16 * 2 * 32  # elements of an activation


def counted(patch, moved):
    """Note in ``moved`` what the methods of communicators are given: not what a trace says of it."""
    from commengine import Communicator

    groups = ("tensor", "tensor/block2", "context", "data", "replicas", "pipeline", "ends")
    for name in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send", "recv", "sendrecv"):
        original = getattr(Communicator, name)

        def method(self, *tensors, original=original, name=name, **more):
            if self.name in groups and self.size > 1:
                moved.append((self.name, name, max(t.nbytes for t in tensors if hasattr(t, "nbytes"))))
            return original(self, *tensors, **more)

        patch.setattr(Communicator, name, method)


def traced_by_formulas(world, folder, options):
    """What the command finds of one step, after it has found the formulas on every rank.

    On rank 0 they are also what the methods of communicators were given.
    """
    moved, result = [], folder / "step.json"
    with pytest.MonkeyPatch.context() as patch:
        counted(patch, moved)
        assert step.main(world, [*TINY, *options, "--warmup", "0", "--steps", "1", "--json", str(result)]) == 0
    world.barrier()
    found = json.loads(result.read_text())
    assert found["formulas_hold"]
    formulas = [
        (row["group"], row["operation"], row["bytes"]) for row in found["formulas"] for _ in range(row["formula_count"])
    ]
    if world.rank == 0:
        assert sorted(formulas) == sorted(moved)
    return found


def counts(result, part):
    """{(phase, operation): (collectives a step, bytes of each)} of a part of the step, over the tensor group."""
    rows = [row for row in result["parts"] if row["part"] == part and row["group"] == "tensor"]
    return {(row["phase"], row["operation"]): (row["count"], row["bytes"]) for row in rows}


@pytest.mark.slow
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("files", [True, False])
def test_command_traces_what_the_formulas_say(files, world, folder):
    """TP 2, on 4 ranks x DP 2; and with files of every kind, one of two microbatches a step."""
    result = folder / "step.json"
    options = [*TINY, *TP2, "--warmup", "1", "--steps", "2", "--json", str(result)]
    if files:
        named = {"output": "a.md", "chrome": "a.json", "save": "recorded"}
        named |= {"timeline": "a.svg"} if world.size == 2 else {}
        options += [word for name, file in named.items() for word in (f"--{name}", str(folder / file))]
    else:
        options += ["--global-batch-size", str(2 * world.size), "--overlap-grad-reduce"]
    assert step.main(world, options) == 0
    world.barrier()
    found = json.loads(result.read_text())
    micro = 1 if files else 2
    for number in range(3):
        both = counts(found, f"layer {number}")
        assert both == {(phase, "all_reduce"): (2 * micro, 4 * SBH) for phase in ("forward", "backward")}
    assert counts(found, "embedding") == {("forward", "all_reduce"): (micro, 4 * SBH)}
    assert counts(found, "output layer") == {("backward", "all_reduce"): (micro, 4 * SBH)}
    loss = [row for row in found["parts"] if row["part"] == "loss"]
    assert [(row["count"], row["bytes"]) for row in loss] == [(micro, 4 * 16 * 2), (micro, 8 * 16 * 2)]
    assert found["formulas_hold"] and all(row["equal"] for row in found["formulas"])
    gradients = [row for row in found["parts"] if row["part"] == "gradients"]
    assert sum(row["bytes"] * row["count"] for row in gradients) == (
        4 * (128 * 16 + 18 * 32 + 3 * (6 * 32**2 + 9.5 * 32)) if world.size == 4 else 0  # halves, norms, row biases
    )
    if not files:
        launched = {name for row in gradients for name in row["launched"]}
        assert not gradients or "layer 2 backward" in launched
        return
    if world.size == 2:
        words = re.findall("<!-- (.*) -->", (folder / "a.svg").read_text())  # each text that was drawn
        assert {"rank 0", "rank 1", "backward", "optimizer", "tensor all-reduce"} <= set(words)
        assert any("3 layers, hidden 32" in word and "tensor 2 x data 1" in word for word in words)
    check_chrome(json.loads((folder / "a.json").read_text())["traceEvents"], world.size)
    assert {rank for row in found["parts"] for rank in row["of_ranks"]} == set(map(str, range(world.size)))
    text = (folder / "a.md").read_text()
    assert "- command: `python -m bench.step" in text and f"equal on all {world.size} ranks in all 2 steps" in text
    assert re.search(r"\| each layer \| forward \| tensor \| all_reduce \| 4096 \| 2 \| 2 \|.*\| g, after", text)
    replayed = recording.parse(recording.read(folder / "recorded"))
    assert replayed.size == world.size and len(replayed.calls[0]) >= sum(row["count"] for row in found["parts"])


def check_chrome(entries, ranks):
    assert {entry["pid"] for entry in entries} == set(range(ranks))
    spans = [entry for entry in entries if entry.get("cat") == "part" and entry["pid"] == 0]
    (layer,) = [entry for entry in spans if entry["name"] == "layer 1 backward"]
    mine = [entry for entry in entries if entry.get("args", {}).get("launched") == "layer 1 backward"]
    assert len([entry for entry in mine if entry["pid"] == 0 and entry["name"] == "all_reduce tensor"]) == 2
    for entry in mine:
        if entry["pid"] == 0 and entry["name"].endswith("tensor"):
            assert layer["ts"] <= entry["ts"] and entry["ts"] + entry["dur"] <= layer["ts"] + layer["dur"] + 1e-3


@pytest.mark.sizes(2)
@pytest.mark.some(5)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            [*TP2, "--sequence-parallel", "--recompute-granularity", "selective", "--use-distributed-optimizer"],
            marks=ALSO_ON_FOUR,
        ),
        [*TP2, "--sequence-parallel", "--recompute-granularity", "full", "--bf16", "--use-distributed-optimizer",
         "--overlap-grad-reduce", "--async-tensor-model-parallel-allreduce", "--ffn-hidden-size", "96"],
        [*TP2, "--recompute-granularity", "full", "--bf16", "--grad-reduce-in-fp32", "--hidden-dropout", "0"],
        ["--use-distributed-optimizer", "--fp16", "--initial-loss-scale", "16", "--max-position-embeddings", "20"],
        ["--use-distributed-optimizer", "--fp16", "--loss-scale", "1e30"],  # every step overflows
        pytest.param(
            [*LLAMA, *TP2, "--sequence-parallel", "--recompute-granularity", "full", "--use-distributed-optimizer"],
            marks=ALSO_ON_FOUR,
        ),
        [*TP2, "--num-attention-heads", "3", "--kv-channels", "16", "--pad-attention-heads", "--fp16"],
        [*LLAMA, *TP2, "--num-query-groups", "2", "--bf16", "--attention-dropout", "0"],
        pytest.param(
            [*BERT, *TP2, "--recompute-granularity", "full", "--hidden-dropout", "0"],
            marks=ALSO_ON_FOUR,
        ),
        [*BERT, *TP2, "--sequence-parallel", "--bf16", "--use-distributed-optimizer", "--overlap-grad-reduce",
         "--async-tensor-model-parallel-allreduce"],
        [*BERT, *TP2, "--sequence-parallel", "--norm-placement", "post", "--bert-no-binary-head",
         "--recompute-granularity", "full", "--hidden-dropout", "0"],
        [*BERT, "--norm-placement", "post", "--use-distributed-optimizer", "--fp16", "--initial-loss-scale", "16"],
    ],
)  # fmt: skip
def test_formulas_hold_whatever_the_step_is(options, world, folder):
    moved = []
    result = folder / "step.json"
    with pytest.MonkeyPatch.context() as patch:
        counted(patch, moved)
        assert step.main(world, [*TINY, *options, "--warmup", "0", "--steps", "1", "--json", str(result)]) == 0
    world.barrier()
    found = json.loads(result.read_text())
    formulas = [
        (row["group"], row["operation"], row["bytes"]) for row in found["formulas"] for _ in range(row["formula_count"])
    ]
    if world.rank == 0:  # what the methods were given, not what a trace says of it
        assert sorted(formulas) == sorted(moved)
    if "bert" in options:
        check_heads(found, options)
    elif "--recompute-granularity" in options and "full" in options and LLAMA[0] not in options:
        layers = [counts(found, f"layer {number}") for number in range(3)]
        if "--sequence-parallel" in options:
            size = 2 * SBH
            assert layers == [{
                ("forward", "all_gather"): (2, size), ("forward", "reduce_scatter"): (2, size),
                ("recompute", "all_gather"): (2, size), ("recompute", "reduce_scatter"): (2, size),
                ("backward", "all_gather"): (4, size), ("backward", "reduce_scatter"): (2, size),
            }] * 3  # fmt: skip
        else:  # without dropout nothing needs the MLP's sum again
            expected = {"forward": 2, "recompute": 1, "backward": 2}
            assert layers == [{(phase, "all_reduce"): (n, 2 * SBH) for phase, n in expected.items()}] * 3


def check_heads(found, options):
    """A BERT's collectives behind its layers, written out: 3 positions and, in shards of the sequence, 4."""
    rows, size = 2 * 32, 2 if "--bf16" in options else 4  # elements of a position in a micro-batch, and their bytes
    loss = [(row["count"], row["bytes"]) for row in found["parts"] if row["part"] == "loss"]
    heads = {part: counts(found, part) for part in ("MLM head", "output layer", "pooler")}
    if "--sequence-parallel" in options:
        once = (1, 4 * rows * size)
        assert heads["MLM head"] == {("forward", "reduce_scatter"): once, ("backward", "all_gather"): once}
        again = {("backward", "all_gather"): once, ("backward", "reduce_scatter"): once}
        assert heads["output layer"] == {("forward", "all_gather"): once, **again}
        pooled = "--bert-no-binary-head" not in options
        assert heads["pooler"] == ({("forward", "all_reduce"): (1, rows * size)} if pooled else {})
        assert loss == [(1, 4 * 4 * 2), (1, 8 * 4 * 2)]
    elif TP2[0] in options:
        assert heads == {
            "MLM head": {},
            "output layer": {("backward", "all_reduce"): (1, 3 * rows * size)},
            "pooler": {},
        }
        assert loss == [(1, 4 * 3 * 2), (1, 8 * 3 * 2)]
    else:
        assert not loss and not any(heads.values())
    if "full" in options:  # the last sum runs again if a norm after it needs it
        again = 2 if "post" in options else 1
        operation = "reduce_scatter" if "--sequence-parallel" in options else "all_reduce"
        for number in range(3):
            assert counts(found, f"layer {number}")["recompute", operation] == (again, SBH * size)


def labels_by_the_stack(model, seen):
    """A method for ``Communicator.all_reduce`` that notes who calls it: by the frames above, not by hooks or times."""
    from commengine import Communicator
    from tplayers import TransformerBlock

    original = Communicator.all_reduce
    owners = {parameter.data_ptr(): name for name, parameter in model.named_parameters()}

    def all_reduce(self, tensor, *args, **options):
        if self.name == "tensor" and self.size > 1:
            part = phase = None
            frame = sys._getframe(1)
            while frame is not None:
                local = frame.f_locals
                if isinstance(local.get("self"), TransformerBlock):
                    part, phase = part or local["self"].site.replace("layers.", "layer "), phase or "forward"
                if frame.f_code.co_name == "backward" and "weights" in local:
                    owner = owners[local["weights"][0].data_ptr()]
                    part = "layer " + owner.split(".")[1] if owner.startswith("layers.") else "output layer"
                    phase = "backward"
                if frame.f_code.co_name == "recompute_fn":
                    phase = "recompute"
                frame = frame.f_back
            seen.append((part, phase))
        return original(self, tensor, *args, **options)

    return all_reduce


@pytest.mark.mpi(min_size=2)
def test_each_collective_belongs_to_the_layer_that_ran_it(world):
    from bench.step_study.traced_step import trace_steps
    from commengine import Communicator
    from trainers.data.corpus import open_corpus

    options = [*TINY, *TP2, "--recompute-granularity", "full", "--overlap-grad-reduce",
               "--async-tensor-model-parallel-allreduce"]  # fmt: skip
    config = PRETRAIN_GPT.parse(options)
    trainer = task_of(config).new_trainer(world, open_corpus(config))
    layers, embedding = list(trainer.model.layers), trainer.model.embedding
    named = [(name, parameter.numel()) for name, parameter in trainer.model.named_parameters()]
    assert formulas.parameter_sizes(volumes.shape_of(config), 2) == named
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Communicator, "all_reduce", labels_by_the_stack(trainer.model, seen))
        traced = trace_steps(trainer, 0, 1, lambda: None)
    for module in (trainer.model, *layers, trainer.model.final_norm, layers[0].attention_norm, layers[0].mlp):
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert not {"logits", "finish", "zero", "step"} & {*vars(trainer.model), *vars(embedding), *vars(trainer.gradients)}
    # A collective takes place of its own thread where it has a stream; its caller is the step's all the same.
    assert any(event.stream for event in traced.recordings[0].events)
    if world.rank == 0:
        ((ours,),) = [traced.steps[0]]
        events = [event for event in ours.events if event.group == "tensor"]
        known = [(event.part, event.phase) for event in events if event.part.startswith(("layer", "output"))]
        assert known == [label for label in seen if label[0]] and len(known) == 3 * 6 + 1
        assert all(
            event.part in ("embedding", "loss", "loss and norm") for event in events if event.part not in dict(known)
        )
        check_times(traced.steps)
    trainer.close()


def check_times(ranks):
    """Spans leave no gaps; what is exposed and what is hidden is all there is; sums agree."""
    rows, phases, sums = step_tables.collective_rows(ranks), step_tables.phase_rows(ranks), step_tables.summary(ranks)
    for rank, (one,) in enumerate(ranks):
        assert one.spans[0].start <= one.start and one.spans[-1].end == one.end
        assert all(before.end == after.start for before, after in zip(one.spans, one.spans[1:], strict=False))
        layers = [(span.part, span.phase) for span in one.spans if span.phase in ("recompute", "backward")]
        order = ["loss", "output layer", *(f"layer {number}" for number in (2, 1, 0)), "embedding"]
        assert list(dict.fromkeys(part for part, _ in layers)) == order
        for event in one.events:
            assert 0 <= event.exposed <= event.seconds + 1e-12 and 0 <= event.skew <= event.seconds
            assert event.stream or event.exposed == event.seconds
            assert one.start <= event.enqueue <= event.start and event.end <= one.end
        mine = [row["of_ranks"][str(rank)] for row in rows if str(rank) in row["of_ranks"]]
        for name in ("seconds", "exposed", "skew"):
            total = sum(getattr(event, name) for event in one.events)
            assert sum(row[name][0] for row in mine) == pytest.approx(total)
        # The caller waits for one at a time, and is in one span at a time.
        waited = sum(event.exposed for event in one.events)
        assert sums["exposed"][rank] == [pytest.approx(waited)] and waited <= sums["communicating"][rank][0] + 1e-9
        assert sum(row["exposed"][0] for row in phases if row["rank"] == rank) == pytest.approx(waited)
        assert sum(row["seconds"][0] for row in phases if row["rank"] == rank) == pytest.approx(one.seconds, abs=1e-3)


# ---- pure parts


def an_event(start, end, group="tensor", ranks=(0, 1), **other):
    about = {"stream": None, "part": "loss", "phase": "forward", "launched": "", "waited": (start, end)} | other
    return TracedCollective("all_reduce", "float32", 8, group, ranks, enqueue=start, start=start, end=end, **about)


def test_skew_ends_when_the_last_rank_begins():
    tensor = [an_event(1.0, 4.0), an_event(5.0, 6.0)], [an_event(3.0, 4.5), an_event(4.0, 6.0)]
    alone = an_event(2.0, 9.0, "data", (0, 2), stream="data/stream1")
    late = an_event(8.0, 9.5, "data", (0, 2), stream="data/stream1")
    other = an_event(0.0, 1.0, "data", (1, 3))  # another group of the same name
    events = [(*tensor[0], alone), (other, *tensor[1]), (late,)]
    ranks = with_skew([[TracedStep(0.0, 10.0, (Span(0.0, 10.0, "loss", "forward"),), e, False)] for e in events])
    assert [[event.skew for event in steps[0].events] for steps in ranks] == [[2.0, 0.0, 6.0], [0.0, 0.0, 1.0], [0.0]]
    (row, *_) = step_tables.collective_rows([ranks[0]])
    assert row["algbw"] == 2 * 8 / 2.0 == row["busbw"]  # of two ranks; 4 seconds, of them 2 of skew
    assert step_tables.summary(ranks)["communicating"] == [[8.0], [4.0], [1.5]]


def test_a_bandwidth_follows_from_the_time_and_the_skew_of_its_row():
    """Three steps: the median time is of one, the median skew of another."""
    steps = [
        TracedStep(0.0, 10.0, (), (an_event(0.0, spent, skew=skew),), False)
        for spent, skew in ((4.0, 0.5), (6.0, 1.0), (9.0, 8.0))
    ]
    (row,) = step_tables.collective_rows([steps])
    times = row["of_ranks"]["0"]
    assert row["algbw"] == 8 / (median(times["seconds"]) - median(times["skew"])) == 8 / 5


def test_exposed_is_what_the_caller_waited_for_while_it_ran():
    from bench.step_study.traced_step import _event

    spans = [Span(0.0, 2.0, "layer 1", "backward"), Span(2.0, 9.0, "gradients", "")]

    def traced(group, stream, **times):
        one = CollectiveEvent("all_reduce", "sum", None, "float32", (2,), 2, 8, group, 2, stream, **times)
        event = _event(one, spans, {group: (0, 1)})
        assert event.seconds == one.seconds and event.exposed == pytest.approx(one.seconds - one.hidden_seconds)
        return event.part, event.phase, event.launched, event.waited

    launched = {"enqueue": 1.0, "start": 3.0, "end": 5.0}
    in_layer = ("gradients", "", "layer 1 backward")
    assert traced("data", "s", **launched, wait_start=4.0, wait_end=5.5) == (*in_layer, (4.0, 5.0))
    assert traced("data", "s", **launched, wait_start=2.0, wait_end=5.0) == (*in_layer, (3.0, 5.0))
    assert traced("data", "s", **launched, wait_start=6.0, wait_end=6.0) == (*in_layer, None)
    assert traced("data", "s", **launched) == (*in_layer, None)
    blocking = {"enqueue": 1.5, "start": 1.5, "end": 1.75}
    assert traced("tensor", None, **blocking) == ("layer 1", "backward", "layer 1 backward", (1.5, 1.75))
    after = {"enqueue": 2.0, "start": 2.0, "end": 3.0}
    assert traced("tensor", None, **after) == ("gradients", "", "gradients", (2.0, 3.0))


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("alone", [False, True])
def test_parameters_of_a_bert_are_the_models(placement, alone):
    """Their names, sizes and order, and which gradients are partial on sequence shards, against the model's own."""
    import tplayers

    options = [*TINY, *BERT, *TP2, "--sequence-parallel", "--norm-placement", placement]
    given = step.read(options + ["--bert-no-binary-head"] * alone, 2)
    config = recorder.from_json(given)
    with torch.device("meta"):
        model = tplayers.BERT(task_of(config).model(), SimpleNamespace(size=2, rank=1))
    sizes = volumes.parameter_sizes(config, *task_of(config).parts())
    assert sizes == [(name, parameter.numel()) for name, parameter in model.named_parameters()]
    partial = {name for name, placed in tplayers.placements(model).items() if placed.partial}
    assert {name for name, _ in sizes if name.endswith(volumes.PARTIAL)} == partial


def test_the_head_of_masked_tokens_runs_at_their_positions_alone():
    """BERT-336M's samples of 512 tokens have at most 76 masked ones, 80 in 8 equal shards; 2 terms, and 3 counts."""
    given = ["--preset", "bert-336m", "--mock-data", "--micro-batch-size", "4", "--bf16", "--ddp-bucket-size", "1000"]
    given += ["--tensor-model-parallel-size", "8"]
    found = {}
    for name, more in (("whole", []), ("shards", ["--sequence-parallel"]), ("alone", ["--bert-no-binary-head"])):
        config = recorder.from_json(step.read([*given, *more], 16))
        found[name] = {
            (one.group, one.what.part, one.what.phase, one.what.operation): (one.what.count, one.what.size)
            for one in volumes.expected(config, 16, 0) if one.what.part in ("output layer", "pooler", "labels")
        }  # fmt: skip
    of_position, times = 4 * 1024 * 2, 1024 // (4 * 2)
    labels = {("data", "labels", "", "all_reduce"): (1, 24)}
    whole = {("tensor", "output layer", "backward", "all_reduce"): (times, 76 * of_position)}
    assert found["whole"] == whole | labels
    assert found["alone"] == whole | dict.fromkeys(labels, (1, 16))
    assert found["shards"] == labels | {
        ("tensor", "output layer", "forward", "all_gather"): (times, 80 * of_position),
        ("tensor", "output layer", "backward", "all_gather"): (times, 80 * of_position),
        ("tensor", "output layer", "backward", "reduce_scatter"): (times, 80 * of_position),
        ("tensor", "pooler", "forward", "all_reduce"): (times, of_position),
    }


def test_a_difference_is_told():
    rows = volumes.compared([], [("layer 0", "forward", "tensor", "all_reduce", 8)])
    assert [(row["equal"], row["source"], row["formula_count"]) for row in rows] == [(False, "no formula", 0)]
    text = "\n".join(step_tables.volume_table(rows))
    assert text.count("**differs**") == 2


def test_layers_fold_only_where_all_are_alike():
    def rows(*kinds):
        return volumes.compared([], [(f"layer {n}", "forward", "tensor", kind, 8) for n, kind in kinds])

    assert [row["part"] for row in volumes.folded(rows((0, "a"), (1, "a"), (0, "b"), (1, "b")))] == ["each layer"] * 2
    assert [row["part"] for row in volumes.folded(rows((0, "a"), (1, "a"), (0, "b")))] == ["each layer", "layer 0"]


@pytest.mark.mpi(min_size=2)
def test_status_is_1_where_a_formula_is_wrong(world, monkeypatch, capsys):
    original = step_model.loss_collectives
    monkeypatch.setattr(step_model, "loss_collectives", lambda *args, **_: original(*args))  # three, as the paper has
    assert step.main(world, [*TINY, *TP2, "--warmup", "0", "--steps", "1"]) == 1
    if world.rank == 0:
        printed = capsys.readouterr().out
        assert f"**{world.size} of {world.size} tables, one a rank and step, differ**" in printed
        assert re.search(r"\| loss \| forward .* 128 \| 3 \| 1 \|.*\*\*differs\*\*", printed)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--warmup", "-1"], "--warmup -1: must be at least 0"),
        (["--timeline", "x.gif"], "--timeline x.gif: the name ends in .png, .svg or .pdf"),
        (["--json", "/no/where.json"], "--json /no/where.json: there is no folder /no"),
        (["--json", "/tmp"], "--json /tmp: is a folder, not a file"),
        (["--save", "/proc/foo/bar"], "--save /proc/foo/bar: No such file or directory"),
        (["--save-format", "chakra"], "--save-format goes with --save"),
        (["--stepz", "1"], "unrecognized arguments: --stepz 1"),
        (["--compile"], "--compile: a compiled graph runs no hooks"),
        (["--deterministic", "--global-batch-size", "8"], "--deterministic: computes one sample at a time"),
        (["--tensor-model-parallel-size", "3"], "--tensor-model-parallel-size 3: does not divide the 4 ranks"),
        (["--num-attention-heads", "1", *TP2], "--num-attention-heads 1"),
        (["--data-path", "x"], "--mock-data: cannot go with --data-path"),
    ],
)
def test_bad_options_are_named(argv, message):
    with pytest.raises((ValueError, UsageError), match=re.escape(message)):
        step.read([*TINY, *argv], 4)


def test_a_preset_is_the_papers_model_and_flags_win():
    argv = ["--preset", "gpt-8.3b", "--mock-data", "--num-layers", "2"]
    config = step.read(argv, 16)["config"]
    assert (config["hidden_size"], config["num_attention_heads"], config["num_layers"]) == (3072, 24, 2)
    assert (config["tensor_model_parallel_size"], config["global_batch_size"]) == (8, 512)
    with pytest.raises(UsageError, match="--tensor-model-parallel-size 8: does not divide the 4"):
        step.read(argv, 4)


def test_a_preset_or_an_option_decides_on_the_model(tmp_path, capsys):
    few = ["--mock-data", "--num-layers", "2"]
    found = step.read(["--preset", "bert-336m", *few], 2)
    assert found["model"] == "bert" and found["config"]["hidden_size"] == 1024
    assert found["config"]["seq_length"] == 512 and found["config"]["tensor_model_parallel_size"] == 1
    file = tmp_path / "run.yaml"
    file.write_text("preset: bert-3.9b\nmask_prob: 0.2\n")
    found = step.read(["--model", "bert", "--config", str(file), *few], 4)
    assert (found["model"], found["config"]["hidden_size"], found["config"]["mask_prob"]) == ("bert", 2560, 0.2)
    (tmp_path / "yaml").write_text("num_layers: 2\n")
    for words in (["--save", "bert-336m"], [f"--config={tmp_path / 'yaml'}", "--data-cache-path", "bert-336m"]):
        assert step.read([*TINY, *words], 2)["model"] == "gpt"  # the name stands in another option's place
    assert step.read(TINY, 2)["model"] == "gpt" and step.read([*TINY, *BERT], 2)["config"]["mask_prob"] == 0.25
    for argv, message in [
        (
            ["--model", "gpt", "--preset", "bert-336m"],
            "--preset bert-336m: is a model of pretrain_bert; valid here: gpt",
        ),
        (
            ["--model", "bert", "--preset", "gpt-355m"],
            "--preset gpt-355m: is a model of pretrain_gpt; valid here: bert",
        ),
        (["--preset", "none"], "--preset none: valid here: gpt-355m, .*, or list"),
        (["--preset", "bert-1.3b", "--compile"], "--compile: a compiled graph runs no hooks"),
        (["--model", "t5"], r"argument --model: invalid choice: 't5' \(choose from '?gpt'?, '?bert'?\)"),
    ]:
        with pytest.raises((ValueError, UsageError), match=message):
            step.read([*argv, *few], 2)
    with pytest.raises(SystemExit):
        step.read(["--preset", "list"], 2)
    assert "| gpt-355m |" in capsys.readouterr().out


def test_a_recording_is_replaced_only_when_asked(tmp_path):
    for rank in range(4):
        (tmp_path / f"rank-{rank}.jsonl").touch()
    argv = [*TINY, "--save", str(tmp_path)]
    with pytest.raises(UsageError, match=r"--save .*: holds a recording of 4 ranks; .* --overwrite"):
        step.read(argv, 2)
    assert len(list(tmp_path.iterdir())) == 4
    step.read([*argv, "--overwrite"], 2)
    assert not list(tmp_path.iterdir())


def test_a_long_title_is_wrapped_into_the_picture(tmp_path):
    from matplotlib.figure import Figure

    from bench.step_study import timeline

    drawn = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
        one = TracedStep(0.0, 10.0, (Span(0.0, 10.0, "loss", "forward"),), (an_event(1.0, 4.0),), False)
        timeline.write_picture(tmp_path / "a.png", [one, one], "WIDE words, " * 20)
    (figure,) = drawn
    figure.canvas.draw()
    title, page = figure._suptitle.get_window_extent(), figure.bbox
    assert "median step" in figure._suptitle.get_text()
    assert page.x0 <= title.x0 and title.x1 <= page.x1
    legends = [legend.get_window_extent() for legend in figure.legends]
    assert legends and all(legend.y1 <= title.y0 + 4 for legend in legends)  # the frame's padding is blank


@pytest.mark.slow
def test_bad_input_ends_every_rank_with_one_line():
    done = mpirun.run(2, "-m", "bench.step", *TINY, "--steps", "none")
    assert done.returncode == 2 and done.stdout == ""
    assert [line for line in done.stderr.splitlines() if "error: " in line] == [
        "python -m bench.step: error: argument --steps: invalid int value: 'none'"
    ]
    assert "Traceback" not in done.stderr
