"""Lines between measured points, as few as follow them: the fit where alpha + n beta misses the measured times.

Caches that overflow and algorithms that change by steps bend a curve faster than a straight line can follow. There the
model is a broken line. Its corners are measured sizes, and the times at the corners never fall with size (isotonic
regression: Ayer et al. 1955). A shortest path finds the fewest corners with which each size lies within TOLERANCE, or
within two standard errors if they are wider; of these it takes the closest in squares of relative errors.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]

#: the largest relative error between corners
TOLERANCE = 0.08


def rising(times: Array, weights: Array) -> Array:
    """The times that do not fall and are the nearest in weighted squares of logarithms: pools of adjacent violators."""
    pools: list[tuple[float, float, int]] = []  # logarithm, weight, sizes
    for value, weight in zip(np.log(times), weights, strict=True):
        pool = (float(value), float(weight), 1)
        while pools and pools[-1][0] > pool[0]:
            before = pools.pop()
            both = before[1] + pool[1]
            pool = ((before[0] * before[1] + pool[0] * pool[1]) / both, both, before[2] + pool[2])
        pools.append(pool)
    found: Array = np.exp(np.repeat([value for value, _, _ in pools], [sizes for _, _, sizes in pools]))
    return found


def corners(sizes: Array, times: Array, variances: Array) -> list[int]:
    """The indices of the corners, the first and the last size among them. times: rising, of ascending sizes."""
    count = len(sizes)
    allowed = np.maximum(TOLERANCE, 2 * np.sqrt(variances))
    best: list[tuple[int, float, int]] = [(0, 0.0, 0)]  # corners and squares up to an index, and the corner before it
    for last in range(1, count):
        found = []
        for first in range(last):
            between = slice(first + 1, last)
            line = np.interp(sizes[between], sizes[[first, last]], times[[first, last]])
            errors = line / times[between] - 1
            if np.all(np.abs(errors) <= allowed[between]):
                squares = best[first][1] + float(np.sum(errors**2 / variances[between]))
                found.append((best[first][0] + 1, squares, first))
        best.append(min(found))
    path = [count - 1]
    while path[-1]:
        path.append(best[path[-1]][2])
    return path[::-1]


def through_points(sizes: Array, seconds: Array, variances: Array) -> list[tuple[float, float, float]]:
    """(first size, alpha, beta) of each line. sizes: ascending, perhaps equal. variances: relative, of ``seconds``.

    Below the first corner and beyond the last one the bandwidth stays if the line there would give 0 bytes a time below
    0, because such a line rises faster than the size.
    """
    different, index = np.unique(sizes, return_inverse=True)
    weights = np.bincount(index, 1 / variances).astype(np.float64)
    times = rising(np.exp(np.bincount(index, np.log(seconds) / variances) / weights), weights)
    found: list[tuple[float, float, float]] = []
    for first, last in pairwise(corners(different, times, 1 / weights)):
        beta = float((times[last] - times[first]) / (different[last] - different[first]))
        found.append((float(different[first]), float(times[first] - different[first] * beta), beta))
    beyond = found[-1][1] < 0
    if found[0][1] < 0:
        found.insert(0, (0.0, 0.0, float(times[0] / different[0])))
    else:
        found[0] = (0.0, *found[0][1:])
    return [*found, (float(different[-1]), 0.0, float(times[-1] / different[-1]))] if beyond else found
