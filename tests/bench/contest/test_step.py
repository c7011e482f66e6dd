"""The contest of training steps: the contestants train alike."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from bench.contest import __main__ as command
from bench.programs.step_task import StepTask


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "names"),
    [
        pytest.param("gpt", ["ours-tp2", "dtensor-loss-parallel", "torch-1-thread"], marks=pytest.mark.long),
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
    command.main(["step", *options])  # its status also says whether another program used the cores
    (case,) = json.loads((tmp_path / "r.json").read_text())["cases"]
    assert not [error for error in case["errors"] if "losses" in error]
    assert [row["name"] for row in case["rows"]] == names == list(case["contestants"])
    losses = np.array([one["loss"] for one in case["contestants"].values()])
    assert losses.shape == (len(names), 4 + 2) and np.ptp(losses[:, :4], axis=0).max() <= 1e-4
    assert (losses[:, 0] - losses[:, 3] > 0.1).all()
    if "dtensor-loss-parallel" in names:
        assert "embedding tied" in case["contestants"]["dtensor-loss-parallel"]["note"]
    assert (tmp_path / "r.md").read_text().count("| 2 x 1 |") == len(names) - 1
