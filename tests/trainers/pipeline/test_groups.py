"""The table of docs/pipeline.md, "Which group adds up what", against sums over everything, for every grid of 16 ranks.

Ranks are numbers here, and an all-reduce is a sum over the ranks of a group. Every value is an integer, so no order
matters.
"""

import itertools
from pathlib import Path

import pytest

from commengine.grid import GridLayout

ROOT = Path(__file__).resolve().parents[3]


def grids():
    for ranks in range(1, 17):
        for tensor, pipeline in itertools.product(range(1, ranks + 1), repeat=2):
            if ranks % (tensor * pipeline) == 0:
                yield GridLayout(ranks, tensor, pipeline=pipeline)


GRIDS = list(grids())


def summed(grid, values, *axes):
    """The value of each rank after one all-reduce over each of the axes, one after the other."""
    for axis in axes:
        values = [sum(values[other] for other in grid.group(rank, axis)) for rank in range(grid.world_size)]
    return values


def value(*parts):
    """An integer for each thing."""
    return sum((part + 1) * 17**place for place, part in enumerate(parts)) % 1009 + 1


@pytest.mark.parametrize("grid", GRIDS, ids=repr)
def test_gradients_norm_and_losses(grid):
    places = [grid.place(rank) for rank in range(grid.world_size)]
    last = grid.pipeline - 1

    # A stage has a split and a whole parameter; the tied one is split, and lies on both ends.
    split = [value(at["pipeline"], at["tensor"], at["data"]) for at in places]
    whole = [value(99, at["pipeline"], at["data"]) for at in places]
    uses = [[value(use, at["tensor"], at["data"], 7) for at in places] for use in (0, 1)]
    tied = [
        sum(uses[use][rank] for use, end in ((0, 0), (1, last)) if at["pipeline"] == end)
        for rank, at in enumerate(places)
    ]
    ends = [[other for other in grid.group(rank, "pipeline") if places[other]["pipeline"] in (0, last)]
            for rank in range(grid.world_size)]  # fmt: skip
    both = [sum(tied[other] for other in ends[rank]) if rank in ends[rank] else 0 for rank in range(grid.world_size)]

    split, whole, both = (summed(grid, one, "data") for one in (split, whole, both))
    every = range(grid.data)
    for rank, at in enumerate(places):
        assert split[rank] == sum(value(at["pipeline"], at["tensor"], replica) for replica in every)
        assert whole[rank] == sum(value(99, at["pipeline"], replica) for replica in every)
        if at["pipeline"] in (0, last):
            assert both[rank] == sum(value(use, at["tensor"], replica, 7) for use in (0, 1) for replica in every)

    # The squares: of split parameters over the tensor group, of all over the pipeline; a tied one on the first stage.
    first = [at["pipeline"] == 0 for at in places]
    of_split = [one**2 + (two**2 if counted else 0) for one, two, counted in zip(split, both, first, strict=True)]
    over_tensor = summed(grid, of_split, "tensor")
    squares = summed(grid, [one + two**2 for one, two in zip(over_tensor, whole, strict=True)], "pipeline")
    stages, pieces = range(grid.pipeline), range(grid.tensor)
    expected = sum(sum(value(stage, piece, replica) for replica in every) ** 2 for stage in stages for piece in pieces)
    expected += sum(sum(value(99, stage, replica) for replica in every) ** 2 for stage in stages)
    expected += sum(sum(value(use, piece, replica, 7) for use in (0, 1) for replica in every) ** 2 for piece in pieces)
    assert set(squares) == {expected}

    # Losses: on the last stage alone, and equal on a tensor group. Counts: every stage has them.
    losses = [value(5, at["data"]) if at["pipeline"] == last else 0 for at in places]
    assert set(summed(grid, losses, "data", "pipeline")) == {sum(value(5, replica) for replica in every)}
    counts = [value(6, at["data"]) for at in places]
    assert set(summed(grid, counts, "data")) == {sum(value(6, replica) for replica in every)}


def test_the_table_stands_in_the_documents():
    table = (ROOT / "docs/pipeline.md").read_text().partition("## Which group adds up what")[2]
    for row in ("gradients", "tied", "gradient norm", "losses", "counts", "overflow", "signals"):
        assert f"| {row}" in table
