"""A U-Net learns a solver's time steps on the solver's own blocks, while it runs, and then runs in its place.

    mpirun -n 4 python examples/shallow_water/surrogate.py

The solver (solver.py) has a Cartesian communicator and a block of the fields on each rank. The network is made on that
communicator and for those blocks: no field is gathered or copied to another layout. It learns to predict ten steps of
the solver at once. Afterwards both start from states that the training has not seen, and the program prints the error
of the network over time beside that of persistence, the forecast that nothing changes. It writes an animation.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI
from solver import ShallowWater

import tplayers
from commengine import CartesianGrid, Decomposition, launch

LEAD = 10  # steps of the solver that the network makes at once
AGE = 16  # leads after which a member starts anew
STILL = torch.tensor([1.0, 0.0, 0.0]).view(3, 1, 1)  # water at rest: depth, u, v
SCALE, CHANGE = 0.1, 0.05  # typical departures from rest, and their changes in a lead


class Surrogate:
    """The network as a solver: it advances [members, 3, rows, columns] by a lead."""

    def __init__(self, grid: CartesianGrid, blocks: Decomposition, width: int) -> None:
        self.unet = tplayers.UNet(3, 3, grid, blocks, width=width, depth=2, padding_mode="circular", norm="none")
        tplayers.initialize(self.unet, seed=0)  # equal on all ranks

    def change(self, state: torch.Tensor) -> torch.Tensor:
        """The change in a lead, in units of CHANGE."""
        return self.unet((state - STILL) / SCALE)

    @torch.no_grad()
    def advance(self, state: torch.Tensor) -> torch.Tensor:
        """The state after a lead."""
        return state + CHANGE * self.change(state)


def single(state: np.ndarray) -> torch.Tensor:
    """A copy in single precision of the solver's state, which the solver goes on to change."""
    return torch.from_numpy(state.astype(np.float32))


def train(surrogate: Surrogate, solver: ShallowWater, steps: int) -> None:
    """Run the solver, and train on its last states while it runs."""
    random = np.random.default_rng(1)  # in the same state on all ranks, as the choices must be
    ages = random.integers(0, AGE, solver.members)
    for member in range(solver.members):
        solver.drop(member, random)
    optimizer = torch.optim.Adam(surrogate.unet.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    count = 4 * 3 * solver.size[0] * solver.size[1]  # numbers in a batch, over all ranks
    for step in range(steps):
        if step % 2 == 0:  # the solver goes on
            for member in np.flatnonzero(ages >= AGE):
                solver.drop(member, random)
            ages = np.where(ages >= AGE, 1, ages + 1)
            before = single(solver.state)
            solver.advance(LEAD)
            pairs = [*pairs, *zip(before, single(solver.state), strict=True)][-256:]
        batch = [pairs[pick] for pick in random.integers(0, len(pairs), 4)]
        now, then = (torch.stack(states) for states in zip(*batch, strict=True))
        # This rank's part of the mean over the whole fields. The layers add the ranks' gradients.
        loss = (surrogate.change(now) - (then - now) / CHANGE).square().sum() / count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            whole = np.array(loss.item())
            solver.cart.Allreduce(MPI.IN_PLACE, whole)
            if solver.cart.rank == 0:
                print(f"step {step + 1}: loss {whole:.2e}", flush=True)


def compare(surrogate: Surrogate, solver: ShallowWater, leads: int) -> tuple[np.ndarray, list[np.ndarray], list[float]]:
    """Forecasts from states that the training has not seen.

    Returns the root mean square errors [leads, 2] of the network and of persistence; on rank 0 the depth of the first
    member for each lead, the solver's and the network's; and the seconds of the solver and of the network for a lead.
    """
    random = np.random.default_rng(2)
    for member in range(solver.members):
        solver.drop(member, random)
    start = forecast = single(solver.state)
    errors, frames, times = np.zeros((leads, 2)), [], np.zeros((leads, 3))
    for lead in range(leads):
        times[lead, 0] = MPI.Wtime()
        solver.advance(LEAD)
        times[lead, 1] = MPI.Wtime()
        forecast, truth = surrogate.advance(forecast), single(solver.state)
        times[lead, 2] = MPI.Wtime()
        errors[lead] = [float((wrong - truth).square().sum()) for wrong in (forecast, start)]
        frames.append(np.stack([whole_field(solver, field[0, 0].numpy()) for field in (truth, forecast)]))
    solver.cart.Allreduce(MPI.IN_PLACE, errors)
    errors = np.sqrt(errors / (solver.members * 3 * solver.size[0] * solver.size[1]))
    return errors, frames, np.median(np.diff(times), axis=0).tolist()


def whole_field(solver: ShallowWater, block: np.ndarray) -> np.ndarray:
    """The whole field on rank 0, for a picture."""
    whole = np.zeros(solver.size, np.float32)
    whole[np.ix_(solver.rows, solver.columns)] = block
    solver.cart.Reduce(MPI.IN_PLACE if solver.cart.rank == 0 else whole, whole if solver.cart.rank == 0 else None)
    return whole


def animate(path: Path, errors: np.ndarray, frames: list[np.ndarray]) -> None:
    """The depth of the solver and of the network, and the errors up to the frame that is shown."""
    from matplotlib import animation
    from matplotlib.figure import Figure  # here: it takes a second to load, and only one rank draws

    figure = Figure(figsize=(10, 3.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    images = []
    for axes, title, field in ((left, "solver", frames[0][0]), (middle, "network", frames[0][1])):
        images.append(axes.imshow(field, vmin=0.85, vmax=1.15, cmap="RdBu_r", origin="lower"))
        axes.set(title=title, xticks=[], yticks=[])
    leads = np.arange(1, len(errors) + 1)
    lines = [right.plot([], [], label=label)[0] for label in ("network", "persistence")]
    right.set(xlim=(1, len(errors)), ylim=(0, 1.05 * errors.max()), xlabel="lead", title="root mean square error")
    right.legend()

    def show(frame: int) -> None:
        for image, field in zip(images, frames[frame], strict=True):
            image.set_data(field)
        for line, error in zip(lines, errors.T, strict=True):
            line.set_data(leads[: frame + 1], error[: frame + 1])

    path.parent.mkdir(parents=True, exist_ok=True)
    animation.FuncAnimation(figure, show, frames=len(frames)).save(path, writer=animation.PillowWriter(fps=5))


def main() -> None:
    """One rank of the job."""
    parser = argparse.ArgumentParser(description="A U-Net in the place of a shallow-water solver.")
    parser.add_argument("--size", type=int, nargs=2, default=(64, 64), metavar=("ROWS", "COLUMNS"))
    parser.add_argument("--members", type=int, default=4, help="simulations at a time")
    parser.add_argument("--steps", type=int, default=300, help="steps of the optimizer")
    parser.add_argument("--width", type=int, default=16, help="channels of the U-Net's first level")
    parser.add_argument("--leads", type=int, default=20, help="leads of the forecasts")
    parser.add_argument("--output", type=Path, default=Path("runs/examples/shallow_water.gif"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    solver = ShallowWater(MPI.COMM_WORLD, tuple(options.size), options.members)
    with CartesianGrid.from_mpi(solver.cart, device="cpu") as grid:
        surrogate = Surrogate(grid, Decomposition(solver.blocks), options.width)
        train(surrogate, solver, options.steps)
        errors, frames, seconds = compare(surrogate, solver, options.leads)
    if solver.cart.rank == 0:
        for lead, (network, persistence) in enumerate(errors, 1):
            if lead in (1, 5, 10, 20):
                print(f"lead {lead}: error of the network {network:.4f}, of persistence {persistence:.4f}")
        print("a lead of all members: {:.3f} s of the solver, {:.3f} s of the network".format(*seconds))
        animate(options.output, errors, frames)
        print(f"animation: {options.output}")
    solver.cart.Free()


if __name__ == "__main__":
    with launch.abort_on_error():
        main()
