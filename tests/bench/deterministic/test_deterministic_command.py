"""bench.deterministic: both steps are measured in turns, and the table has what was measured."""

import json

import pytest

from bench.deterministic import __main__ as deterministic


@pytest.mark.mpi(min_size=2)
def test_a_small_measurement(mpi_world, tmp_path, capsys, monkeypatch):
    from commengine import Communicator

    home = mpi_world.bcast(tmp_path)
    monkeypatch.setattr(deterministic, "SIZES", (8 << 10,))
    sizes = ["--hidden-sizes=32", "--num-layers=1", "--seq-length=16", "--samples=2", "--rounds=1"]
    with Communicator(mpi_world) as world:
        deterministic.main(world, [*sizes, f"--json={home / 'r.json'}"])
        world.barrier()
    result = json.loads((home / "r.json").read_text())
    rows = [(row["hidden"], row["tensor"], row["precision"]) for row in result["steps"]]
    size = mpi_world.size
    assert rows == [(32, 1, "fp32"), (32, size, "fp32"), (32, 1, "bf16"), (32, size, "bf16")]
    for row in [*result["steps"], *result["reductions"]]:
        assert all(len(values) in (1, 3) and min(values) > 0 for values in row["seconds"].values())
    assert {(row["dtype"], row["place"]) for row in result["reductions"]} == {
        (dtype, place) for dtype in ("float32", "bfloat16") for place in ("window", "private", "MPI")
    }
    table = capsys.readouterr().out
    if mpi_world.rank == 0:
        assert "| 32 | fp32 | 1 |" in table and "| bfloat16 | 8 | MPI |" in table


def test_sizes_that_do_not_fit():
    with pytest.raises(ValueError, match="--hidden-sizes 100: must be a multiple of 32"):
        deterministic.read(["--hidden-sizes", "64", "100"])
