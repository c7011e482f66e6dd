"""What a run says about its experts: metrics, one warning for each that died, the report's table and a picture."""

import json

import pytest

from trainers.run.experts import ExpertWatch, draw, expert_lines, load
from trainers.run.metrics import read_rows

#: of two layers with four experts
TOKENS = [[100, 60, 40, 0], [50, 50, 50, 50]]


def test_rows_have_each_layers_busiest_expert():
    said = []
    watch = ExpertWatch(said.append)
    assert watch.row(10, TOKENS) == {"expert_load/layer_0": 2.0, "expert_load/layer_1": 1.0, "idle_experts": 1}
    assert watch.tokens is TOKENS
    assert load([0, 0], 0) == 0.0


def test_an_expert_that_died_is_named_once():
    said = []
    watch = ExpertWatch(said.append)
    watch.row(10, TOKENS)
    watch.row(20, TOKENS)
    assert len(said) == 1 and "step 10: expert 3 of layer 0: no token since" in said[0]
    watch.row(30, [[1, 1, 1, 197], [0, 0, 100, 100]])  # it lives again, and two others died
    assert len(said) == 2 and "expert 0 of layer 1, expert 1 of layer 1: no token" in said[1]
    watch.row(40, TOKENS)
    assert len(said) == 3 and "expert 3 of layer 0" in said[2]
    watch.row(50, [[0] * 9 + [400], [0] * 9 + [400]])
    assert "expert 0 of layer 0, expert 1 of layer 0, expert 2 of layer 0, expert 4 of layer 0 and 13 more" in said[3]


def test_few_tokens_say_nothing_of_an_expert():
    said = []
    ExpertWatch(said.append).row(1, [[127, 0, 0, 0]])
    assert not said
    ExpertWatch(said.append).row(1, [[128, 0, 0, 0]])
    assert len(said) == 1


def test_the_table_of_the_report():
    _, _, first, second = expert_lines(TOKENS)
    assert first.split() == ["0", "2.00", "(expert", "0)", "0.00", "(expert", "3)", "1"]
    assert second.split() == ["1", "1.00", "(expert", "0)", "1.00", "(expert", "0)", "0"]


@pytest.mark.parametrize("rows", [[], [{"iteration": 5, "expert_load/layer_0": 2.0, "expert_load/layer_1": None}]])
def test_a_picture(tmp_path, rows):
    draw(tmp_path / "experts.png", rows, TOKENS)
    assert (tmp_path / "experts.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
@pytest.mark.slow
def test_a_run_counts_the_tokens_of_all_ranks(pretrain, mock, rows, tmp_path):
    """Each of 8 x 16 tokens of a step has 2 of the experts of each layer, wherever it and they are."""
    words = [
        *mock, "--num-experts", "4", "--disable-bias-linear", "--train-iters", "6", "--log-interval", "3",
        "--recompute-granularity", "full",
    ]  # fmt: skip
    layouts = {
        "one": (1, []), "experts": (2, ["--expert-model-parallel-size", "2"]),
        "stages": (2, ["--pipeline-model-parallel-size", "2"]), "parts": (2, ["--context-parallel-size", "2"]),
        "sequence": (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    }  # fmt: skip
    outcomes = pretrain(*((n, [*words, *more, "--save", tmp_path / name]) for name, (n, more) in layouts.items()))
    found = {}
    for name, outcome in zip(layouts, outcomes, strict=True):
        assert set(outcome.codes) == {0}, outcome.err
        report = json.loads((tmp_path / name / "report.json").read_text())
        assert [sum(counts) for counts in report["expert_tokens"]] == [3 * 8 * 16 * 2] * 2
        assert "none is dropped" in outcome.out[0] and (tmp_path / name / "experts.png").is_file()
        assert not read_rows(tmp_path / name / "metrics.jsonl")[1]
        loads = [
            (row["iteration"], row["expert_load/layer_1"], row["idle_experts"])
            for row in rows(tmp_path / name, "idle_experts")
        ]
        assert [iteration for iteration, *_ in loads] == [3, 6]
        found[name] = loads, report["expert_tokens"]
    assert all(one == found["one"] for one in found.values())
