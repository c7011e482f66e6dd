"""bench.predict with ranks that share sequences: memory, times, the best method, and what is refused."""

import json

import pytest

from bench.clusters.cluster import load
from bench.predict import main
from bench.prediction.model_cost import predict
from bench.prediction.plan import layouts
from tplayers.formulas import StepLayout, TransformerShape

LLAMA = TransformerShape(
    16, 2048, 32, 8192, 128256, ffn=8192, kv_heads=8, gated=True, rms_norm=True, rotary=True, biases=False
)
H100 = load("dgx-h100")
LONG = [
    "--cluster", "dgx-h100", "--num-layers", "16", "--hidden-size", "2048", "--num-attention-heads", "32",
    "--padded-vocab-size", "128256", "--seq-length", "32768",
]  # fmt: skip


def step(method="ulysses", context=1, **more):
    layout = {"micro_batch": 1, "hidden_dropout": False, "attention_dropout": False, "context": context}
    return predict(LLAMA, StepLayout(**layout | {"method": method} | more), H100)


@pytest.mark.parametrize("method", ["ulysses", "ring", "gather"])
def test_ranks_that_share_a_sequence_share_its_products_and_its_activations(method):
    alone, shared = step(), step(method, 4)
    assert shared.flops == alone.flops and shared.ranks == 4
    assert shared.memory["activations"] == pytest.approx(alone.memory["activations"] / 4)
    assert shared.memory["parameters and optimizer"] == alone.memory["parameters and optimizer"]
    assert shared.seconds["attention"] == pytest.approx(alone.seconds["attention"] / 4, rel=0.01)
    assert shared.seconds["gemm"] == pytest.approx(alone.seconds["gemm"] / 4, rel=0.2)
    zero1 = step(method, 4, zero1=True)
    assert zero1.memory_total < shared.memory_total and zero1.seconds["optimizer"] < shared.seconds["optimizer"]


def test_a_ring_is_hidden_where_attention_takes_longer_than_its_messages():
    """An all-to-all never is; so short parts want the one, and long ones the other."""
    seconds = {}
    for length in (1024, 65536):
        shape = TransformerShape(2, 4096, 32, length, 32000)
        for method in ("ulysses", "ring", "gather"):
            layout = StepLayout(micro_batch=1, hidden_dropout=False, attention_dropout=False, context=8, method=method)
            seconds[length, method] = predict(shape, layout, H100).seconds["context_communication"]
    assert 0 < seconds[1024, "ulysses"] < seconds[1024, "ring"]
    assert seconds[65536, "ring"] == 0 < seconds[65536, "ulysses"]


def test_only_long_sequences_are_shared_by_the_search():
    every = {
        length: {
            (one.context, one.method)
            for one in layouts(TransformerShape(2, 2048, 16, length, 32000), 8, 8, StepLayout())
        }
        for length in (1024, 8192)
    }
    assert every[1024] == {(1, "ulysses")}
    assert every[8192] == {(1, "ulysses"), *((c, method) for c in (2, 4, 8) for method in ("ulysses", "ring"))}
    odd = layouts(TransformerShape(2, 1536, 6, 8190, 32000), 8, 8, StepLayout(), asked=2)
    assert {(one.context, one.method) for one in odd} == {(1, "ulysses"), (2, "ulysses")}  # no early and late halves


def test_the_command_plans_and_predicts(tmp_path, capsys):
    result = tmp_path / "plan.json"
    words = [*LONG, "--plan", "--gpus", "8", "--global-batch-size", "8", "--json", str(result)]
    assert main([*words, "--context-parallel-size", "4", "--cp-comm-type", "p2p"]) == 0
    found = json.loads(result.read_text())["candidates"]
    assert {(one["context"], one["method"]) for one in found} == {(4, "ring")}
    assert "| 4 ring |" in capsys.readouterr().out
    assert main([*LONG, "--gpus", "8", "--context-parallel-size", "4", "--json", str(result)]) == 0
    told = json.loads(result.read_text())["layout"]
    assert (told["context"], told["data"], told["method"]) == (4, 2, "ulysses")
    assert "tensor 1 x data 2 x context 4 (ulysses)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--context-parallel-size", "3", "--gpus", "8"], "--context-parallel-size 3: must divide --gpus 8; valid: 1,"),
        (
            ["--context-parallel-size", "64", "--gpus", "64"],
            "context-parallel size 64 does not divide the 32 heads of a rank, as an all-to-all needs",
        ),
        (
            ["--plan", "--gpus", "8", "--global-batch-size", "8", "--context-parallel-size", "16"],
            "--context-parallel-size 16: no layout that divides has it; valid: [1, 2, 4, 8]",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(words, said, capsys):
    with pytest.raises(SystemExit) as raised:
        main([*LONG, *words])
    assert raised.value.code == 2
    assert said in capsys.readouterr().err
