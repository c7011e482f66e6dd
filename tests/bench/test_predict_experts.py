"""bench.predict with mixtures of experts: a rank's memory, products and messages, the plan, what is refused."""

import json

import pytest

from bench.clusters.cluster import load
from bench.predict import main
from bench.prediction import products
from bench.prediction.layout import MODELS
from bench.prediction.memory import kept_tensors
from bench.prediction.model_cost import predict
from bench.prediction.plan import layouts
from tplayers import formulas
from tplayers.formulas import StepLayout

MIXTRAL = MODELS["mixtral-8x7b"]
H100 = load("dgx-h100")


def layout(expert=1, data=8, **more):
    sizes = {"micro_batch": 1, "hidden_dropout": False, "attention_dropout": False, "data": data, "expert": expert}
    return StepLayout(**sizes | more)


def step(expert=1, **more):
    return predict(MIXTRAL, layout(expert, **more), H100)


def test_products_are_the_flops_of_a_token():
    """Of one micro-batch forward, at any number of ranks that share the experts."""
    for expert in (1, 2, 8):
        for shape in (MIXTRAL, MODELS["qwen1.5-moe-a2.7b"]) if expert < 8 else (MIXTRAL,):
            found = products.of_layer(shape, layout(expert, micro_batch=3))
            flops = sum(2 * one.m * one.n * one.k * one.times for one in found)
            logits = 2 * shape.seq * shape.hidden * shape.vocab
            attention = 4 * shape.seq**2 * shape.queries
            layer = formulas.model_flops(shape, 3) / 3 - 3 * logits - 3 * shape.layers * attention
            assert flops == pytest.approx(layer / shape.layers, rel=0.01)
            assert sum(one.times for one in found) == 2 + 1 + 2 * shape.experts // expert + 2 * (shape.shared > 0)


def test_ranks_share_the_memory_of_experts_and_exchange_rows():
    alone, shared = step(), step(8)
    whole = formulas.expert_parameters(MIXTRAL)
    assert alone.memory["experts and their optimizer"] == 18 * whole
    assert shared.memory["experts and their optimizer"] == 18 * whole / 8
    assert shared.memory["parameters and optimizer"] == alone.memory["parameters and optimizer"]
    assert shared.flops == alone.flops
    assert "expert_communication" not in alone.seconds and shared.seconds["expert_communication"] > 0
    assert shared.seconds["data_communication"] + shared.hidden < alone.seconds["data_communication"] + alone.hidden
    assert shared.seconds["gemm"] == pytest.approx(alone.seconds["gemm"], rel=0.2)
    zero1 = step(8, zero1=True)
    assert zero1.memory["experts and their optimizer"] == 18 * whole / 8  # no other rank has them
    spread = predict(MIXTRAL, layout(4, zero1=True), H100)
    assert spread.memory["experts and their optimizer"] == (6 + 12 / 2) * whole / 4
    found = formulas.training_bytes(MIXTRAL, 1, 1, 8, kept_tensors(layout(8), H100), expert=8)
    assert shared.memory == found


def test_stages_and_contexts_have_rows_of_their_own():
    whole, half = step(8), step(8, pipeline=2, micro_batches=4)
    assert half.seconds["expert_communication"] == pytest.approx(4 * whole.seconds["expert_communication"] / 2)
    # In one node of eight devices.
    whole, parts = step(4, data=4), step(4, data=4, context=2)
    assert parts.seconds["expert_communication"] < 0.7 * whole.seconds["expert_communication"]


def test_every_size_that_divides_is_searched():
    found = {(one.data, one.expert) for one in layouts(MIXTRAL, 16, 16, StepLayout(), asked=1)}
    assert {expert for data, expert in found if data == 16} == {1, 2, 4, 8}
    assert {expert for data, expert in found if data == 4} == {1, 2, 4}
    dense = layouts(MODELS["1.2b"], 4, 8, StepLayout())
    assert {one.expert for one in dense} == {1}


def test_a_plan_shows_a_ranks_experts(tmp_path, capsys):
    words = ["--plan", "--cluster", "dgx-h100", "--gpus", "16", "--global-batch-size", "32", "--model", "mixtral-8x7b"]
    fixed = ["--micro-batch-size", "1", "--recompute-granularity", "full", "--context-parallel-size", "1"]
    assert main([*words, *fixed, "--json", str(tmp_path / "plan.json")]) == 0
    out = capsys.readouterr().out
    assert "46.70 billion parameters" in out and ", experts over 8 |" in out
    rows = [line for line in out.splitlines() if ", experts over " in line]
    candidates = json.loads((tmp_path / "plan.json").read_text())["candidates"]
    for row, one in zip(rows, candidates, strict=False):
        memory, experts = sum(one["memory_bytes"].values()), one["memory_bytes"]["experts and their optimizer"]
        assert f"| {memory / 1e9:.1f}, {experts / 1e9:.1f} of them experts |" in row
    best = candidates[0]
    of_rank = formulas.expert_parameters(
        MIXTRAL, best["tensor"], formulas.StageShape(-(-32 // best["pipeline"])), expert=best["expert"]
    )
    state = 6 + 12 / (best["data"] // best["expert"]) if best["zero1"] else 18
    assert best["memory_bytes"]["experts and their optimizer"] == pytest.approx(state * of_rank, rel=0.1)


def test_a_shape_from_options(tmp_path):
    words = ["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "64"]
    words += ["--padded-vocab-size", "128", "--disable-bias-linear", "--num-experts", "4", "--moe-router-topk", "1"]
    more = ["--moe-ffn-hidden-size", "32", "--gpus", "4", "--expert-model-parallel-size", "2", "--cluster", "dgx-h100"]
    assert main([*words, *more, "--json", str(tmp_path / "step.json")]) == 0
    found = json.loads((tmp_path / "step.json").read_text())
    assert (found["model"]["experts"], found["model"]["of_token"], found["layout"]["expert"]) == (4, 1, 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--model", "mixtral-8x7b", "--gpus", "6", "--expert-model-parallel-size", "4"],
            "must divide --gpus 6; valid",
        ),
        (["--model", "mixtral-8x7b", "--gpus", "3", "--expert-model-parallel-size", "3"], "expert=3 does not divide"),
        (["--model", "1.2b", "--gpus", "2", "--expert-model-parallel-size", "2"], "needs a model with experts"),
        (["--model", "mixtral-8x7b", "--num-experts", "4"], "--num-experts: --model mixtral-8x7b has its own"),
    ],
)
def test_what_does_not_fit_is_named(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--cluster", "dgx-h100", *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
