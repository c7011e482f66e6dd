"""Shallow water on a rotating, doubly periodic plane, each rank with its block: numpy and mpi4py, nothing else.

It is an ordinary solver, and it knows nothing of a network. The scheme is the energy-conserving one of Sadourny (1975,
J. Atmos. Sci. 32, 680-689) on a C grid: the depth in the middle of a cell, u on its west side, v on its south side. The
steps in time are the Runge-Kutta method of three stages of Shu and Osher (1988).

Lengths are in cells, the undisturbed depth and the gravity are 1, so a long gravity wave crosses a cell in a unit of
time.
"""

import numpy as np
from mpi4py import MPI

STEP = 0.2  # time units
CORIOLIS = 0.1  # the radius of deformation is 10 cells


def west(a: np.ndarray) -> np.ndarray:
    """For each cell of the block and one around it, the value of the western neighbour."""
    return np.roll(a, 1, axis=-1)  # the column that wraps around is outside what `tendency` uses


def east(a: np.ndarray) -> np.ndarray:
    """The value of the eastern neighbour."""
    return np.roll(a, -1, axis=-1)


def south(a: np.ndarray) -> np.ndarray:
    """The value of the southern neighbour."""
    return np.roll(a, 1, axis=-2)


def north(a: np.ndarray) -> np.ndarray:
    """The value of the northern neighbour."""
    return np.roll(a, -1, axis=-2)


class ShallowWater:
    """An ensemble of independent simulations on one Cartesian communicator.

    comm: any intracommunicator; the solver makes its own Cartesian communicator, ``cart``, from it. size: cells along
    each axis (y, x). members: simulations at a time. ``state`` [members, 3, rows, columns], float64, holds depth, u and
    v of this rank's block. Every rank must call the methods.
    """

    def __init__(self, comm: MPI.Intracomm, size: tuple[int, int], members: int) -> None:
        dims = MPI.Compute_dims(comm.size, 2)
        self.cart = comm.Create_cart(dims, periods=[True, True])
        self.size, self.members = size, members
        # As numpy.array_split: the first n % p blocks have one cell more.
        self.blocks = [[n // p + (c < n % p) for c in range(p)] for n, p in zip(size, dims, strict=True)]
        first = [sum(sizes[:c]) for sizes, c in zip(self.blocks, self.cart.coords, strict=True)]
        self.rows, self.columns = (
            np.arange(start, start + sizes[c])
            for start, sizes, c in zip(first, self.blocks, self.cart.coords, strict=True)
        )
        self.state = np.zeros((members, 3, len(self.rows), len(self.columns)))
        self.state[:, 0] = 1.0

    def drop(self, member: int, random: np.random.Generator) -> None:
        """Start ``member`` anew: three hills or holes in water at rest. random: in the same state on all ranks."""
        depth = np.ones((len(self.rows), len(self.columns)))
        for _ in range(3):
            height, width = random.uniform(0.1, 0.3) * random.choice([-1, 1]), random.uniform(4, 8)
            y, x = (
                (places - n * random.random() + n / 2) % n - n / 2  # the distance on the periodic plane
                for places, n in zip((self.rows, self.columns), self.size, strict=True)
            )
            depth += height * np.exp(-(y[:, None] ** 2 + x[None, :] ** 2) / width**2)
        self.state[member] = 0.0
        self.state[member, 0] = depth

    def with_halo(self, state: np.ndarray) -> np.ndarray:
        """The blocks of ``state`` with one cell of the neighbours on each side."""
        padded = np.pad(state, [(0, 0), (0, 0), (1, 1), (1, 1)])
        for axis in (0, 1):  # the second exchange carries the corners of the first along
            lines = padded if axis == 0 else padded.swapaxes(2, 3)
            for send, receive, step in ((1, -1, -1), (-2, 0, 1)):
                source, target = self.cart.Shift(axis, step)
                strip = np.ascontiguousarray(lines[:, :, send])
                self.cart.Sendrecv_replace(strip, dest=target, source=source)
                lines[:, :, receive] = strip
        return padded

    def tendency(self, state: np.ndarray) -> np.ndarray:
        """The derivative of ``state`` with respect to time."""
        h, u, v = self.with_halo(state).swapaxes(0, 1)
        flux_x = 0.5 * (h + west(h)) * u
        flux_y = 0.5 * (h + south(h)) * v
        vorticity = (CORIOLIS + v - west(v) - u + south(u)) / (0.25 * (h + west(h) + south(h) + west(south(h))))
        energy = h + 0.25 * (u**2 + east(u) ** 2 + v**2 + north(v) ** 2)
        turn_x = vorticity * 0.5 * (flux_y + west(flux_y))
        turn_y = vorticity * 0.5 * (flux_x + south(flux_x))
        change = np.stack(
            [
                flux_x - east(flux_x) + flux_y - north(flux_y),
                0.5 * (turn_x + north(turn_x)) - energy + west(energy),
                -0.5 * (turn_y + east(turn_y)) - energy + south(energy),
            ],
            axis=1,
        )
        return change[:, :, 1:-1, 1:-1]

    def advance(self, steps: int) -> None:
        """Advance all members by ``steps`` steps."""
        for _ in range(steps):
            first = self.state + STEP * self.tendency(self.state)
            second = 0.75 * self.state + 0.25 * (first + STEP * self.tendency(first))
            self.state = self.state / 3 + 2 / 3 * (second + STEP * self.tendency(second))
