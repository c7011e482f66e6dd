"""The contest of deterministic steps: both steps are measured in turns, and the table has what was measured."""

import json

import pytest

from bench.contest import __main__ as command
from bench.contest import deterministic


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.mpi(min_size=2)
def test_a_small_measurement(mpi_world, tmp_path, capsys, monkeypatch):
    from commengine import Communicator

    home = mpi_world.bcast(tmp_path)
    monkeypatch.setattr(deterministic, "SIZES", (8 << 10,))
    sizes = ["--hidden-sizes=32", "--num-layers=1", "--seq-length=16", "--global-batch-size=2", "--rounds=1"]
    with Communicator(mpi_world) as world:
        command.run("deterministic", [*sizes, f"--json={home / 'r.json'}"], world)
        world.barrier()
    result = json.loads((home / "r.json").read_text())
    steps = [case for case in result["cases"] if "hidden" in case["labels"]]
    reductions = [case for case in result["cases"] if "dtype" in case["labels"]]
    size = mpi_world.size
    assert [tuple(case["labels"].values()) for case in steps] == [
        (32, "fp32", 1), (32, "fp32", size), (32, "bf16", 1), (32, "bf16", size),
    ]  # fmt: skip
    for row in (row for case in result["cases"] for row in case["rows"]):
        assert len(row["seconds"]) in (1, 3) and min(row["seconds"]) > 0
    assert all("digests: s" in case["rows"][1] for case in steps)
    assert {(case["labels"]["dtype"], case["labels"]["tensor"]) for case in reductions} == {
        (dtype, place) for dtype in ("float32", "bfloat16") for place in ("window", "private", "MPI")
    }
    table = capsys.readouterr().out
    if mpi_world.rank == 0:
        assert "| 32 | fp32 | 1 | plain | " in table and "| bfloat16 | 8 | MPI | tree | " in table
