"""The contest of saving: every way is measured on the same state, which a load gives back; nothing is left."""

import json

import pytest

from bench.contest import __main__ as command
from bench.contest import saving

pytestmark = pytest.mark.mpi
SIZES = ["--num-layers=1", "--hidden-size=16", "--num-attention-heads=2", "--seq-length=8", "--vocab-size=64"]


def test_each_way_has_its_seconds_and_the_folder_is_left_empty(mpi_world, tmp_path, capsys):
    from commengine import Communicator

    home = mpi_world.bcast(tmp_path)
    with Communicator(mpi_world) as world:
        command.run("saving", [f"--save={home}", "--rounds=1", *SIZES, f"--json={home / 'r.json'}"], world)
        world.barrier()
        assert [path.name for path in home.iterdir()] == ["r.json"]
        table = capsys.readouterr().out
        result = json.loads((home / "r.json").read_text())
    (case,) = result["cases"]
    names = [saving.AT_ONCE, saving.BACKGROUND, saving.TORCH_SAVE, saving.VERIFIED, saving.UNVERIFIED]
    assert [row["name"] for row in case["rows"]] == names
    measured = [row["seconds"] for row in case["rows"] if row["name"] != saving.BACKGROUND]  # that is a difference
    assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in measured)
    assert result["ranks"] == mpi_world.size and case["background"][1] >= 1
    state = 3 * 4 * case["parameters"]  # fp32, with two moments
    assert state < case["bytes"] < 1.5 * state + 20_000  # and the headers of the files
    if mpi_world.rank == 0:
        assert all(f"| {row['name']} | " in table for row in case["rows"])
    else:
        assert table == ""


def test_what_a_load_gives_back_is_what_was_saved(mpi_world, tmp_path):
    import torch

    from commengine import Communicator

    home = mpi_world.bcast(tmp_path)
    given = command.read("saving", [f"--save={home}", *SIZES], mpi_world.size)
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


def test_a_folder_that_is_not_there_is_an_error_of_all_ranks(mpi_world, tmp_path):
    from commengine import Communicator, UsageError

    home = mpi_world.bcast(tmp_path / "none")
    with Communicator(mpi_world) as world, pytest.raises(UsageError, match=f"^--save {home}: No such file"):
        command.run("saving", [f"--save={home}", *SIZES], world)
