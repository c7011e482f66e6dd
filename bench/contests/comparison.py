"""The measurements of contestants that trained the same network: which losses must agree, who disturbed whom.

Every command that compares training steps takes its settings of contestants and its verdicts from here.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from .driver import Running, Spread, ratio

COMPARED_STEPS = 4  # the losses of so many first steps must agree: before training, and after 1, 2 and 3 steps
TOLERANCE = 1e-4
IDLE_SHARE = 0.01  # a waiting contestant that uses more of a core than this disturbs the running one
# glibc keeps freed activations instead of returning them to the system, which saves the page faults at every step. Each
# contestant gains about 5%, so every contestant gets the setting.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


def settings_line() -> str:
    """The line of a result's heading that names the variables of every contestant's environment."""
    return f"- set for every contestant: `{' '.join(f'{key}={value}' for key, value in ALLOCATOR.items())}`"


def losses_differ_by(running: Sequence[Running], *, relative: bool = False) -> float:
    """The largest difference between any two losses at a compared step; NaN if a loss is not finite.

    relative: divide it by the larger of the two losses.
    """
    columns = list(zip(*(one.losses[:COMPARED_STEPS] for one in running), strict=True))
    if not all(math.isfinite(loss) for losses in columns for loss in losses):
        return math.nan
    largest: float = max((max(losses) - min(losses)) / (max(losses) if relative else 1) for losses in columns)
    return largest


def idle_share(one: Running) -> float:
    """The share of a core that a contestant used while others were running."""
    return one.idle_cpu_s / one.idle_wall_s if one.idle_wall_s else 0.0


def faults(running: Sequence[Running], difference: float) -> list[str]:
    """A line for each reason why the measurements do not count.

    difference: of the losses, from `losses_differ_by`.
    """
    found = []
    if not difference <= TOLERANCE:
        found.append(f"losses of the first {COMPARED_STEPS} steps differ by {difference:.2e} > {TOLERANCE:g}")
    shares = {one.name: idle_share(one) for one in running}
    found += [
        f"{name} used {share:.1%} of a core while others were running"
        for name, share in shares.items()
        if share > IDLE_SHARE
    ]
    return found


def measured(
    running: Sequence[Running],
    seconds: dict[str, list[float]],
    baseline: str,
    items: int,
    *,
    relative: bool = False,
) -> dict[str, Any]:
    """All that was measured of the contestants, as --json has it.

    items: tokens, samples or points of a step. relative: losses are compared relatively (`losses_differ_by`).
    """
    rows: list[dict[str, Any]] = []
    for one in running:
        step = Spread.of(seconds[one.name])
        rows.append({
            "name": one.name,
            "ranks": one.contestant.ranks,
            "threads_per_rank": int(one.contestant.env["OMP_NUM_THREADS"]),
            "command": shlex.join(["python", *one.contestant.argv]),
            "note": one.note,
            "seconds_per_step": seconds[one.name],
            "step": asdict(step),
            "ratio_to_baseline": asdict(ratio(seconds[one.name], seconds[baseline])),
            "items_per_second": items / step.median,
            "peak_rss_bytes": one.peak_rss_bytes,
            "idle_core_share": idle_share(one),
            "loss": one.losses,
        })  # fmt: skip
    difference = losses_differ_by(running, relative=relative)
    return {
        "baseline": baseline,
        "errors": faults(running, difference),
        "largest_loss_difference": difference,
        "contestants": rows,
    }
