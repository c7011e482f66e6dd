"""bench.contests.comparison: other losses and contestants that are not idle are errors; rows have the figures."""

import math
from types import SimpleNamespace

import pytest

from bench.contests.comparison import losses_differ_by, measured
from bench.contests.driver import Contestant

GOOD = [8.0, 6.0, 5.0, 4.0, 3.0]


def contestant(name, losses=GOOD, idle_cpu_s=0.0, threads=1):
    made = Contestant(name, 2, ["-m", "program"], {"OMP_NUM_THREADS": str(threads)})
    return SimpleNamespace(
        name=name, contestant=made, losses=losses, note="", peak_rss_bytes=1, idle_cpu_s=idle_cpu_s, idle_wall_s=2.0
    )


@pytest.mark.parametrize(
    ("losses", "absolute", "relative"),
    [
        (GOOD, 0.0, 0.0),
        ([8.0, 6.0, 5.0, 4.0, 9.0], 0.0, 0.0),  # only the first four are compared
        ([8.0, 6.5, 5.0, 4.4], 0.5, 0.4 / 4.4),
        ([8.0, 6.0, math.inf, 4.0], math.nan, math.nan),
        ([8.0, math.nan, 5.0, 4.0], math.nan, math.nan),
    ],
)
def test_the_largest_difference_of_losses(losses, absolute, relative):
    running = [contestant("one"), contestant("other", losses)]
    assert losses_differ_by(running) == pytest.approx(absolute, nan_ok=True)
    assert losses_differ_by(running, relative=True) == pytest.approx(relative, nan_ok=True)


def test_rows_and_errors():
    running = [contestant("one"), contestant("other", [8.0, 6.0, 5.1, 4.0], idle_cpu_s=0.1, threads=2)]
    result = measured(running, {"one": [1.0, 2.0, 3.0], "other": [3.0, 3.0, 3.0]}, "one", items=12)
    assert result["errors"] == [
        "losses of the first 4 steps differ by 1.00e-01 > 0.0001",
        "other used 5.0% of a core while others were running",
    ]
    one, other = result["contestants"]
    assert (one["threads_per_rank"], other["threads_per_rank"], other["command"]) == (1, 2, "python -m program")
    assert other["ratio_to_baseline"] == {"median": 1.5, "low": 1.0, "high": 3.0}
    assert one["items_per_second"] == 6.0 and other["idle_core_share"] == 0.05
