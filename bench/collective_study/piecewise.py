"""Fit a piecewise alpha-beta model to the times of a collective.

The model is alpha + n beta between the sizes at which the collective changes its algorithm.

The fit minimises squares of relative errors, because times span six decades, and an error of 10% is as bad at 8 bytes
as at 1 GB. They are relative to the model (least squares, reweighted), because a time that happens to be short would
weigh more than its share, and lines would lie too low. A size far off the model counts as one at FAR standard errors.
Alpha and beta are not negative. The best split into s segments is exact: dynamic programming over all splits (Bai &
Perron 2003, section 3).

The number s has the least BIC (Schwarz 1978), with the unbiased variance. A size has the variance of its interval and
FLOOR ^ 2, because an interval narrower than FLOOR says how well the time was measured, not how straight the line is. No
split gains by a scatter that is smaller than these variances: noise of the stated size is no break. Of few sizes BIC
finds a break of a factor of two only at low noise. So a longer split also counts if the stated noise explains it, and
if chi squared is larger without it than at any place of a straight line in all but ALARMS of them.

Alpha and beta then follow with the variances of the intervals, and with as much scatter beside them as the residuals
show, if they show more than noise would. Their intervals come from a parametric bootstrap (Efron & Tibshirani 1993,
section 6.5) that searches the switch points anew and also draws that scatter, so that few sizes give wide intervals.

Where the best split misses a well measured size by more than MISS, and by more standard errors than any size of a
straight line would in all but ALARMS of such fits, lines between measured sizes take its place (broken_line.py): a
prediction needs the measured time more than it needs an algorithm's alpha and beta. `tests/bench/study/drawn.py` counts
false alarms, breaks that are found, and intervals that hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist
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
#: an alpha or beta with a smaller share of all times says nothing, but for what EXACT adds
NOTHING = 10 * EXACT
#: a larger relative error is told in words; a size with a larger standard error than half of it says nothing about it
MISS = 0.15
#: the share of straight lines that may be taken for something else, because one of their sizes is far off by chance
ALARMS = 0.005
#: standard errors beyond which a size counts no more than one at this distance
FAR = 3.0
#: how often the weights follow the model
REWEIGHTED = 2
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
    first = _splits(sizes, seconds, variances, min(MOST_SEGMENTS, different // LEAST_SIZES))
    best = _chosen([_reweighted(one, sizes, seconds, variances) for one in first], count, different)
    bic, model = _bic(best, count), _model(best, sizes)
    residuals = (seconds - model) / seconds
    if different >= LEAST_OF_BROKEN_LINE and (missed := misses(residuals, errors)).any():
        worst = float(max(residuals[missed], key=abs))
        values = np.array(broken_line.through_points(sizes, seconds, variances)).T
        found = PiecewiseFit(_segments(values, values, values), (), bic, worst)
        left = tuple(float(1 - found.seconds(size) / spent) for size, spent in zip(sizes, seconds, strict=True))
        return replace(found, residuals=left)
    scatter = _scatter(seconds / model - 1, errors, count - _free(best))
    best = _reweighted(best, sizes, seconds, errors**2 + EXACT**2 + scatter)
    model = _model(best, sizes)
    residuals = (seconds - model) / seconds
    values = np.array([_starts(best, sizes), best.alphas, best.betas])
    least, largest = values.copy(), values.copy()
    firsts = np.array(best.firsts[1:], dtype=int)
    least[0, 1:], largest[0, 1:] = sizes[firsts - 1], sizes[firsts]  # data bound a switch point by the sizes around it
    low, high = _intervals(best, sizes, model, errors**2 + EXACT**2, scatter)
    segments = _segments(*_without_rounding(sizes, values, np.minimum(low, least), np.maximum(high, largest)))
    return PiecewiseFit(segments, tuple(residuals.tolist()), bic)


def _segments(values: Array, low: Array, high: Array) -> tuple[FittedSegment, ...]:
    """The segments of [switch point, alpha, beta] x segment, with the ends of their intervals."""
    return tuple(
        FittedSegment(start, (starts[0], ends[0]), alpha, (starts[1], ends[1]), beta, (starts[2], ends[2]))
        for (start, alpha, beta), starts, ends in zip(values.T.tolist(), low.T.tolist(), high.T.tolist(), strict=True)
    )


def misses(residuals: Array, errors: Array) -> npt.NDArray[np.bool_]:
    """Whether each well measured size lies further than MISS from the model, and further than chance takes any size.

    On the logarithm's scale, on which MISS is log(1 + MISS): 13% below the model, or 15% above.
    """
    most = NormalDist().inv_cdf(1 - ALARMS / 2 / max(1, len(residuals)))
    away = deviations(residuals)
    found: npt.NDArray[np.bool_] = (away > math.log1p(MISS)) & (away > most * errors) & (errors <= MISS / 2)
    return found


def deviations(residuals: Array) -> Array:
    """The absolute logarithms of model / measured: twice as long and half as long deviate by as much."""
    found: Array = np.abs(np.log1p(-np.minimum(residuals, 1 - EXACT)))
    return found


def _free(split: _Split) -> int:
    """The number of free parameters of a split: alpha and beta of each segment, and the switch points."""
    return 3 * len(split.firsts) - 1


def _bic(split: _Split, count: int) -> float:
    # The search for a switch point fits more noise than a free number does (Zhang & Siegmund 2007), so it counts as
    # three numbers.
    penalty = _free(split) + 2 * (len(split.firsts) - 1)
    return count * math.log(max(1.0, split.chi2 / (count - _free(split)))) + penalty * math.log(count)


def _chosen(splits: list[_Split], count: int, different: int) -> _Split:
    """The split that explains the times: by BIC, or a longer one that the stated noise makes necessary."""
    best = min(splits, key=lambda split: _bic(split, count))
    places = max(1, different - 2 * LEAST_SIZES + 1)
    needed = 2 * math.log(places / ALARMS)  # of chi squared, by which a line of two more numbers is better by chance
    for split in splits[splits.index(best) + 1 :]:
        freedom = count - _free(split)
        noise_explains = split.chi2 <= freedom + 2 * math.sqrt(2 * freedom)
        if noise_explains and best.chi2 - split.chi2 > needed * (len(split.firsts) - len(best.firsts)):
            best = split
    return best


def _reweighted(split: _Split, sizes: Array, seconds: Array, variances: Array) -> _Split:
    """The best split of as many segments, with errors relative to its own model, and chi squared of these."""
    for _ in range(REWEIGHTED):
        found = _splits(sizes, seconds, _relative_to(_model(split, sizes), seconds, variances), len(split.firsts))
        if len(found) < len(split.firsts):
            break
        split = found[-1]
    return split


def _relative_to(model: Array, seconds: Array, variances: Array) -> Array:
    """Variances with which (measured - model) / measured counts as (measured - model) / model, up to FAR."""
    far = np.exp(np.minimum(FAR * np.sqrt(variances), CLIPPED))
    found: Array = variances * np.clip(model / seconds, 1 / far, far) ** 2
    return found


def _scatter(residuals: Array, errors: Array, freedom: int) -> float:
    """The variance beside that of the intervals with which chi squared is as expected; 0 if noise explains it.

    It does if chi squared is less than a standard deviation above its mean.
    """
    squares, least = residuals**2, errors**2 + EXACT**2
    if float(np.sum(squares / least)) <= freedom + math.sqrt(2 * freedom):
        return 0.0
    low, high = 0.0, float(np.sum(squares))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if float(np.sum(squares / (least + middle))) > freedom else (low, middle)
    return high


def _without_rounding(sizes: Array, values: Array, low: Array, high: Array) -> tuple[Array, Array, Array]:
    """[switch point, alpha, beta] x segment, with 0 for an alpha or beta that is a share below NOTHING of all times.

    It is what rounding left of times that do not depend on the size, or of times without latency.
    """
    for index in range(values.shape[1]):
        own = sizes[sizes >= values[0, index]]
        own = own[own < values[0, index + 1]] if index + 1 < values.shape[1] else own
        if not len(own):
            continue
        of_alpha, of_beta = (values[1, index] + values[2, index] * one for one in (own.min(), own.max()))
        for array in (values, low, high):
            array[1, index] *= array[1, index] > NOTHING * of_alpha
            array[2, index] *= array[2, index] * own.max() > NOTHING * of_beta
    return values, low, high


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

    def sums(values: Array) -> Array:
        return np.cumsum(np.triu(np.broadcast_to(values, (len(values), len(values)))), axis=1)

    alpha, beta, chi2 = _line(sizes, seconds, variances, sums)
    ordinal = np.unique(sizes, return_inverse=True)[1]  # one size lies in one segment
    begins = np.concatenate([[True], np.diff(sizes) > 0])
    ends = np.concatenate([np.diff(sizes) > 0, [True]])
    allowed = begins[:, None] & ends[None, :] & (ordinal[None, :] - ordinal[:, None] + 1 >= LEAST_SIZES)
    return alpha, beta, np.where(allowed & np.isfinite(chi2), chi2, np.inf)


def _line(sizes: Array, seconds: Array, variances: Array, sums: Callable[[Array], Array]) -> tuple[Array, Array, Array]:
    """Alpha, beta and chi squared of the lines whose sizes ``sums`` adds up."""
    weights, one, slope = 1 / variances, 1 / seconds, sizes / seconds
    w, u, v = sums(weights), sums(weights * one), sums(weights * slope)
    uu, uv, vv = sums(weights * one**2), sums(weights * one * slope), sums(weights * slope**2)
    with np.errstate(divide="ignore", invalid="ignore"):
        determinant = uu * vv - uv**2
        alpha, beta = (u * vv - v * uv) / determinant, (v * uu - u * uv) / determinant
        no_alpha, no_beta = alpha < 0, beta < 0
        alpha, beta = np.where(no_alpha, 0, alpha), np.where(no_alpha, v / vv, beta)
        alpha, beta = np.where(no_beta, u / uu, alpha), np.where(no_beta, 0, beta)
        chi2 = w - 2 * alpha * u - 2 * beta * v + alpha**2 * uu + 2 * alpha * beta * uv + beta**2 * vv
    return alpha, beta, chi2


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


def _intervals(split: _Split, sizes: Array, model: Array, variances: Array, scatter: float) -> tuple[Array, Array]:
    """The low and high ends of the intervals, each [switch point, alpha, beta] x segment.

    variances: of the measured times. scatter: the variance beside them, which is an estimate and drawn, too (Student's
    t).
    """
    random = np.random.default_rng(0)
    freedom = len(sizes) - _free(split)
    beside = scatter * freedom / random.chisquare(freedom, (REPLICATES, 1))
    noise = np.sqrt(variances + beside) * random.standard_normal((REPLICATES, len(sizes)))
    every = model * np.exp(np.clip(noise, -CLIPPED, CLIPPED))
    relative = _relative_to(model, every, variances + scatter)
    if len(split.firsts) == 1:  # nothing to search
        alphas, betas, _ = _line(sizes, every, relative, lambda values: np.sum(values, axis=1))
        low, high = np.quantile(np.array([0 * alphas, alphas, betas]), QUANTILES, axis=1)
        return low[:, None], high[:, None]
    drawn = []
    for times, weights in zip(every, relative, strict=True):
        found = _splits(sizes, times, weights, len(split.firsts))
        if found and len(found[-1].firsts) == len(split.firsts):
            again = found[-1]
            drawn.append([_starts(again, sizes), again.alphas, again.betas])
    if len(drawn) < REPLICATES / 2:  # the data are too noisy for an interval
        nothing = np.zeros((3, len(split.firsts)))
        return nothing, nothing + np.inf
    low, high = np.quantile(np.array(drawn), QUANTILES, axis=0)
    return low, high
