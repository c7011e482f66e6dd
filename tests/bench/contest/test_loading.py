"""The contest of loading: both ways are measured, the memory is that of a rank, and nothing is left behind."""

import json
import mmap

import pytest

from bench.contest import __main__ as command
from bench.contest import loading

SIZES = ["--num-layers=2", "--hidden-size=32", "--num-attention-heads=4", "--vocab-size=100"]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_each_way_has_its_seconds_and_the_folder_is_left_empty(mpi_world, tmp_path, capsys, family):
    from commengine import Communicator

    home = mpi_world.bcast(tmp_path)
    words = [f"--save={home}", "--rounds=2", *SIZES, f"--family={family}", f"--json={home / 'r.json'}"]
    with Communicator(mpi_world) as world:
        command.run("loading", words, world)
        world.barrier()
        assert [path.name for path in home.iterdir()] == ["r.json"]
        table = capsys.readouterr().out
        result = json.loads((home / "r.json").read_text())
    (case,) = result["cases"]
    assert [row["name"] for row in case["rows"]] == [loading.OURS, loading.THEIRS]
    assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in case["rows"])
    assert result["ranks"] == mpi_world.size == len(case["memory"]) and case["baseline"] == loading.THEIRS
    assert all(peak >= 0 and share > 0 for peak, share in case["memory"])
    assert (loading.OURS in table) == (mpi_world.rank == 0)


def test_the_memory_is_seen_while_it_is_there():
    """Also memory that is gone at the end of the block."""
    with loading.peak() as highest:
        # Pages that the process does not have yet: malloc may give memory that is there from earlier tests.
        some = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        some.write(b"1" * (64 << 20))
        deadline = loading.time.monotonic() + 20
        while highest() < 60 << 20 and loading.time.monotonic() < deadline:
            loading.time.sleep(loading.LOOK)
        some.close()
    assert highest() > 60 << 20
