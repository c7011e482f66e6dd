"""bench.loading: both ways are measured on one model, the memory is that of a rank, and nothing is left behind."""

import json

import pytest
import torch

from bench.loading import __main__ as loading

SIZES = ["--num-layers=2", "--hidden-size=32", "--num-attention-heads=4", "--vocab-size=100"]


@pytest.mark.mpi
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_each_way_has_its_seconds_and_the_folder_is_left_empty(mpi_world, tmp_path, capsys, family):
    from commengine import Communicator

    home = mpi_world.bcast(tmp_path)
    words = [f"--save={home}", "--rounds=2", *SIZES, f"--family={family}", f"--json={home / 'r.json'}"]
    with Communicator(mpi_world) as world:
        loading.main(world, words)
        world.barrier()
        assert [path.name for path in home.iterdir()] == ["r.json"]
        table = capsys.readouterr().out
        result = json.loads((home / "r.json").read_text())
    assert [row["name"] for row in result["rows"]] == [loading.OURS, loading.THEIRS]
    assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in result["rows"])
    assert result["ranks"] == mpi_world.size == len(result["memory"])
    assert all(one["peak"] >= 0 and one["share"] > 0 for one in result["memory"])
    assert (loading.OURS in table) == (mpi_world.rank == 0)


def test_the_memory_is_seen_while_it_is_there():
    """Also memory that is gone at the end of the block."""
    with loading.peak() as highest:
        some = torch.ones(16 << 20)
        assert some.sum() > 0
        deadline = loading.time.monotonic() + 20
        while highest() < 60 << 20 and loading.time.monotonic() < deadline:
            loading.time.sleep(loading.LOOK)
        del some
    assert highest() > 60 << 20


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--load FOLDER or --save DIR"), (["--load={home}", "--save={home}"], "one of the two"),
        (["--save={home}/none"], "there is no such folder"), (["--load={home}"], "has no safetensors files"),
        (["--save={home}", "--rounds=0"], "--rounds 0"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused(tmp_path, words, said):
    with pytest.raises(Exception, match=said):
        loading.read([word.format(home=tmp_path) for word in words])
