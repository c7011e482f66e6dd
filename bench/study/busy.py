"""Whether other programs disturbed a study, in one line."""

from __future__ import annotations

import os
from collections.abc import Sequence

from bench.collective_study.tables import Row, size_label

from .answers import by_operation, fastest, time_label

#: the load of other programs, in cores, beside which the ranks no longer have their cores to themselves. The start of
#: the study's own ranks counts for up to 0.4 in the average over a minute.
FREE = 0.5
#: a smaller size takes longer than a larger one by this factor only where something disturbs it
LONGER = 1.5


def remark(load: float, node: int, rows: Sequence[Row]) -> str:
    """What shows that the machine was busy, and what it means; empty if nothing does.

    load: the load average before the study. node: the ranks on a node. rows: of the collectives.
    """
    cores = os.cpu_count() or 1
    seen = []
    if load + node > cores + FREE:
        seen.append(f"the load average before it was {load:.1f}, beside {node} ranks on {cores} cores")
    for operation, sizes in by_operation(rows).items():
        times = [(size, fastest(ways)["seconds"]["p50"]) for size, ways in sizes.items()]
        pairs = [(one, other) for at, one in enumerate(times) for other in times[at + 1 :]]
        worst = max(pairs, key=lambda pair: pair[0][1] / pair[1][1], default=None)
        if worst is not None and worst[0][1] > LONGER * worst[1][1]:
            (small, slow), (large, fast) = worst
            seen.append(
                f"{operation} of {size_label(small)} took {time_label(slow)}, and of {size_label(large)} "
                f"{time_label(fast)}"
            )
            break
    if not seen:
        return ""
    return (
        f"**The machine was busy**: {'; '.join(seen)}. The times below contain waits for other programs; repeat the "
        "study on an idle machine before you compare them."
    )
