"""bench.step_contest: equal losses are demanded, idle programs are watched, and ratios are of one round."""

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest

from bench import step_contest
from bench.contests.driver import Contestant, rounds, started
from bench.contests.step_task import StepTask
from tests.support import mpirun

PROGRAM = "tests.jobs.contestant"


def program(name, mode, ranks):
    """A program of ``ranks`` ranks, whose losses are 0.5 higher with two ranks than with one."""
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(mpirun.ROOT)}
    return Contestant(name, ranks, ["-m", PROGRAM, mode, "0.002"], env)


def contest(*programs):
    """The result of two rounds of two steps, after which each program has made four."""
    with started(programs) as running:
        seconds = rounds(running, 2, 2)
        return step_contest.report(StepTask(), running, seconds, running[0].name), seconds


def test_equal_losses_are_no_error_and_ratios_are_numpys():
    result, seconds = contest(program("one", "good", 1), program("other", "good", 1))
    assert result["largest_loss_difference"] == 0.0
    assert not [error for error in result["errors"] if "losses" in error]
    one, other = result["contestants"]
    assert one["loss"] == other["loss"] == [7.0, 6.0, 5.0, 4.0]
    quotients = np.array(seconds["other"]) / np.array(seconds["one"])
    assert other["ratio_to_baseline"] == {
        "median": np.median(quotients), "low": quotients.min(), "high": quotients.max(),
    }  # fmt: skip
    assert one["ratio_to_baseline"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    tokens = StepTask().global_batch_size * StepTask().seq_length
    assert other["tokens_per_second"] == pytest.approx(tokens / np.median(seconds["other"]))
    surroundings = {"command": "", "date": "", "load_average_before": 0.0, "hardware": "", "versions": {}}
    table = step_contest.markdown(surroundings | result, 2, 2)
    assert table.count("**ERROR: ") == len(result["errors"])
    assert f"| other | 1 x 1 | {np.median(seconds['other']):.3f} [" in table


def test_other_losses_are_an_error():
    result, _ = contest(program("one", "good", 1), program("other", "good", 2))
    assert result["largest_loss_difference"] == 0.5
    assert "losses of the first 4 steps differ by 5.00e-01 > 0.0001" in result["errors"]


def test_a_loss_that_is_not_finite_is_an_error():
    result, _ = contest(program("one", "good", 1), program("other", "diverges", 1))
    assert math.isnan(result["largest_loss_difference"])
    assert any(error.startswith("losses of the first 4 steps differ by nan") for error in result["errors"])


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("good", "error: losses of the first 4 steps differ by 5.00e-01 > 0.0001"),
        ("dies", "error: other: rank 1: connection closed"),
    ],
)
def test_the_command_ends_with_1_where_losses_differ_or_a_program_fails(mode, message, monkeypatch, capsys, tmp_path):
    programs = [program("one", "good", 1), program("other", mode, 2)]
    monkeypatch.setattr(step_contest, "contestants", lambda _: programs)
    sizes = ["--vocab-size=8", "--hidden-size=8", "--num-layers=1", "--num-attention-heads=1", "--seq-length=4"]
    assert step_contest.main([*sizes, "--rounds=1", "--steps=1", f"--json={tmp_path / 'r.json'}"]) == 1
    captured = capsys.readouterr()
    assert message in captured.err and "one: warming up (good)" in captured.err
    assert ("| other | 2 x 1 |" in captured.out) == (tmp_path / "r.json").exists() == (mode == "good")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--only", "horovod"], "--only horovod: there is no such name; valid: ours-tp2, ours-dp2, dtensor"),
        (["--baseline", "ddp", "--only", "dtensor"], "--baseline ddp: is not measured; valid: dtensor"),
        (["--masked-positions-only"], "--masked-positions-only: needs --model bert"),
        (["--model", "t5"], "argument --model: invalid choice: 't5' (choose from"),
        (["--warmup", "3"], "--warmup 3: must be at least 4"),
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--json", "/no/where.json"], "--json /no/where.json: there is no folder /no"),
    ],
)
def test_bad_options_are_named(argv, message, capsys):
    with pytest.raises(SystemExit) as ended:
        step_contest.main(argv)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"python -m bench.step_contest: error: {message}")


def test_names_are_listed(capsys):
    assert step_contest.main(["--list"]) == 0
    names = capsys.readouterr().out.split()
    assert names[:3] == ["ours-tp2", "ours-dp2", "dtensor"] and "torch-1-thread" in names


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("gpt", ["ours-tp2", "dtensor-loss-parallel", "torch-1-thread"]),
        ("bert", ["ours-tp2", "torch-1-thread"]),
        pytest.param("bert", ["ours-tp2", "dtensor-loss-parallel", "torch-1-thread"], marks=pytest.mark.long),
    ],
)
def test_ours_dtensor_and_plain_torch_train_alike(tmp_path, model, names):
    """The command, on a small model with a rate that moves the losses far."""
    task = replace(
        StepTask(), model=model, vocab_size=64, hidden_size=32, num_layers=1, num_attention_heads=2, seq_length=16,
        lr=0.02,
    )  # fmt: skip
    left_out = ("weights", "seed", "masked_positions_only")
    sizes = {name: value for name, value in asdict(task).items() if name not in left_out}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    options += [f"--only={name}" for name in names]
    options += ["--rounds=2", "--steps=1", f"--json={tmp_path / 'r.json'}", f"--output={tmp_path / 'r.md'}"]
    step_contest.main(options)  # its status also says whether another program of this machine used the cores
    result = json.loads((tmp_path / "r.json").read_text())
    assert not [error for error in result["errors"] if "losses" in error]
    assert [row["name"] for row in result["contestants"]] == names
    losses = np.array([row["loss"] for row in result["contestants"]])
    assert losses.shape == (len(names), 4 + 2) and np.ptp(losses[:, :4], axis=0).max() <= 1e-4
    assert (losses[:, 0] - losses[:, 3] > 0.1).all()
    if "dtensor-loss-parallel" in names:
        assert "embedding tied" in result["contestants"][1]["note"]
    assert (tmp_path / "r.md").read_text().count("| 2 x 1 |") == len(names) - 1
