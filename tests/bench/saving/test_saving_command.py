"""bench.saving: every way is measured on the same state, which a load gives back, and nothing is left in the folder."""

import json

import pytest

from bench.saving import __main__ as saving

pytestmark = pytest.mark.mpi
SIZES = ["--num-layers=1", "--hidden-size=16", "--num-attention-heads=2", "--seq-length=8", "--vocab-size=64"]


def test_each_way_has_its_seconds_and_the_folder_is_left_empty(mpi_world, tmp_path, capsys):
    from commengine import Communicator

    home = mpi_world.bcast(tmp_path)
    with Communicator(mpi_world) as world:
        saving.main(world, [f"--save={home}", "--rounds=1", *SIZES, f"--json={home / 'r.json'}"])
        world.barrier()
        assert [path.name for path in home.iterdir()] == ["r.json"]
        table = capsys.readouterr().out
        result = json.loads((home / "r.json").read_text())
    assert [row["name"] for row in result["rows"]] == list(saving.WAYS)
    measured = [row["seconds"] for row in result["rows"] if row["name"] != saving.BACKGROUND]  # that is a difference
    assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in measured)
    assert result["ranks"] == mpi_world.size and result["background"]["steps meanwhile"] >= 1
    state = 3 * 4 * result["parameters"]  # fp32, with two moments
    assert state < result["bytes"] < 1.5 * state + 20_000  # and the headers of the files
    if mpi_world.rank == 0:
        assert all(f"| {row['name']} | {saving.Spread(**row['spread']).text()} |" in table for row in result["rows"])
    else:
        assert table == ""


def test_what_a_load_gives_back_is_what_was_saved(mpi_world, tmp_path):
    from argparse import Namespace

    import torch

    from commengine import Communicator

    home = mpi_world.bcast(tmp_path)
    given = Namespace(num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=8, vocab_size=64)
    with Communicator(mpi_world) as world, saving.prepared(world, given, home) as saves:
        saves.trainer.step()
        saves.at_once()
        before = {name: tensor.clone() for name, tensor in saves.trainer.model.state_dict().items()}
        with torch.no_grad():
            for parameter in saves.trainer.model.parameters():
                parameter.zero_()
        assert saves.load(verify=True) > 0
        after = saves.trainer.model.state_dict()
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
