"""The cells of the grid of same_bits: the models, the precisions, the ranks, and the options of each run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .tiny_run import DENSE, PRECISIONS, RunLayout

ALONE = RunLayout(1, 1)
#: tensor-parallel and data-parallel sizes
SIZES = (1, 2, 4)
#: the most runs at each size, with other options each: with them each size has all options in every combination
RUNS = 3
#: elements of a bucket, where a run has several
BUCKET = 4000

#: where a run stops, and where it goes on: at another tensor-parallel or data-parallel size, or both
MOVES = (
    (RunLayout(1, 4, {"use_distributed_optimizer": True}), RunLayout(4, 1, {"sequence_parallel": True})),
    (RunLayout(2, 2, {"overlap_grad_reduce": True}), RunLayout(1, 2, {"use_distributed_optimizer": True})),
)
#: of ordinary runs, which must differ from the one on one rank
CONTROLS = (RunLayout(2, 1), RunLayout(1, 2))

RECOMPUTED: tuple[dict[str, Any], ...] = (
    {}, {"recompute_granularity": "selective"}, {"recompute_granularity": "full"},
)  # fmt: skip


@dataclass(frozen=True)
class GridRun:
    """One run of the grid, which is compared with that of its model and precision on one rank.

    kind: "alone", that run; "control alone", that run without ``--deterministic``; "layout"; "resumed": it begins at
    the layout ``first``; "control": without ``--deterministic``, so that it must differ.
    """

    kind: str
    model: str
    precision: str
    layout: RunLayout
    first: RunLayout | None = None

    @property
    def ranks(self) -> int:
        """The ranks that it needs."""
        return max(self.layout.ranks, 0 if self.first is None else self.first.ranks)

    @property
    def deterministic(self) -> bool:
        """Whether it trains with ``--deterministic``."""
        return not self.kind.startswith("control")

    @property
    def column(self) -> str:
        """The column of the table to which it belongs."""
        return f"TP {self.layout.tensor}, DP {self.layout.data}" if self.kind == "layout" else self.kind

    @property
    def name(self) -> str:
        """All of it, in words."""
        begun = "" if self.first is None else f"{self.first}; and then "
        return f"{self.model}, {self.precision}, {self.kind}: {begun}{self.layout}"


def combination(number: int) -> dict[str, Any]:
    """Set ``number``, 0 to 23, of the options: micro-batch 1, 2 and 4 times ZeRO-1, sequence parallelism and overlap.

    Four neighbours have ZeRO-1 and sequence parallelism in every way.
    """
    group, place = divmod(number, 4)
    micro, overlap = divmod((group + place) % 6, 2)
    options: dict[str, Any] = {"micro_batch_size": 1 << micro}
    if place % 2:
        options["use_distributed_optimizer"] = True
    if place // 2:
        options["sequence_parallel"] = True
    if overlap:
        options |= {"overlap_grad_reduce": True, "async_tensor_model_parallel_allreduce": True}
    return options


def layouts(case: int, run: int) -> Iterator[RunLayout]:
    """Run number ``run``, below `RUNS`, at all sizes, of the model and precision number ``case``.

    In all runs of all cases each size has all 24 combinations, and in all runs of one case the sizes together have. In
    the first runs of all cases each size has each option on and off, and each size of micro-batches. Recomputation and
    the size of buckets change with them.
    """
    for place, (tensor, data) in enumerate(itertools.product(SIZES, SIZES)):
        number = RUNS * (case + place) + (run + case + place) % RUNS
        more = RECOMPUTED[(number + place) % 3]
        if (case + place + run) % 2:
            more = more | {"ddp_bucket_size": BUCKET}
        yield RunLayout(tensor, data, combination(number % 24) | more)


def cells(models: Sequence[str], precisions: Sequence[str], runs: int = RUNS) -> Iterator[GridRun]:
    """The runs of these models and precisions; those on one rank with which others are compared come first.

    runs: at each size. The first ones have all models, precisions and sizes.
    """
    cases = [
        (number, model, precision)
        for number, (model, precision) in enumerate(itertools.product(DENSE, PRECISIONS))
        if model in models and precision in precisions
    ]
    for run in range(runs):
        for case, model, precision in cases:
            if run == 0:
                yield GridRun("alone", model, precision, ALONE)
                yield GridRun("control alone", model, precision, ALONE)
                yield from (GridRun("control", model, precision, layout) for layout in CONTROLS)
                yield from (GridRun("resumed", model, precision, second, first) for first, second in MOVES)
            yield from (GridRun("layout", model, precision, layout) for layout in layouts(case, run))


#: the columns of the table, in order
COLUMNS = (*(f"TP {tensor}, DP {data}" for tensor, data in itertools.product(SIZES, SIZES)), "resumed", "control")


def wrong(row: Mapping[str, Any]) -> bool:
    """Whether a row of the result is not as it must be: a run that differs, or a control that does not."""
    control: bool = row["kind"] == "control"
    return bool(row["differ"]) != control
