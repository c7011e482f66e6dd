"""The points that go from rank to rank, each looked at by itself: what a halo exchange or a repartition must move."""

import itertools

import numpy as np

from commengine import Decomposition


def moved(decomposition: Decomposition, needed, periodic=None) -> np.ndarray:
    """The points that rank i sends to rank j, at [i, j]; ranks are in row-major order, and keep their own points.

    needed: for each rank the (start, stop) on each axis of the positions that it needs. periodic: the axes that wrap
    around; else positions outside the field are nobody's.
    """
    places = list(itertools.product(*map(range, decomposition.grid_shape)))
    found = np.zeros((len(places), len(places)), dtype=int)
    for receiver, spans in enumerate(needed):
        for point in itertools.product(*(range(*span) for span in spans)):
            owner = []
            for axis, (position, extent) in enumerate(zip(point, decomposition.shape, strict=True)):
                if periodic and periodic[axis]:
                    position %= extent
                if 0 <= position < extent:
                    owner.append(decomposition.owner(axis, position))
            if len(owner) == len(point):
                found[places.index(tuple(owner)), receiver] += 1
    np.fill_diagonal(found, 0)
    return found


def moved_for_halos(decomposition: Decomposition, widths, periodic=None) -> np.ndarray:
    """`moved` by an exchange of halos of ``widths`` = (low, high) at the ends of each axis, corners included."""
    ranges = decomposition.halo_ranges(widths)
    places = itertools.product(*map(range, decomposition.grid_shape))
    return moved(decomposition, [[ranges[axis][c] for axis, c in enumerate(place)] for place in places], periodic)
