"""The contest of ranks that share a sequence: all sides train alike, and a link is waited for by its bytes."""

import json

import pytest

from bench.contest import __main__ as command
from bench.contest.context import block_times, waited
from bench.programs.context_step import ContextTask

TASK = ContextTask(hidden_size=32, num_layers=3, num_attention_heads=4, num_query_groups=2, seq_length=64, rate=1e3)
#: fp32 keys and values of 2 heads of 8, at 32 positions
BLOCK = 2 * 2 * 8 * 32 * 4


def test_what_nothing_hides_waits_for_all_its_bytes():
    nothing = (0.0, 0.0)
    assert waited(TASK, "ring", nothing) == pytest.approx(3 * 3 * BLOCK / 1e3)
    assert waited(TASK, "gather", nothing) == pytest.approx(3 * 3 * BLOCK / 1e3)  # half of both blocks
    # half of the queries, keys, values and results of 4, 2, 2 and 4 heads, forward and backward
    assert waited(TASK, "ulysses", nothing) == pytest.approx(3 * 2 * (4 + 2 + 2 + 4) * 8 * 32 * 4 / 2 / 1e3)
    assert waited(TASK, "one rank", nothing) == 0


def test_a_block_hides_the_messages_beside_it():
    """Of the backward a quarter comes before the other rank's keys, and the rest beside the gradients."""
    hop = BLOCK / 1e3
    assert waited(TASK, "ring", (2 * hop, 8 * hop)) == 0
    assert waited(TASK, "ring", (0.5 * hop, 2 * hop)) == pytest.approx(3 * (0.5 + 0.5) * hop)
    assert waited(TASK, "ulysses", (9.0, 9.0)) == waited(TASK, "ulysses", (0.0, 0.0))
    forward, backward = block_times(TASK)
    assert forward > 0 and backward > 0


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "names", [["one rank", "ring"], pytest.param(["one rank", "ulysses", "ring", "gather"], marks=pytest.mark.long)]
)
def test_all_sides_train_alike(tmp_path, names):
    sizes = ["--hidden-size=32", "--num-layers=1", "--seq-lengths", "32", "--rates", "0", "1e8", "--rounds=1"]
    words = [*sizes, *(f"--only={name}" for name in names)]
    command.main(["context", *words, f"--json={tmp_path / 'r.json'}", f"--output={tmp_path / 'r.md'}"])
    cases = json.loads((tmp_path / "r.json").read_text())["cases"]
    assert [case["labels"]["link"] for case in cases] == ["memory", "100 MB/s, threads"]
    for case in cases:
        assert not [error for error in case["errors"] if "losses" in error]
        assert [row["name"] for row in case["rows"]] == names
        assert all(bool(row["predicted, s"]) == ("threads" in case["labels"]["link"]) for row in case["rows"])


def test_what_cannot_be_cut_is_one_line(capsys):
    with pytest.raises(SystemExit) as raised:
        command.main(["context", "--seq-lengths", "66"])
    assert raised.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "--seq-length 66: must be a multiple of 4" in said
