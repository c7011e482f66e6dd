"""Lines between measured points: fewest corners, times that never fall, and a fit that follows a bent curve."""

import itertools

import numpy as np
import pytest

from bench.collective_study import broken_line, piecewise
from bench.collective_study.fitted_series import FittedSeries, as_json, in_words, tables
from bench.collective_study.measurement import SeriesKey
from bench.collective_study.results import Series
from commengine.cost import FittedModel

#: us of an all_gather of 2 ranks that was measured at 4 bytes to 64 MB: its cache is full at 1 MB, and at 16 MB
MEASURED = [
    4.37, 4.59, 4.59, 4.57, 4.58, 4.72, 4.69, 4.76, 4.82, 5.0, 5.32, 5.51, 6.9, 7.33, 7.88, 9.23, 11.4, 16.2, 25.2,
    71.8, 202, 398, 925, 5593, 9759,
]  # fmt: skip
SIZES = np.array([4.0 * 2**k for k in range(25)])


def series(microseconds, errors=None, transport="engine"):
    way = SeriesKey("all_gather", 2, transport, in_place=True)
    times = 1e-6 * np.array(microseconds)
    return Series(way, SIZES[: len(times)], times, np.full(len(times), 0.01) if errors is None else errors)


def fitted(*args):
    one = series(*args)
    return FittedSeries(one, piecewise.fit(one.sizes, one.seconds, one.errors))


def test_the_model_follows_times_that_no_alpha_and_beta_give():
    """In the file, after it is read: within the tolerance at each size, rising between them, and beyond."""
    one = fitted(MEASURED)
    assert one.fit.missed > 0.5
    data = as_json([one], {}, "results.json", {})
    model = FittedModel.from_json(data)
    for size, spent in zip(SIZES, one.series.seconds, strict=True):
        assert model.seconds("all_gather", size, 2) == pytest.approx(spent, rel=1.5 * broken_line.TOLERANCE)
    curve = [model.seconds("all_gather", size, 2) for size in np.geomspace(1, 1e10, 2000)]
    assert np.all(np.diff(curve) >= -1e-12) and curve[0] > 0
    last = model.seconds("all_gather", SIZES[-1], 2)
    assert 1 <= model.seconds("all_gather", 2 * SIZES[-1], 2) / last <= 2
    assert all(model.seconds("all_gather", size, 512) > 0 for size in SIZES)
    for part in one.fit.segments:
        assert part.alpha_interval[0] <= part.alpha <= part.alpha_interval[1]
        assert part.beta_interval[0] <= part.beta <= part.beta_interval[1]
    (said,) = in_words(one)
    assert f"alpha + n beta misses measured times by up to {one.fit.missed:.0%}" in said and said in list(tables([one]))


def test_the_model_has_the_series_of_the_engine_and_not_of_windows():
    engine = fitted(MEASURED)
    other = series([value / 2 for value in MEASURED], transport="shared")
    window = FittedSeries(other, piecewise.fit(other.sizes, other.seconds, other.errors))
    both, alone = (
        FittedModel.from_json(as_json(found, {}, "results.json", {})) for found in ([engine, window], [engine])
    )
    assert both == alone


def test_a_disturbed_time_is_told_and_a_badly_measured_one_changes_nothing():
    straight = [4 + 1e-4 * size for size in SIZES]
    disturbed = [*straight[:12], 3 * straight[12], *straight[13:]]
    (said,) = in_words(fitted(disturbed))
    assert f"at {SIZES[12]:,.0f} bytes the residual is +" in said or "at 32,768 bytes the residual is -" in said
    errors = np.full(25, 0.01)
    errors[12] = 0.4
    one = fitted(disturbed, errors)
    assert one.fit.missed == 0 and len(one.fit.segments) == 1
    assert list(in_words(fitted(straight))) == []
    (said,) = in_words(one)
    assert "at 16,384 bytes the residual is +" in said and "+-78%" in said


def test_the_corners_are_the_fewest():
    """Against all choices of corners."""
    random = np.random.default_rng(0)
    variances = np.full(8, 1e-4)
    for _ in range(20):
        times = np.cumsum(random.lognormal(sigma=1.5, size=8))
        found = broken_line.corners(SIZES[:8], times, variances)

        def close(chosen, times=times):
            line = np.interp(SIZES[:8], SIZES[list(chosen)], times[list(chosen)])
            return np.all(np.abs(line / times - 1) <= broken_line.TOLERANCE)

        assert close(found)
        inner = (c for n in range(7) for c in itertools.combinations(range(1, 7), n))
        assert len(found) == min(len(c) + 2 for c in inner if close((0, *c, 7)))


def test_times_that_fall_are_pooled():
    """The pool of 4 and 1 is their weighted geometric mean; it then pools with no other."""
    found = broken_line.rising(np.array([1.0, 4.0, 1.0, 8.0]), np.array([1.0, 1.0, 1.0, 1.0]))
    assert found == pytest.approx([1, 2, 2, 8])
    found = broken_line.rising(np.array([4.0, 1.0]), np.array([3.0, 1.0]))
    assert found == pytest.approx([2**1.5] * 2)
