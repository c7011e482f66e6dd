"""The verdict on training: the losses of runs that must agree, compared step by step.

Each run is a folder that ``trainers.pretrain_gpt --save`` wrote. "Difference" is the largest difference of the training
loss over the steps that both runs have, in nats per token. A run that is missing, that has a loss that is not finite,
or that differs by more than the tolerance makes the verdict bad, and the exit status 1. Runs by NCCL of two ranks that
share a GPU may be missing: they need an ``NCCL_HOSTID`` for each rank, or NCCL 2.30.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu_study.rows import RowFile
from commengine.files.reading import fault_in, read_json_lines
from commengine.options.parser import OneLineParser

#: nats per token. fp32 sums in another order; bf16 has 8 bits of mantissa; a compiler keeps more bits inside a kernel.
#: On the host these runs differed by 7e-7 (two tensor ranks against one) and 3e-3 (bf16 against fp32) in 20 steps
FP32, BF16, COMPILED = 2e-4, 2e-2, 1e-2


@dataclass(frozen=True)
class Comparison:
    """Two runs whose losses differ by at most ``tolerance``. optional: the first run may be missing."""

    run: str
    reference: str
    tolerance: float
    optional: bool = False


COMPARISONS = (
    Comparison("cuda", "cpu", FP32),
    Comparison("tp2_staged", "cuda", FP32),
    Comparison("dp2_staged", "cuda", FP32),
    Comparison("zero1_staged", "dp2_staged", FP32),
    Comparison("overlap_staged", "dp2_staged", FP32),
    Comparison("resumed", "cuda", FP32),
    Comparison("bf16", "cuda", BF16),
    Comparison("compiled", "bf16", COMPILED),
    Comparison("tp2_nccl", "tp2_staged", FP32, optional=True),
    Comparison("dp2_nccl", "dp2_staged", FP32, optional=True),
    Comparison("moe", "moe_cpu", FP32),
    Comparison("moe_tp2_staged", "moe", FP32),
    Comparison("moe_ep2_staged", "moe", FP32),
    Comparison("moe_ep2_nccl", "moe", FP32, optional=True),
    Comparison("pp2_staged", "cuda", FP32),
    Comparison("pp2_nccl", "pp2_staged", FP32, optional=True),
    Comparison("pp2_interleaved_nccl", "pp2_staged", FP32, optional=True),
    Comparison("cp2_staged", "cuda", FP32),
    Comparison("cp2_a2a_nccl", "cp2_staged", FP32, optional=True),
    Comparison("cp2_ring_nccl", "cp2_staged", FP32, optional=True),
    Comparison("cp2_gather_nccl", "cp2_staged", FP32, optional=True),
    Comparison("cp2_ring_bf16", "bf16", BF16, optional=True),
)


def add_options(parser: OneLineParser) -> None:
    """The options of this study."""
    parser.add_argument("--runs", type=Path, required=True, metavar="DIR", help="folder of the runs' folders")
    names = sorted({name for one in COMPARISONS for name in (one.run, one.reference)})
    parser.add_argument("--without", nargs="*", choices=names, default=[], help="runs that were left out on purpose")


def check(given: Any) -> None:
    """Raises ValueError that names the option at fault."""
    if not given.runs.is_dir():
        raise ValueError(f"--runs {given.runs}: there is no such folder")


def losses(folder: Path) -> dict[int, float]:
    """The training loss of each iteration, from metrics.jsonl; NaN where none was finite. {} without the file."""
    found = {}
    path = folder / "metrics.jsonl"
    for row in read_json_lines(path) if path.exists() else ():
        with fault_in(f"--runs: {path}: a row is not one of a run: {str(row)[:200]}"):
            if "lm_loss" in row:
                found[int(row["iteration"])] = math.nan if row["lm_loss"] is None else float(row["lm_loss"])
    return found


def compare(one: Comparison, folder: Path, without: Sequence[str] = ()) -> dict[str, Any]:
    """A comparison's numbers: steps, the last loss, the largest difference, and "verdict".

    The verdict is agrees, DIFFERS, NOT FINITE or MISSING, or "not run" for a run that was left out on purpose.
    """
    mine, theirs = losses(folder / one.run), losses(folder / one.reference)
    both = sorted(mine.keys() & theirs.keys())
    numbers: dict[str, Any] = {"run": one.run, "reference": one.reference, "steps": len(both)}
    if not both:
        meant = one.run in without or one.reference in without or (one.optional and not mine)
        return numbers | {"verdict": "not run" if meant else "MISSING"}
    difference = max(abs(mine[step] - theirs[step]) for step in both)
    finite = all(math.isfinite(loss[step]) for loss in (mine, theirs) for step in both)
    verdict = "NOT FINITE" if not finite else "agrees" if difference <= one.tolerance else "DIFFERS"
    return numbers | {"last": mine[both[-1]], "difference": difference, "verdict": verdict}


def run(given: Any) -> int:
    """Compare the runs and print the verdict. Returns 1 if it is bad."""
    rows = RowFile(
        given, "Losses of runs that must agree",
        ["| run | against | steps | last loss | difference | tolerance | |", "|---|---|--:|--:|--:|--:|---|"],
    )  # fmt: skip
    bad = []
    for one in COMPARISONS:
        numbers = compare(one, given.runs, given.without)
        cells = [f"{numbers['last']:.4f}", f"{numbers['difference']:.2g}"] if "last" in numbers else ["", ""]
        line = [one.run, one.reference, numbers["steps"], *cells, f"{one.tolerance:g}", numbers["verdict"]]
        rows.add(line, numbers | {"tolerance": one.tolerance})
        if numbers["verdict"] not in ("agrees", "not run"):
            bad.append(f"{one.run} {numbers['verdict']}")
    print(f"\nverdict: {'BAD: ' + ', '.join(bad) if bad else 'good'}", flush=True)
    return 1 if bad else 0
