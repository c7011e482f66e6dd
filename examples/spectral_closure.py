"""A Fourier neural operator corrects a coarse model of turbulence on the slabs of a pseudo-spectral solver.

    apt install python3-mpi4py-fft python3-matplotlib
    mpirun -n 2 python examples/spectral_closure.py

The solver is of the two-dimensional Navier-Stokes equations. Its transforms are those of mpi4py-fft, which gives each
rank a slab of the field. The full model has waves with numbers up to a third of the points. The coarse one keeps only
the longest of them, and so it lacks what the short waves do to the long ones. The network learns the coarse model's
error in a lead while the full model runs. Then all start from fields that the training has not seen, and the coarse
model is run with the network and without it. Without the package mpi4py-fft the example says so, and ends.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

import tplayers
from commengine import CartesianGrid, Communicator, Decomposition, launch

VISCOSITY = 2e-3
DT, LEAD = 0.05, 8  # a step of the solver, and the steps after which the coarse model is corrected
LONG = 6  # the coarse model keeps the waves -LONG ... LONG of each axis
AGE = 12  # leads after which the members start anew
CHANGE = 0.1  # a typical error of the coarse model in a lead


class Vorticity:
    """The Navier-Stokes equations of the vorticity on a periodic square of side 2 pi, for some members at once."""

    def __init__(self, comm: MPI.Intracomm, points: int, members: int) -> None:
        from mpi4py_fft import PFFT, newDistArray

        # The second axis is the one that the ranks divide: the slabs of the field are rows.
        self.fft = PFFT(comm, (members, points, points), axes=(1, 2), dtype="d", grid=(1, -1, 1))
        #: the vorticity [members, this rank's rows, columns], and its spectrum, of which each rank has some columns
        self.field, self.spectrum = newDistArray(self.fft, False), newDistArray(self.fft, True)
        self.points, self.members = points, members
        rows, columns = self.spectrum.local_slice()[1:]
        self.kx = np.fft.fftfreq(points, 1 / points)[rows, None]
        self.ky = np.arange(points // 2 + 1.0)[None, columns]
        square = self.kx**2 + self.ky**2
        self.inverse = np.where(square > 0, 1 / np.maximum(square, 1), 0)  # of minus the Laplacian
        self.decay = np.exp(-VISCOSITY * DT * square)
        self.all_waves = self.waves((points - 1) // 3)  # products of two of them are still right
        self.long_waves = self.waves(LONG)

    def waves(self, most: int) -> np.ndarray:
        """Which of this rank's waves have numbers up to ``most``."""
        return (abs(self.kx) <= most) & (self.ky <= most)

    def to_points(self, spectrum: np.ndarray) -> np.ndarray:
        """The field of a spectrum. Collective, as all that follows."""
        field = np.empty_like(self.field)
        self.fft.backward(spectrum.copy(), field)  # of a copy, because the transform writes into its input
        return field

    def to_waves(self, field: np.ndarray) -> np.ndarray:
        """The spectrum of a field."""
        spectrum = np.empty_like(self.spectrum)
        self.fft.forward(field, spectrum)
        return spectrum

    def velocity(self, spectrum: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The two components of the velocity, of a spectrum of the vorticity."""
        stream = self.inverse * spectrum
        return self.to_points(1j * self.ky * stream), self.to_points(-1j * self.kx * stream)

    def tendency(self, spectrum: np.ndarray, kept: np.ndarray) -> np.ndarray:
        """The change of the spectrum by advection; only the waves ``kept`` take part."""
        field = self.to_points(spectrum)
        u, v = self.velocity(spectrum)
        return -1j * kept * (self.kx * self.to_waves(u * field) + self.ky * self.to_waves(v * field))

    def advance(self, spectrum: np.ndarray, kept: np.ndarray) -> np.ndarray:
        """The spectrum after a lead: Heun's method, in which the viscosity is exact."""
        for _ in range(LEAD):
            first = self.tendency(spectrum, kept)
            guess = self.decay * (spectrum + DT * first)
            spectrum = self.decay * (spectrum + DT / 2 * first) + DT / 2 * self.tendency(guess, kept)
        return spectrum

    def begin(self, random: np.random.Generator) -> np.ndarray:
        """The spectrum of new members: waves of the numbers 3 to 6 with random phases, of variance 4.

        random: in the same state on all ranks. Each rank draws the whole field and takes its own slab.
        """
        noise = random.standard_normal((self.members, self.points, self.points))
        square = self.kx**2 + self.ky**2
        spectrum = self.to_waves(noise[self.field.local_slice()]) * ((square >= 9) & (square <= 36))
        field = self.to_points(spectrum)
        variance = self.field.pencil.subcomm[1].allreduce((field**2).sum()) / field.shape[0] / self.points**2
        return self.advance(self.advance(2 / variance**0.5 * spectrum, self.all_waves), self.all_waves)


def as_block(field: np.ndarray) -> Tensor:
    """The memory of a field of the solver as [members, 1, rows, columns] of this rank. Nothing is copied."""
    return torch.from_numpy(field)[:, None]


def check(solver: Vorticity, grid: CartesianGrid, blocks: Decomposition, spectrum: np.ndarray) -> tuple[bool, float]:
    """A spectral convolution with the weights of the velocity, on the solver's own field.

    Returns whether the layer sees the solver's memory on all ranks, and the largest difference from its velocity.
    """
    n = solver.points
    solver.field[:] = solver.to_points(spectrum)
    block = as_block(solver.field)
    before = float(block[0, 0, 0, 0])
    solver.field[0, 0, 0] += 1
    shared = block.data_ptr() == solver.field.ctypes.data and float(block[0, 0, 0, 0]) == before + 1
    solver.field[0, 0, 0] = before
    modes = (n - 1) // 3 + 1
    conv = tplayers.SpectralConv(1, 2, modes, grid, blocks, dtype=torch.float64)
    kx = torch.cat([torch.arange(modes), torch.arange(-modes, 0)])[:, None].double()
    ky = torch.arange(modes)[None].double()
    square = kx**2 + ky**2
    square[0, 0] = torch.inf  # the mean of the vorticity moves nothing
    weight = torch.stack([1j * ky / square, -1j * kx / square])[None]
    conv.load_state_dict({"weight": torch.view_as_real(weight)})
    with torch.no_grad():
        found = conv(block).numpy()
    right = np.stack(solver.velocity(spectrum), axis=1)
    worst = torch.tensor([np.abs(found - right).max(), not shared], dtype=torch.float64)
    grid.comm.all_reduce(worst, op="max")
    return bool(worst[1] == 0), float(worst[0])


class Correction:
    """The network, which knows the error that the coarse model makes in a lead."""

    def __init__(self, solver: Vorticity, grid: CartesianGrid, blocks: Decomposition, width: int) -> None:
        self.solver = solver
        self.network = tplayers.FNO(2, 1, grid, blocks, width=width, modes=LONG + 1, depth=3, dtype=torch.float64)
        tplayers.initialize(self.network, seed=0)  # equal on all ranks

    def __call__(self, now: Tensor, coarse: Tensor) -> Tensor:
        """The full model's field minus the coarse one's. now, coarse: the field before the lead and after it."""
        return CHANGE * self.network(torch.cat([now, coarse - now], 1))

    @torch.no_grad()
    def advance(self, spectrum: np.ndarray) -> np.ndarray:
        """The spectrum after a lead of the coarse model and its correction, of which the long waves count."""
        solver = self.solver
        coarse = solver.advance(spectrum, solver.long_waves)
        error = self(as_block(solver.to_points(spectrum)), as_block(solver.to_points(coarse)))
        return coarse + solver.long_waves * solver.to_waves(error[:, 0].numpy())


def train(solver: Vorticity, correction: Correction, comm: Communicator, steps: int) -> None:
    """Run the full model, and learn from its last fields while it runs."""
    random = np.random.default_rng(1)  # in the same state on all ranks, as the choices must be
    optimizer = torch.optim.Adam(correction.network.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    full = solver.begin(random)
    samples: list[tuple[Tensor, Tensor, Tensor]] = []
    lately = torch.zeros(2, dtype=torch.float64)
    for step in range(steps):
        if step % 3 == 0:  # the solver goes on
            if step // 3 % AGE == AGE - 1:
                full = solver.begin(random)
            now = solver.long_waves * full
            full = solver.advance(full, solver.all_waves)
            coarse = solver.advance(now, solver.long_waves)
            fields = [as_block(solver.to_points(one)) for one in (now, coarse, solver.long_waves * full)]
            samples = [*samples, *zip(*fields, strict=True)][-512:]
        batch = [samples[pick] for pick in random.integers(0, len(samples), 4)]
        before, after, right = (torch.stack(blocks) for blocks in zip(*batch, strict=True))
        wrong = (correction(before, after) - (right - after)).square().sum()
        # This rank's part of the mean over the whole fields. The layers add the ranks' gradients.
        loss = wrong / CHANGE**2 / len(batch) / solver.points**2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        lately += torch.stack([wrong.detach(), (right - after).square().sum()])
        if step % 250 == 249 or step == steps - 1:
            comm.all_reduce(lately)
            if comm.rank == 0:
                share = float(lately[0] / lately[1])
                print(
                    f"step {step + 1}: with the network the mean square error is {share:.0%} of the coarse model's",
                    flush=True,
                )
            lately.zero_()


def compare(
    solver: Vorticity, correction: Correction, comm: Communicator, leads: int
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Forecasts of the long waves from fields that the training has not seen.

    Returns the root mean square errors [leads, 3] of the coarse model with the network, without it, and of persistence,
    and the last fields of this rank's slab, of the first member.
    """
    full = solver.begin(np.random.default_rng(2))
    start = solver.long_waves * full
    corrected = alone = start
    errors = torch.zeros(leads, 3, dtype=torch.float64)
    for lead in range(leads):
        full = solver.advance(full, solver.all_waves)
        corrected, alone = correction.advance(corrected), solver.advance(alone, solver.long_waves)
        for n, forecast in enumerate((corrected, alone, start)):
            errors[lead, n] = float((solver.to_points(forecast - solver.long_waves * full) ** 2).sum())
    comm.all_reduce(errors)
    errors = (errors / solver.members / solver.points**2).sqrt()
    last = {
        "full model": full,
        "its long waves": solver.long_waves * full,
        "coarse model": alone,
        "with the network": corrected,
    }
    return errors.numpy(), {name: solver.to_points(one)[0] for name, one in last.items()}


def draw(path: Path, errors: np.ndarray, fields: dict[str, np.ndarray]) -> None:
    """The fields after the last lead, and the errors until then."""
    from matplotlib.figure import Figure  # here: it takes a second to load, and only one rank draws

    figure = Figure(figsize=(12, 2.7), layout="constrained")
    *panels, right = figure.subplots(1, 5)
    for axes, (title, field) in zip(panels, fields.items(), strict=True):
        axes.imshow(field, vmin=-4, vmax=4, cmap="RdBu_r", origin="lower")
        axes.set(title=title, xticks=[], yticks=[])
    times = LEAD * DT * np.arange(1, len(errors) + 1)
    for label, error in zip(("with the network", "coarse model", "persistence"), errors.T, strict=True):
        right.plot(times, error, label=label)
    right.set(xlabel="time", title="error", ylim=(0, None))
    right.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def whole(solver: Vorticity, comm: Communicator, slab: np.ndarray) -> np.ndarray:
    """The whole field of a slab, on all ranks, for a picture."""
    field = torch.zeros(solver.points, solver.points, dtype=torch.float64)
    field[solver.field.local_slice()[1:]] = torch.from_numpy(slab)
    comm.all_reduce(field)
    return field.numpy()


def main() -> None:
    """One rank."""
    parser = argparse.ArgumentParser(description="A network on the slabs of a pseudo-spectral solver.")
    parser.add_argument("--points", type=int, default=50, help="an even number of points along each axis")
    parser.add_argument("--members", type=int, default=4, help="simulations at a time")
    parser.add_argument("--steps", type=int, default=1000, help="steps of the optimizer")
    parser.add_argument("--width", type=int, default=16, help="channels of the network")
    parser.add_argument("--leads", type=int, default=12, help="leads of the forecasts")
    parser.add_argument("--output", type=Path, default=Path("runs/examples/spectral_closure.png"))
    options = parser.parse_args()
    if importlib.util.find_spec("mpi4py_fft") is None:
        if MPI.COMM_WORLD.rank == 0:
            print("skipped: this example needs the package mpi4py-fft: apt install python3-mpi4py-fft")
        return

    torch.set_num_threads(1)
    solver = Vorticity(MPI.COMM_WORLD, options.points, options.members)
    with Communicator(MPI.COMM_WORLD, device="cpu") as comm:
        grid = CartesianGrid(comm, solver.field.commsizes[1:], periodic=True)
        blocks = grid.decomposition_of(solver.field.shape[1:])  # the slabs may be uneven
        shared, difference = check(solver, grid, blocks, solver.begin(np.random.default_rng(3)))
        if comm.rank == 0:
            print(f"slabs of mpi4py-fft: {list(blocks.blocks[0])} rows")
            print(f"the field is the solver's memory: {shared}")
            print(f"velocity by SpectralConv and by mpi4py-fft: largest difference {difference:.1e}", flush=True)
        correction = Correction(solver, grid, blocks, options.width)
        train(solver, correction, comm, options.steps)
        errors, slabs = compare(solver, correction, comm, options.leads)
        fields = {name: whole(solver, comm, slab) for name, slab in slabs.items()}
        if comm.rank == 0:
            for lead in sorted({1, 3, 6, options.leads}):
                if lead <= options.leads:
                    told = "with the network {:.4f}, coarse model {:.4f}, persistence {:.4f}".format(*errors[lead - 1])
                    print(f"time {lead * LEAD * DT:.1f}: error {told}")
            draw(options.output, errors, fields)
            print(f"picture: {options.output}")


if __name__ == "__main__":
    with launch.abort_on_error():
        main()
