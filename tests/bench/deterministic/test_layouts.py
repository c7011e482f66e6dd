"""bench.deterministic.layouts: the grid, and a result that says which runs differ."""

import pytest

from bench.deterministic import layouts
from bench.deterministic.tiny_run import RunLayout


def test_the_grid_fits_the_ranks():
    sizes = {(one.tensor, one.data) for one in layouts.grid(16)}
    assert sizes == {(tensor, data) for tensor in (1, 2, 4) for data in (1, 2, 4)}
    assert len(list(layouts.grid(16))) == 9 * len(layouts.OPTIONS)
    assert {one.ranks for one in layouts.grid(2)} == {1, 2}
    assert str(RunLayout(2, 4, {"sequence_parallel": True, "ddp_bucket_size": 7})) == (
        "TP 2, DP 4, sequence-parallel, ddp-bucket-size 7"
    )


def row(differ, *, control):
    return {"model": "gpt", "precision": "fp32", "layout": "TP 2, DP 1", "digests": 9, "differ": differ,
            "weights": 255, "control": control}  # fmt: skip


def test_a_run_that_differs_is_named():
    about = {"command": "c", "date": "d", "hardware": "h", "gpus": [], "load_average_before": 0.0, "versions": {}}
    result = about | {"ranks": 2, "steps": 1, "seconds": 1.0, "rows": [row(0, control=False), row(5, control=True)]}
    assert layouts.failed(result) == []
    text = layouts.markdown(result)
    assert "- 1 of 1 runs have all digests of the run on one rank" in text and "WRONG" not in text
    assert "| gpt | fp32 | 9 | ff | 1 of 1 | 5 of 9 |" in text
    wrong = result | {"rows": [row(2, control=False), row(0, control=True)]}
    assert len(layouts.failed(wrong)) == 2
    assert "- WRONG: gpt, fp32, TP 2, DP 1: 2 digests differ" in layouts.markdown(wrong)


@pytest.mark.long
@pytest.mark.mpi(min_size=2)
def test_the_command(mpi_world, capsys):
    from commengine import Communicator

    with Communicator(mpi_world) as world:
        assert layouts.main(world, ["--models", "gpt", "--precisions", "fp32", "--steps", "2"]) == 0
    if mpi_world.rank == 0:
        assert "WRONG" not in capsys.readouterr().out
