"""bench.predict: the paper's figures, the plan against exhaustive search, machines from YAML, and errors."""

import itertools
import json
import math
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import yaml

from bench import predict
from bench.clusters import cluster
from bench.prediction import group_cost, kernels, model_cost, paper, plan, step_report
from bench.prediction.layout import MODELS
from bench.prediction.options import MICRO_BATCH
from commengine import UsageError, cost
from tplayers import formulas
from tplayers.formulas import StepLayout, TransformerShape
from trainers import presets
from trainers.presets import PRESETS
from trainers.settings.commands import GPTSettings
from trainers.tasks.kinds import task_of

DGX_2H = cluster.load("dgx-2h")
LAYOUT_FIELDS = [field.name for field in fields(StepLayout)]
SMALL = TransformerShape(layers=4, hidden=512, heads=8, seq=256, vocab=8192)


def call(*argv):
    return predict.main([str(one) for one in argv])


def test_the_papers_13_figures(tmp_path, capsys):
    """Mean error at most 6 points and none above 12, as bench.predict --paper --json has them."""
    assert call("--paper", "--json", tmp_path / "paper.json") == 0
    found = json.loads((tmp_path / "paper.json").read_text())
    published = {
        "figure5-mp": [95, 82, 77],
        "figure5-mp-dp": [96, 83, 79, 74],
        "table7": [82, 80, 77],
        "table8": [1.64, 2.34, 2.98],
    }
    assert {name: [row["published"] for row in rows] for name, rows in found.items()} == published
    errors = []
    for name, rows in found.items():
        for row, gpus in zip(rows, (2, 4, 8, 0), strict=False):
            error = abs(row["predicted"] - row["published"])
            errors.append(error / gpus * 100 if name == "table8" else error)
    assert len(errors) == 13 and sum(errors) / 13 <= 6 and max(errors) <= 12
    mean, largest = paper.errors(paper.figures(DGX_2H))
    assert (mean, largest) == (pytest.approx(sum(errors) / 13), pytest.approx(max(errors)))
    printed = capsys.readouterr().out
    assert "within the bounds" in printed and printed.count("| Table 8") == 3


def test_calibration_uses_the_single_gpu_and_nothing_else():
    step = paper.run(DGX_2H, "1.2b")
    assert step.flops_per_device == pytest.approx(39e12)
    assert 1 < model_cost.slowdown(DGX_2H) < 2  # memory-bound kernels below a plain copy, not absurdly so
    faster = replace(DGX_2H, calibration=replace(DGX_2H.calibration, flops=1e15))
    with pytest.raises(ValueError, match="1000 TFLOP/s cannot be met"):
        model_cost.slowdown(faster)
    unknown = replace(DGX_2H, calibration=replace(DGX_2H.calibration, model="9b"))
    with pytest.raises(ValueError, match=r"calibration\.model='9b': one of 355m"):
        model_cost.slowdown(unknown)


def test_table_2_time_an_epoch():
    """Published, but not among the 13 and used nowhere: 355M within 10%, 8.3B within 10%, 2.5B within 20%."""
    for (model, heads, tensor, days), bound in zip(paper.EPOCHS, (0.10, 0.20, 0.10), strict=True):
        step = paper.run(DGX_2H, model, tensor, data=64, heads=heads)
        assert step.total == pytest.approx(days * 86400 / paper.EPOCH_ITERATIONS, rel=bound)


@pytest.mark.slow
def test_ablation_shows_each_part_and_each_constant(capsys):
    assert call("--paper", "--ablation") == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.count("|") == 18]
    by_name = {row.split("|")[1].strip(): row for row in rows}
    everything = by_name["everything"].split("|")
    assert len(by_name) == 2 + 1 + 1 + 1 + 8 + 2 + 1 + 11  # headers, rule, published, everything, parts, variants, ...
    assert by_name["as in the file"].split("|")[2:] == everything[2:]
    for name, row in by_name.items():
        if name not in ("model", "constant", "---", "published", "everything", "as in the file"):
            assert row.split("|")[2:] != everything[2:], name
    # Free collectives cannot make anything slower.
    free = [float(cell) for cell in by_name["tensor-parallel collectives are free"].split("|")[3:16]]
    assert all(a >= b for a, b in zip(free, map(float, everything[3:16]), strict=True))


# ---- the kernels


def test_gemm_waves_and_tiles():
    """An 81st tile on 80 SMs takes another wave, a row beyond a tile's edge another tile; 8192^3 nears the ceiling."""
    device = DGX_2H.device.model_copy(update={"tiles": ((128, 128),)})
    one, two = (kernels.gemm_seconds(device, 128 * rows, 128 * columns, 4096) for rows, columns in ((8, 10), (9, 9)))
    assert two == pytest.approx(2 * one)
    assert kernels.gemm_seconds(device, 128 * 7 + 1, 128 * 9 + 1, 4096) == one
    # NVIDIA's V100: 90% of peak at 8192^3, far from it where K is a head's 96.
    rate = 2 * 8192**3 / kernels.gemm_seconds(DGX_2H.device, 8192, 8192, 8192) / DGX_2H.device.peak_flops
    assert 0.85 < rate <= 0.90
    batched = 2 * 128 * 1024**2 * 96 / kernels.gemm_seconds(DGX_2H.device, 1024, 1024, 96, 128)
    assert batched < 0.5 * DGX_2H.device.peak_flops
    # Memory is the floor: a product with K = 1 writes its result.
    assert kernels.gemm_seconds(DGX_2H.device, 8192, 8192, 1) >= 2 * 8192**2 / (900e9 * 0.833)


def test_ring_seconds_by_hand():
    """8 ranks over NVSwitch; 64 ranks over 32 nodes, 8 groups sharing 8 adapters; a lone group striping over 8."""
    inside = group_cost.ring_seconds(DGX_2H, "all_reduce", 50e6, 8, 8, 1)
    assert inside == pytest.approx(8.4e-6 + 14 * 3.4e-6 + 2 * 7 / 8 * 50e6 / 120e9)
    shared = group_cost.ring_seconds(DGX_2H, "all_reduce", 2e9, 64, 2, 8)
    assert shared == pytest.approx(8.4e-6 + 63 * 3.4e-6 + 63 * 9.6e-6 + 2 * 63 / 64 * 2e9 / 12e9)
    lone = group_cost.ring_seconds(DGX_2H, "all_reduce", 2e9, 64, 16, 1)
    assert lone == pytest.approx(8.4e-6 + 118 * 3.4e-6 + 8 * 9.6e-6 + 2 * 63 / 64 * 2e9 / 96e9)
    fitted = cost.FittedModel.from_json(
        {"collectives": {"all_reduce": [{"ranks": 2, "from_bytes": 0, "alpha": 1, "beta": 1}]}}
    )
    assert group_cost.ring_seconds(replace(DGX_2H, fitted=fitted), "all_reduce", 3, 2, 16, 1) == 4


def test_options_move_the_step_the_right_way():
    shape, base = MODELS["8.3b"], StepLayout(tensor=8, data=8, recompute="full")
    step = model_cost.predict(shape, base, DGX_2H)
    for recompute in ("none", "selective"):
        other = model_cost.predict(shape, replace(base, recompute=recompute), DGX_2H)
        assert other.total < step.total and other.memory_total > step.memory_total
    sequence = model_cost.predict(shape, replace(base, sequence_parallel=True), DGX_2H)
    assert sequence.seconds["elementwise"] < step.seconds["elementwise"]
    zero = model_cost.predict(shape, replace(base, zero1=True), DGX_2H)
    assert zero.memory["parameters and optimizer"] == pytest.approx(formulas.parameters(shape, 8) * (6 + 12 / 8))
    overlapped = model_cost.predict(shape, base, replace(DGX_2H, overlap=True))
    assert overlapped.hidden > 0 and overlapped.total < step.total
    twice = model_cost.predict(shape, replace(base, micro_batches=2), DGX_2H)
    assert twice.flops == 2 * step.flops and step.total < twice.total < 2 * step.total  # one optimizer, one reduction


# ---- the plan


@pytest.mark.parametrize(("gpus", "batch", "gigabytes"), [
    (4, 8, 34.0), pytest.param(8, 24, 2.35, marks=pytest.mark.long), (6, 12, 2.25)
])  # fmt: skip
def test_plan_is_what_exhaustive_search_finds(gpus, batch, gigabytes):
    machine = replace(DGX_2H, device=DGX_2H.device.model_copy(update={"memory_bytes": gigabytes * 1e9}))
    found = plan.plan(SMALL, machine, gpus, batch)
    best, count = (math.inf, None), 0
    sizes = range(1, gpus + 1)
    every = itertools.product(sizes, sizes, range(1, 5), range(1, batch + 1), range(1, batch + 1))
    for tensor, data, stages, micro, times in every:
        if (
            tensor * data * stages != gpus
            or data * micro * times != batch
            or 8 % tensor
            or 512 % tensor
            or 8192 % tensor
        ):
            continue
        off_on = (False, True)
        for recompute, sequence, zero1 in itertools.product(("none", "selective", "full"), off_on, off_on):
            if (sequence and (tensor == 1 or 256 % tensor)) or (zero1 and data == 1):
                continue
            count += 1
            layout = StepLayout(tensor, data, micro, times, recompute, sequence, zero1, pipeline=stages)
            step = model_cost.predict(SMALL, layout, machine)
            kept = formulas.KeptTensors(recompute=recompute, sequence_parallel=sequence)
            needs = []
            for stage, (part,) in enumerate(formulas.stages(SMALL, stages, recompute=recompute)):
                parameters = (6 + 12 / data if zero1 else 18) * formulas.parameters(SMALL, tensor, part)
                held = min(stages - stage, times)
                needs.append(parameters + formulas.activation_bytes(SMALL, micro, tensor, kept, part, held))
            if max(needs) + 2e9 <= gigabytes * 1e9:
                best = min(best, (step.total, layout), key=lambda pair: pair[0])
    assert len(found) == count
    assert found[0].fits and found[0].step.total == best[0] and found[0].layout == best[1]
    assert not found[0].why and all(one.why for one in found[1:])
    if gigabytes < 10:
        assert any("does not fit" in one.why for one in found)


def test_plan_has_no_candidate_twice():
    """A fused kernel keeps no scores, so "selective" is "none" and computes attention twice: it is no row."""
    machine = cluster.load("dgx-a100")
    found = plan.plan(SMALL, machine, 4, 8, like=StepLayout(position_mask=False))
    assert {one.layout.recompute for one in found} == {"none", "full"}
    assert len({replace(one.layout, recompute="", micro_batches=0) for one in found}) == len(found) // 2
    assert len({one.layout for one in found}) == len(found)
    drawn = plan.plan(SMALL, machine, 4, 8, like=StepLayout(position_mask=True))  # the scores are in memory again
    assert {one.layout.recompute for one in drawn} == {"none", "selective", "full"}
    asked = plan.plan(SMALL, machine, 4, 8, like=StepLayout(position_mask=False), fixed={"recompute": "selective"})
    assert {one.layout.recompute for one in asked} == {"selective"} and len(asked) == len(found) // 2


def test_a_machine_without_a_measured_step_is_not_calibrated(tmp_path, capsys):
    for name, plans in (("dgx-a100", True), ("dgx-a100", False), ("dgx-2h", False)):
        words = ["--model", "355m", "--cluster", name, "--gpus", "4", "--global-batch-size", "32"]
        assert call(*words, *(["--plan"] if plans else []), "--json", str(tmp_path / "r.json")) == 0
        said, calibrated = capsys.readouterr().out, name == "dgx-2h"
        assert ("- calibrated: 39 TFLOP/s were measured for 1.2b" in said) == calibrated
        assert ("- not calibrated: no step was measured on DGX-A100; " in said) == (not calibrated)
        assert json.loads((tmp_path / "r.json").read_text())["cluster"]["calibrated"] == calibrated


LLAMA = [
    "--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--disable-bias-linear",
    "--group-query-attention", "--num-query-groups", "8", "--ffn-hidden-size", "14336",
    "--untie-embeddings-and-output-weights",
]  # fmt: skip
LLAMA_8B = [
    "--num-layers", "32", "--hidden-size", "4096", "--num-attention-heads", "32", "--seq-length", "8192",
    "--padded-vocab-size", "128256", "--cluster", "dgx-h100", "--micro-batch-size", "1", "--attention-dropout", "0",
    "--hidden-dropout", "0", "--recompute-granularity", "none",
]  # fmt: skip


def test_the_llama_family_has_the_trainers_shape(tmp_path, capsys):
    """Llama 3 8B has 8,030,261,248 parameters (its model card); its step is compared with a GPT's of one width."""
    path = tmp_path / "r.json"
    assert call(*LLAMA_8B, *LLAMA, "--tensor-model-parallel-size", "4", "--json", str(path)) == 0
    found = json.loads(path.read_text())
    assert found["model"]["parameters"] == 8_030_261_248
    shape = task_of(GPTSettings(
        num_layers=32, hidden_size=4096, num_attention_heads=32, seq_length=8192, vocab_size=128256,
        make_vocab_size_divisible_by=1, swiglu=True, normalization="RMSNorm", position_embedding_type="rope",
        disable_bias_linear=True, group_query_attention=True, num_query_groups=8, ffn_hidden_size=14336,
        untie_embeddings_and_output_weights=True,
    )).model().cost_shape(8192)  # fmt: skip
    assert {name: found["model"][name] for name in asdict(shape)} == asdict(shape)
    kept = formulas.KeptTensors(hidden_dropout=False, scores="none", sends_together=True)
    assert found["memory_bytes"] == formulas.training_bytes(shape, 1, 4, 1, kept)
    # The products of the layers take as long as their FLOPs at a device's rate at most say, and not twice as long.
    flops = formulas.model_flops(shape, 1) / 4
    spent = sum(found["seconds"][name] for name in ("gemm", "attention", "ends"))
    assert 1 < spent / (flops / cluster.load("dgx-h100").device.peak_flops) < 3
    capsys.readouterr()
    assert call(*LLAMA_8B, *LLAMA, "--plan", "--gpus", "16", "--global-batch-size", "16", "--json", str(path)) == 0
    assert {one["tensor"] for one in json.loads(path.read_text())["candidates"]} == {1, 2, 4, 8, 16}


@pytest.mark.slow
def test_plan_of_the_paper_needs_8_gpus_a_model(tmp_path, capsys):
    """18 bytes x 8.3e9 / 4 are 37 GB: on 32 GB cards only 8-way splits are left, and the others are told apart."""
    argv = ("--plan", "--model", "8.3b", "--gpus", 16, "--global-batch-size", 16, "--json", tmp_path / "plan.json")
    assert call(*argv, "--no-use-distributed-optimizer") == 0
    rows = json.loads((tmp_path / "plan.json").read_text())["candidates"]
    assert {row["tensor"] * row["pipeline"] for row in rows if row["fits"]} == {8, 16}
    assert all("does not fit" in row["why"] for row in rows if not row["fits"])
    assert any("slower, most by" in row["why"] for row in rows)
    out = capsys.readouterr().out
    assert "**fastest**" in out and "layouts divide" in out


@pytest.mark.long
def test_plan_searches_zero1_and_keeps_to_what_is_given(tmp_path, capsys):
    """64 A100: 8.3B whole on each with ZeRO-1 beats any split without it. Each given option holds for all rows."""
    argv = ("--plan", "--model", "8.3b", "--cluster", "dgx-a100", "--gpus", 64, "--global-batch-size", 512)
    argv = (*argv, "--attention-dropout-mask", "fused", "--json", tmp_path / "plan.json")

    def rows(*given):
        assert call(*argv, *given) == 0
        return json.loads((tmp_path / "plan.json").read_text())["candidates"]

    every = rows()
    best = every[0]
    assert (best["tensor"], best["data"], best["zero1"]) == (1, 64, True)
    same = {key: best[key] for key in LAYOUT_FIELDS} | {"zero1": False}
    (twin,) = (row for row in every if all(row[key] == value for key, value in same.items()))
    assert "does not fit" in twin["why"] and twin["why"].endswith("fits with ZeRO-1")
    for key, value, *given in (
        ("tensor", 4, "--tensor-model-parallel-size", 4),
        ("micro_batch", 2, "--micro-batch-size", 2),
        ("recompute", "full", "--recompute-granularity", "full"),
        ("sequence_parallel", True, "--sequence-parallel"),
        ("sequence_parallel", False, "--no-sequence-parallel"),
        ("zero1", False, "--no-use-distributed-optimizer"),
    ):
        found = rows(*given)
        assert found and len(found) == sum(row[key] == value for row in every) < len(every)
        assert all(row[key] == value for row in found)
    assert "| ZeRO-1 |" in capsys.readouterr().out


def test_dropout_decides_what_attention_keeps_and_takes():
    """On fused kernels the trainer's own mask brings the scores back: 5 a s / h of a layer, and the time to draw it."""
    a100, shape = cluster.load("dgx-a100"), MODELS["8.3b"]
    fused = StepLayout(tensor=8, data=8)
    scores = 5 * 32 * 1024**2 * 8 * 72 / 8  # micro-batch 8, 72 layers, 8 ranks
    found = {}
    for name, layout in {
        "fused": fused,
        "position": replace(fused, position_mask=True),
        "off": replace(fused, position_mask=True, attention_dropout=False),
        "no dropout": replace(fused, hidden_dropout=False, attention_dropout=False),
    }.items():
        found[name] = model_cost.predict(shape, layout, a100)
    base = found["fused"].memory["activations"]
    assert found["position"].memory["activations"] - base == pytest.approx(scores)
    assert found["off"].memory == found["fused"].memory and found["off"].total == found["fused"].total
    assert base - found["no dropout"].memory["activations"] == (2 * 72 + 1) * 1024 * 8 * 3072
    assert found["position"].total > found["fused"].total
    assert found["position"].seconds["gemm"] == found["fused"].seconds["gemm"]
    # On unfused kernels the scores are there in any case; without dropout the softmax alone.
    eager = [model_cost.predict(shape, replace(fused, attention_dropout=on), DGX_2H).memory for on in (True, False)]
    assert eager[0]["activations"] - eager[1]["activations"] == pytest.approx(3 / 5 * scores)


def test_gradients_that_are_sent_count_where_they_outlive_the_activations():
    """Overlapped, the half copies of all gradients exist when the backward ends."""
    a100, shape = cluster.load("dgx-a100"), MODELS["8.3b"]
    step = model_cost.predict(shape, StepLayout(tensor=8, data=8, micro_batch=1, recompute="full"), a100)
    beyond = 2 * formulas.parameters(shape, 8) - step.memory["activations"]
    assert step.memory["gradients being sent"] == pytest.approx(beyond) and beyond > 0
    later = model_cost.predict(shape, StepLayout(tensor=8, data=8, micro_batch=1), replace(a100, overlap=False))
    assert later.memory["gradients being sent"] == 0


def test_plan_says_when_nothing_fits(capsys):
    assert call("--plan", "--model", "175b", "--gpus", 2, "--global-batch-size", 2) == 1
    printed = capsys.readouterr()
    assert "**Nothing fits**: the least that a layout needs is" in printed.out and "nothing fits" in printed.err


def test_json_says_what_was_predicted(tmp_path):
    argv = ("--model", "8.3b", "--gpus", 16, "--tensor-model-parallel-size", 8, "--json", tmp_path / "step.json")
    assert call(*argv) == 0
    found = json.loads((tmp_path / "step.json").read_text())
    assert found["model"]["name"] == "8.3b" and found["model"]["layers"] == 72 and found["cluster"]["name"] == "DGX-2H"
    step = model_cost.predict(
        MODELS["8.3b"], StepLayout(**{name: found["layout"][name] for name in LAYOUT_FIELDS}), DGX_2H
    )
    assert found["step_s"] == step.total and found["layout"]["gpus"] == 16 and found["date"] and found["command"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-8.3b", pytest.param("bert-3.9b", marks=pytest.mark.long)])
def test_a_preset_has_its_shape_its_tensor_size_and_its_batch(name, tmp_path):
    preset, cluster_name = PRESETS[name], "dgx-a100"
    argv = ("--preset", name, "--cluster", cluster_name, "--gpus", 64, "--micro-batch-size", 1)
    assert call(*argv, "--json", tmp_path / "step.json") == 0
    found = json.loads((tmp_path / "step.json").read_text())
    assert found["model"]["name"] == name and found["model"]["heads"] == preset.heads
    assert found["model"]["parameters"] == formulas.parameters(preset.shape())
    batch = preset.recipe["global_batch_size"]
    assert (found["layout"]["tensor"], found["layout"]["global_batch_size"]) == (preset.tensor, batch)
    # The table of presets has the same bytes.
    assert sum(found["memory_bytes"].values()) == pytest.approx(preset.rank_bytes(preset.tensor))
    assert call("--preset", name, "--gpus", 64, "--num-layers", 3, "--json", tmp_path / "step.json") == 0
    assert json.loads((tmp_path / "step.json").read_text())["model"]["layers"] == 3
    plan_argv = ("--plan", "--preset", name, "--cluster", cluster_name, "--gpus", 8)
    assert call(*plan_argv, "--json", tmp_path / "plan.json") == 0
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["global_batch_size"] == batch and {row["tensor"] for row in found["candidates"]} == {1, 2, 4, 8}


def test_the_list_of_presets(capsys):
    assert call("--preset", "list") == 0
    assert capsys.readouterr().out.split() == "\n".join(presets.table()).split()


def test_a_bert_attends_both_ways_and_has_more_heads():
    """Fused attention takes twice a causal one's time; its heads add a dense layer to the ends."""
    a100 = cluster.load("dgx-a100")
    gpt, bert = (
        model_cost.predict(replace(PRESETS["bert-336m"].shape(), model=model), StepLayout(), a100)
        for model in ("gpt", "bert")
    )
    assert bert.seconds["attention"] == pytest.approx(2 * gpt.seconds["attention"])
    assert bert.seconds["ends"] > gpt.seconds["ends"] and bert.flops > gpt.flops
    assert bert.memory["activations"] - gpt.memory["activations"] == 3 * 2 * 512 * 8 * 1024


def test_recomputation_is_the_trainers_unless_it_is_given(tmp_path):
    """Training recomputes nothing by default, and with a preset what the paper did."""
    for argv, recompute in (
        (["--model", "1.2b"], "none"),
        (["--model", "1.2b", "--recompute-granularity", "full"], "full"),
        (["--preset", "gpt-1.2b"], "full"),
        (["--preset", "gpt-1.2b", "--recompute-granularity", "none"], "none"),
    ):
        assert call(*argv, "--json", tmp_path / "step.json") == 0
        assert json.loads((tmp_path / "step.json").read_text())["layout"]["recompute"] == recompute
    assert GPTSettings().recompute_granularity in (None, "none")


@pytest.mark.parametrize(
    ("rate", "text"),
    [(0.089123e12, "0.0891"), (1.0e12, "1.00"), (39.04e12, "39.0"), (138.6e12, "139"), (1234e12, "1234"), (0, "0")],
)
def test_rates_have_three_significant_digits(rate, text):
    assert step_report.tflops(rate) == text


def simulated(operation, ranks, members, inside, between):
    """The seconds of messages without bytes, rank by rank: each waits for a message before it sends the next one."""

    def message(source, target):
        return inside if source // members == target // members else between

    done = [0.0] * ranks
    steps = {"all_reduce": 2 * (ranks - 1), "sendrecv": 1}.get(operation, ranks - 1)
    for step in range(1, steps + 1):
        apart = step if operation == "all_to_all" else 1
        arrived = [done[(rank - apart) % ranks] + message((rank - apart) % ranks, rank) for rank in range(ranks)]
        done = [max(before, now) for before, now in zip(done, arrived, strict=True)]
    return max(done)


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "sendrecv"])
def test_the_latency_of_a_ring_over_nodes_is_that_of_its_messages(operation):
    """1 to 8 nodes of 1 to 9 ranks, the last one full or not: n nodes have n links between them."""
    links = {"inside": cost.Link(10e-6, 0.0), "between": cost.Link(100e-6, 0.0)}
    machine = replace(DGX_2H, base=0.0, machine=replace(DGX_2H.machine, **links))
    for nodes, members in itertools.product(range(1, 9), range(1, 10)):
        for ranks in {nodes * members, (nodes - 1) * members + (members + 1) // 2}:
            if ranks > 1:
                found = group_cost.ring_seconds(machine, operation, 0.0, ranks, members, 1)
                wanted = simulated(operation, ranks, min(members, ranks), 10e-6, 100e-6)
                assert found == pytest.approx(wanted, rel=0.01), (nodes, members, ranks)
    if operation in ("all_reduce", "all_gather"):
        assert group_cost.ring_seconds(machine, operation, 0.0, 8, 4, 1) == pytest.approx(
            {"all_reduce": 500e-6, "all_gather": 250e-6}[operation]
        )


@pytest.mark.parametrize("name", ["dgx-a100", "dgx-h100", "amd-epyc"])
def test_no_device_computes_more_than_its_rates_allow(name):
    """Long causal sequences, on which Megatron-LM's count has twice the FLOPs of attention that are computed."""
    found = cluster.load(name)
    sizes = {"layers": 8, "hidden": 4096, "heads": 32, "vocab": 51200}
    for perfect in (False, True):
        if perfect:
            ideal = found.device.model_copy(update={"gemm_efficiency": 1.0, "attention_efficiency": (1.0, 1.0)})
            found = replace(found, calibration=None, base=0.0, device=ideal)
        device = found.device
        most = device.peak_flops * max(device.gemm_efficiency, *device.attention_efficiency)
        for length, recompute, stages in itertools.product((2048, 32768), ("none", "full"), (1, 2)):
            seq, shape = length, TransformerShape(seq=length, **sizes)
            layout = StepLayout(tensor=4, pipeline=stages, micro_batch=1, micro_batches=4, recompute=recompute)
            step = model_cost.predict(shape, layout, found)
            assert 0 < step.computed_per_device <= most
            h, tokens = 4096, 4 * seq
            layers = 8 * (24 * h * h + 2 * h * seq)  # a token's products forward, of attention the half
            backward = 8 * (48 * h * h + 5 * h * seq)  # with attention's scores once more
            again = layers if recompute == "full" else 0
            ends = 6 * h * 51200
            assert step.computed == pytest.approx(tokens * (layers + backward + again + ends), rel=0.06)
            if seq == 32768:
                assert step.flops_per_device > 1.1 * step.computed_per_device  # Megatron-LM's count


def test_help_names_the_defaults_that_count(capsys, monkeypatch):
    text = " ".join(predict.parser().format_help().split())
    for option, default in (("MICRO_BATCH_SIZE", f"{MICRO_BATCH}; --plan searches"), ("CP_COMM_TYPE", "a2a;")):
        assert default in text.split(f"{option} ")[-1][:260] or f"(default: {default}" in text
    assert "(default 1)" not in text.split("--micro-batch-size")[-1][:200] and "the cluster's" in text


# ---- machines


@pytest.mark.parametrize("name", ["dgx-2h", "dgx-a100", "dgx-h100", "amd-epyc", "selene"])
def test_machines_that_ship_load_and_predict(name, capsys):
    assert name in cluster.names()
    argv = ("--cluster", name, "--model", "355m", "--gpus", 4, "--tensor-model-parallel-size", 2)
    assert call(*argv) == 0
    assert "scaling efficiency" in capsys.readouterr().out
    step = model_cost.predict(SMALL, StepLayout(tensor=2, data=2), cluster.load(name))
    assert 0 < step.flops_per_device < cluster.load(name).device.peak_flops
    assert all(value >= 0 for value in step.seconds.values())


@pytest.mark.parametrize(
    ("layers", "hidden", "seq", "tflops"),
    [(24, 2048, 2048, 196), (24, 2048, 8192, 220), (32, 2560, 2048, 205), (32, 2560, 8192, 225)],
)
def test_published_throughput_of_a_newer_machine(layers, hidden, seq, tflops):
    """Dao 2023, FlashAttention-2, Table 1: GPT of 1.3 and 2.7 billion parameters on 8 A100. Not calibrated to."""
    shape = TransformerShape(layers, hidden, hidden // 128, seq, 51200)
    step = model_cost.predict(shape, StepLayout(data=8, micro_batch=8192 // seq), cluster.load("dgx-a100"))
    assert step.flops_per_device / 1e12 == pytest.approx(tflops, rel=0.10)


def edited(tmp_path, edit):
    data = yaml.safe_load((cluster.FOLDER / "dgx-2h.yaml").read_text())
    edit(data)
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d["device"].pop("units"), "device.units is missing"),
        (lambda d: d["device"].update(unit=1), "unknown: device.unit"),
        (lambda d: d["device"].update(peak_tflops="fast"), "device.peak_tflops='fast': should be a valid number"),
        (
            lambda d: d["device"].update(gemm_efficiency=90),
            "gemm_efficiency=90: should be less than or equal to 1",
        ),
        (lambda d: d["device"].update(peak_tflops=float("inf")), "device.peak_tflops=inf: should be a finite number"),
        (
            lambda d: d["device"].update(kernels="triton"),
            "device.kernels='triton': should be 'unfused', 'fused' or 'fused_softmax'",
        ),
        (lambda d: d["device"].update(tiles=[128, 128]), r"device.tiles\[0\]=128: should be a valid array"),
        (lambda d: d["node"].update(nics=0), "node.nics=0: should be greater than or equal to 1"),
        (lambda d: d.update(overlap="sometimes"), "overlap='sometimes': should be a valid boolean"),
        (lambda d: d.update(inside=120), "inside=120: should be an object"),
        (lambda d: d["inside"].update(fitted="nowhere.json"), "nowhere.json: there is no such file"),
    ],
)
def test_damaged_machine_is_named(edit, message, tmp_path):
    with pytest.raises(UsageError, match=f"mine.yaml: .*{message}"):
        cluster.load(str(edited(tmp_path, edit)))


def test_machine_file_of_ones_own(tmp_path):
    assert cluster.load(str(edited(tmp_path, lambda d: d.update(name="mine")))).name == "mine"
    model = {"format": 1, "collectives": {"all_reduce": [{"ranks": 2, "from_bytes": 0, "alpha": 1.0, "beta": 0.0}]}}
    (tmp_path / "fit.json").write_text(json.dumps(model))
    path = edited(tmp_path, lambda d: d["inside"].update(fitted="fit.json"))
    assert cluster.load(str(path)).fitted.seconds("all_reduce", 5, 2) == 1.0
    (tmp_path / "text.yaml").write_text("a: [1")
    with pytest.raises(UsageError, match="not YAML"):
        cluster.load(str(tmp_path / "text.yaml"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "1.2b", "--cluster", "dgx-9"], "neither a file nor one of amd-epyc, dgx-2h, dgx-a100"),
        (["--model", "9b"], "invalid choice: '9b'"),
        ([], "give --preset or --model, or also --num-layers"),
        (["--model", "355m", "--num-query-groups", "4"], "--num-query-groups 4: needs --group-query-attention"),
        (["--model", "355m", "--ffn-hidden-size", "0"], "--ffn-hidden-size 0: must be at least 1"),
        (["--preset", "bert-336m", "--swiglu"], "--swiglu: is a GPT's, and the model is a BERT"),
        (["--paper", "--swiglu"], "--paper takes no --swiglu"),
        (
            ["--model", "1.2b", "--num-attention-heads", "7"],
            "--hidden-size 1536: must be a multiple of --num-attention-heads 7",
        ),
        (
            ["--model", "1.2b", "--tensor-model-parallel-size", "3", "--gpus", "4"],
            "size 3: must divide --gpus 4; valid: 1, 2, 4",
        ),
        (["--model", "1.2b", "--tensor-model-parallel-size", "3"], "size 3 does not divide heads=16"),
        (["--model", "1.2b", "--gpus", "4", "--global-batch-size", "12"], "no multiple of --micro-batch-size 8 x 4"),
        (["--plan", "--model", "1.2b"], "--plan needs --gpus and --global-batch-size"),
        (["--plan", "--model", "1.2b", "--gpus", "41", "--global-batch-size", "5"], "no way to split 16 heads"),
        (["--model", "1.2b", "--hidden-dropout", "1"], "--hidden-dropout 1.0: must be at least 0 and below 1"),
        (["--model", "1.2b", "--attention-dropout-mask", "none"], "invalid choice: 'none'"),
        (["--paper", "--attention-dropout", "0"], "--paper takes no --attention-dropout"),
        (["--preset", "gpt-9b"], "--preset gpt-9b: valid here: gpt-355m"),
        (["--preset", "gpt-1.2b", "--model", "1.2b"], "--preset or --model, not both"),
        (["--preset", "gpt-8.3b", "--gpus", "12"], "--tensor-model-parallel-size 8: must divide --gpus 12"),
        (["--paper", "--preset", "gpt-1.2b"], "--paper takes no --preset"),
        (["--ablation", "--model", "1.2b"], "--ablation goes with --paper"),
        (["--paper", "--plan"], "not both"),
        (["--paper", "--model", "8.3b"], "--paper takes no --model"),
        (["--paper", "--no-sequence-parallel"], "--paper takes no --sequence-parallel"),
        (["--model", "1.2b", "--reserve-gb", "3"], "--reserve-gb goes with --plan"),
        (["--plan", "--model", "1.2b", "--gpus", "-8", "--global-batch-size", "8"], "--gpus -8: must be at least 1"),
        (["--model", "1.2b", "--gpus", "0"], "--gpus 0: must be at least 1"),
        (
            ["--plan", "--model", "1.2b", "--gpus", "8", "--global-batch-size", "8", "--reserve-gb", "-5"],
            "--reserve-gb -5.0: must be at least 0",
        ),
        (
            ["--plan", "--model", "1.2b", "--gpus", "8", "--global-batch-size", "8", "--reserve-gb", "nan"],
            "--reserve-gb nan: must be at least 0",
        ),
        (
            ["--plan", "--model", "1.2b", "--gpus", "8", "--global-batch-size", "8", "--micro-batch-size", "3"],
            "--micro-batch-size 3: no layout that divides has it; valid: [1, 2, 4, 8]",
        ),
        (
            [
                "--plan",
                "--model",
                "1.2b",
                "--gpus",
                "8",
                "--global-batch-size",
                "8",
                "--tensor-model-parallel-size",
                "1",
                "--sequence-parallel",
            ],
            "--sequence-parallel: no layout that divides has it with --tensor-model-parallel-size 1; valid: --no-seq",
        ),
    ],
)
def test_bad_options_are_named(argv, message, capsys):
    with pytest.raises(SystemExit) as ended:
        call(*argv)
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_report_is_written_with_its_surroundings(tmp_path):
    assert call("--paper", "--output", tmp_path / "predict.md") == 0
    text = Path(tmp_path / "predict.md").read_text()
    for part in ("- command: `python -m bench.predict", "- date: ", "- versions: python", "hardware does not matter"):
        assert part in text


@pytest.mark.parametrize(("name", "left_out"), [("dgx-2h", False), ("dgx-a100", True)])
def test_torch_s_checkpoint_stops_before_a_layer_s_last_product(name, left_out):
    shape, machine = TransformerShape(4, 512, 8, 256, 4096), cluster.load(name)
    layout = StepLayout(micro_batch=2, recompute="full", hidden_dropout=False, attention_dropout=False)
    masked = model_cost.StepOnCluster(shape, replace(layout, hidden_dropout=True), machine).layer()
    assert masked[2].total(1.5) == pytest.approx(masked[0].total(1.5))  # its mask comes after the last product
    forward, _, again = model_cost.StepOnCluster(shape, layout, machine).layer()
    last = kernels.gemm_seconds(machine.device, 512, 512, 2048) if left_out else 0.0
    assert again.total(1.5) == pytest.approx(forward.total(1.5) - last)
