"""bench.contest.parts.grid: every size has every combination of options, and every run is named once."""

import pytest

from bench.contest.parts import grid
from bench.contest.parts.tiny_run import MODELS, PRECISIONS, RunLayout

SWITCHES = ("use_distributed_optimizer", "sequence_parallel", "overlap_grad_reduce")


def combination(layout):
    return (layout.options["micro_batch_size"], *(name in layout.options for name in SWITCHES))


def test_every_size_has_every_combination():
    every = [layout for case in range(9) for run in range(grid.RUNS) for layout in grid.layouts(case, run)]
    expected = {
        (micro, a, b, c) for micro in (1, 2, 4) for a in (False, True) for b in (False, True) for c in (False, True)
    }
    for tensor in (1, 2, 4):
        for data in (1, 2, 4):
            mine = [one for one in every if (one.tensor, one.data) == (tensor, data)]
            assert {combination(one) for one in mine} == expected
            assert {one.options.get("recompute_granularity") for one in mine} == {None, "selective", "full"}
            assert {one.options.get("ddp_bucket_size") for one in mine} == {None, grid.BUCKET}


@pytest.mark.parametrize("place", range(9))
def test_the_first_runs_have_every_option_on_and_off(place):
    mine = [list(grid.layouts(case, 0))[place] for case in range(9)]
    assert [{combination(one)[number] for one in mine} for number in range(4)] == [{1, 2, 4}, *3 * [{False, True}]]
    assert {one.options.get("recompute_granularity") for one in mine} == {None, "selective", "full"}


@pytest.mark.parametrize("case", range(9))
def test_every_model_and_precision_has_every_combination(case):
    found = [layout for run in range(grid.RUNS) for layout in grid.layouts(case, run)]
    assert len({combination(one) for one in found}) == 24
    assert {(one.tensor, one.data) for one in found} == {(a, b) for a in (1, 2, 4) for b in (1, 2, 4)}


def test_cells():
    every = list(grid.cells(list(MODELS), list(PRECISIONS)))
    assert len({cell.name for cell in every}) == len(every) == 9 * (1 + 27 + 2 + 1 + 2)
    assert max(cell.ranks for cell in every) == 16
    of_one = list(grid.cells(["bert"], ["bf16"]))
    assert of_one == [cell for cell in every if (cell.model, cell.precision) == ("bert", "bf16")]
    first = [cell for cell in of_one if cell.kind == "layout"][:9]
    assert {(cell.layout.tensor, cell.layout.data) for cell in first} == {(a, b) for a in (1, 2, 4) for b in (1, 2, 4)}
    assert len(list(grid.cells(["bert"], ["bf16"], 1))) == 9 + 6
    assert of_one[0].kind == "alone" and of_one[0].deterministic and of_one[0].layout == RunLayout(1, 1)
    moved = [cell for cell in of_one if cell.kind == "resumed"]
    assert all((cell.first.tensor, cell.first.data) != (cell.layout.tensor, cell.layout.data) for cell in moved)
    assert "bert, bf16, resumed: TP 1, DP 4, use-distributed-optimizer; and then TP 4, DP 1, sequence-parallel" in {
        cell.name for cell in moved
    }
    assert [cell.deterministic for cell in of_one].count(False) == 3


def test_a_wrong_row():
    assert [grid.wrong({"kind": kind, "differ": n}) for kind in ("layout", "control") for n in (0, 2)] == [
        False, True, True, False,
    ]  # fmt: skip
