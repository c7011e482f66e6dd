"""Fit a piecewise alpha-beta model to the times of a collective.

The model is alpha + n beta between the sizes at which the collective changes its algorithm.

The fit minimises squares of relative errors, (measured - model) / measured, because times span six decades, and an
error of 10% is as bad at 8 bytes as at 1 GB. A size has the weight 1 / (its confidence interval's relative standard
error ^ 2 + FLOOR ^ 2), because an interval narrower than FLOOR says how well the time was measured, not how straight
the line is. Alpha and beta are not negative. The best split into s segments is exact: dynamic programming over all
splits (Bai & Perron 2003, section 3). The number s has the least BIC (Schwarz 1978), with the unbiased variance,
because there are few sizes. Intervals come from a parametric bootstrap (Efron & Tibshirani 1993, section 6.5) that
searches the switch points anew and also draws the variance, so that few sizes give wide intervals.

Where the best split still misses a well measured size by more than MISS, lines between measured sizes take its place
(broken_line.py): a prediction needs the measured time more than it needs an algorithm's alpha and beta.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from . import broken_line

Array: TypeAlias = npt.NDArray[np.float64]

MOST_SEGMENTS = 6
LEAST_SIZES = 3  # of a segment, because two sizes always lie on a line
FLOOR = 0.01
EXACT = 1e-5  # a smaller relative error is rounding, which must not give noiseless data more segments
CONFIDENCE = 0.95
QUANTILES = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)
REPLICATES = 300
#: a larger relative error is told in words; a size with a larger standard error than half of it says nothing about it
MISS = 0.15
#: of fewer sizes it is not clear whether one was disturbed
LEAST_OF_BROKEN_LINE = 2 * LEAST_SIZES

Interval: TypeAlias = tuple[float, float]


@dataclass(frozen=True)
class FittedSegment:
    """From ``from_bytes`` on a call takes alpha + n beta seconds. Each number has its confidence interval."""

    from_bytes: float
    from_interval: Interval
    alpha: float
    alpha_interval: Interval
    beta: float
    beta_interval: Interval


@dataclass(frozen=True)
class PiecewiseFit:
    """The segments, by size, and (measured - model) / measured for each measured size.

    bic: of the best split. missed: the largest residual of the best split if lines between measured sizes took its
    place; 0 if it stands.
    """

    segments: tuple[FittedSegment, ...]
    residuals: tuple[float, ...]
    bic: float
    missed: float = 0.0

    def seconds(self, size: float) -> float:
        """The model's seconds for ``size`` bytes."""
        used = [one for one in self.segments if one.from_bytes <= size][-1]
        return used.alpha + size * used.beta


@dataclass(frozen=True)
class _Split:
    """firsts: the index of each segment's first size. alphas, betas: of each segment."""

    firsts: list[int]
    alphas: Array
    betas: Array
    chi2: float


def fit(sizes: Array, seconds: Array, errors: Array) -> PiecewiseFit:
    """Fit up to MOST_SEGMENTS segments.

    sizes: bytes, ascending; equal ones are measurements of one size. seconds: above 0. errors: the relative standard
    error of each. Raises ValueError if there are fewer than LEAST_SIZES different sizes.
    """
    count, different = len(sizes), len(np.unique(sizes))
    if different < LEAST_SIZES:
        raise ValueError(f"a fit needs at least {LEAST_SIZES} different sizes, not {different}")
    variances = errors**2 + FLOOR**2
    splits = _splits(sizes, seconds, variances, min(MOST_SEGMENTS, different // LEAST_SIZES))
    floor = float(np.mean(EXACT**2 / variances))
    scored = [(_bic(split, count, floor), split) for split in splits]
    bic, best = min(scored, key=lambda pair: pair[0])
    model = _model(best, sizes)
    residuals = (seconds - model) / seconds
    if different >= LEAST_OF_BROKEN_LINE and (missed := misses(residuals, errors)).any():
        worst = float(max(residuals[missed], key=abs))
        values = np.array(broken_line.through_points(sizes, seconds, variances)).T
        found = PiecewiseFit(_segments(values, values, values), (), bic, worst)
        left = tuple(float(1 - found.seconds(size) / spent) for size, spent in zip(sizes, seconds, strict=True))
        return replace(found, residuals=left)
    values = np.array([_starts(best, sizes), best.alphas, best.betas])
    least, largest = values.copy(), values.copy()
    firsts = np.array(best.firsts[1:], dtype=int)
    least[0, 1:], largest[0, 1:] = sizes[firsts - 1], sizes[firsts]  # data bound a switch point by the sizes around it
    low, high = _intervals(best, sizes, model, variances)
    segments = _segments(values, np.minimum(low, least), np.maximum(high, largest))
    return PiecewiseFit(segments, tuple(residuals.tolist()), bic)


def _segments(values: Array, low: Array, high: Array) -> tuple[FittedSegment, ...]:
    """The segments of [switch point, alpha, beta] x segment, with the ends of their intervals."""
    return tuple(
        FittedSegment(start, (starts[0], ends[0]), alpha, (starts[1], ends[1]), beta, (starts[2], ends[2]))
        for (start, alpha, beta), starts, ends in zip(values.T.tolist(), low.T.tolist(), high.T.tolist(), strict=True)
    )


def misses(residuals: Array, errors: Array) -> npt.NDArray[np.bool_]:
    """Whether each well measured size lies further than MISS from the model, on the logarithm's scale."""
    found: npt.NDArray[np.bool_] = (deviations(residuals) > math.log1p(MISS)) & (errors <= MISS / 2)
    return found


def deviations(residuals: Array) -> Array:
    """The absolute logarithms of model / measured: twice as long and half as long deviate by as much."""
    found: Array = np.abs(np.log1p(-np.minimum(residuals, 1 - EXACT)))
    return found


def _free(split: _Split) -> int:
    """The number of free parameters of a split: alpha and beta of each segment, and the switch points."""
    return 3 * len(split.firsts) - 1


def _bic(split: _Split, count: int, floor: float) -> float:
    # The search for a switch point fits more noise than a free number does (Zhang & Siegmund 2007). Counted as three
    # numbers, a switch point is found in 5% of straight lines of 6 to 10 noisy sizes; counted as one, in 15%.
    penalty = _free(split) + 2 * (len(split.firsts) - 1)
    return count * math.log(split.chi2 / (count - _free(split)) + floor) + penalty * math.log(count)


def _splits(sizes: Array, seconds: Array, variances: Array, most: int) -> list[_Split]:
    """The best splits into 1, 2, ... ``most`` segments."""
    count = len(sizes)
    alphas, betas, cost = _lines(sizes, seconds, variances)
    best = cost[0].copy()  # of all that ends at index j
    backs: list[npt.NDArray[np.intp]] = []
    found = []
    for segments in range(1, most + 1):
        if segments > 1:
            before = np.concatenate([[np.inf], best[:-1]])  # of all that ends before index i
            choices = before[:, None] + cost
            back = np.argmin(choices, axis=0)
            backs.append(back)
            best = choices[back, np.arange(count)]
        if not np.isfinite(best[-1]):
            break
        firsts: list[int] = []
        last = count - 1
        for back in reversed(backs):
            firsts.insert(0, int(back[last]))
            last = firsts[0] - 1
        firsts.insert(0, 0)
        lasts = [*(first - 1 for first in firsts[1:]), count - 1]
        found.append(_Split(firsts, alphas[firsts, lasts], betas[firsts, lasts], max(0.0, float(best[-1]))))
    return found


def _lines(sizes: Array, seconds: Array, variances: Array) -> tuple[Array, Array, Array]:
    """Alpha, beta and chi squared of the line through sizes i to j, at [i, j]; infinite if that is not a segment."""
    weights, one, slope = 1 / variances, 1 / seconds, sizes / seconds

    def sums(values: Array) -> Array:
        return np.cumsum(np.triu(np.broadcast_to(values, (len(values), len(values)))), axis=1)

    w, u, v = sums(weights), sums(weights * one), sums(weights * slope)
    uu, uv, vv = sums(weights * one**2), sums(weights * one * slope), sums(weights * slope**2)
    with np.errstate(divide="ignore", invalid="ignore"):
        determinant = uu * vv - uv**2
        alpha, beta = (u * vv - v * uv) / determinant, (v * uu - u * uv) / determinant
        no_alpha, no_beta = alpha < 0, beta < 0
        alpha, beta = np.where(no_alpha, 0, alpha), np.where(no_alpha, v / vv, beta)
        alpha, beta = np.where(no_beta, u / uu, alpha), np.where(no_beta, 0, beta)
        chi2 = w - 2 * alpha * u - 2 * beta * v + alpha**2 * uu + 2 * alpha * beta * uv + beta**2 * vv
    ordinal = np.unique(sizes, return_inverse=True)[1]  # one size lies in one segment
    begins = np.concatenate([[True], np.diff(sizes) > 0])
    ends = np.concatenate([np.diff(sizes) > 0, [True]])
    allowed = begins[:, None] & ends[None, :] & (ordinal[None, :] - ordinal[:, None] + 1 >= LEAST_SIZES)
    return alpha, beta, np.where(allowed & np.isfinite(chi2), chi2, np.inf)


def _model(split: _Split, sizes: Array) -> Array:
    index = np.searchsorted(split.firsts, np.arange(len(sizes)), side="right") - 1
    result: Array = split.alphas[index] + sizes * split.betas[index]
    return result


def _starts(split: _Split, sizes: Array) -> list[float]:
    """The size at which each segment begins, above the last size before it and at most its first size.

    It is the crossing of the two lines if that lies there, because MPI switches where algorithms break even; or else
    the geometric mean.
    """
    starts = [0.0]
    for s, first in enumerate(split.firsts[1:], 1):
        low, high = float(sizes[first - 1]), float(sizes[first])
        slope = split.betas[s - 1] - split.betas[s]
        crossing = (split.alphas[s] - split.alphas[s - 1]) / slope if slope else math.inf
        starts.append(float(math.ceil(crossing if low < crossing <= high else math.sqrt(max(low, 1) * high))))
    return starts


#: the largest logarithm of the noise; beyond it a time would overflow
CLIPPED = 50.0


def _intervals(split: _Split, sizes: Array, model: Array, variances: Array) -> tuple[Array, Array]:
    """The low and high ends of the intervals, each [switch point, alpha, beta] x segment."""
    random = np.random.default_rng(0)
    freedom = len(sizes) - _free(split)
    drawn = []
    for _ in range(REPLICATES):
        scale = split.chi2 / random.chisquare(freedom)  # Student's t, because the variance is an estimate
        noise = np.sqrt(variances * scale) * random.standard_normal(len(sizes))
        found = _splits(sizes, model * np.exp(np.clip(noise, -CLIPPED, CLIPPED)), variances, len(split.firsts))
        if found and len(found[-1].firsts) == len(split.firsts):
            again = found[-1]
            drawn.append([_starts(again, sizes), again.alphas, again.betas])
    if len(drawn) < REPLICATES / 2:  # the data are too noisy for an interval
        nothing = np.zeros((3, len(split.firsts)))
        return nothing, nothing + np.inf
    low, high = np.quantile(np.array(drawn), QUANTILES, axis=0)
    return low, high
