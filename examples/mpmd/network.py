"""The network beside the C solver of this folder: it learns from the solver's frames, and sends forecasts back.

    mpicc -O2 -o solver examples/mpmd/solver.c -lm
    mpiexec -n 2 ./solver : -n 2 python examples/mpmd/network.py

Both programs share MPI.COMM_WORLD; `launch.split_world` gives each its ranks, and an intercommunicator to the other.
The field is split into rows on both sides, over any two numbers of ranks, and no rank holds the whole of it while they
run. At the end the program writes a picture of the last forecast.
"""

import argparse
import itertools
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI
from torch import nn

import tplayers
from commengine import CartesianGrid, Communicator, Decomposition, launch

FIELD, FORECAST = 1, 2  # tags, as in solver.c
RESTART = 20  # frames after which the solver begins with another state


class Rows:
    """This rank's rows of the solver's field: they come from the solver's ranks, and forecasts go back to them."""

    def __init__(self, solver: MPI.Intercomm, blocks: Decomposition, rank: int) -> None:
        self.solver = solver
        own, columns = blocks.slices((rank, 0))
        theirs = Decomposition.even(blocks.shape[:1], [solver.remote_size]).bounds(0)
        self.field = np.empty((own.stop - own.start, columns.stop))
        self.parts = []  # (rank of the solver, rows of `field` that it holds)
        for source, (start, stop) in enumerate(itertools.pairwise(theirs)):
            start, stop = max(start, own.start), min(stop, own.stop)
            if start < stop:
                self.parts.append((source, slice(start - own.start, stop - own.start)))

    def receive(self) -> torch.Tensor:
        """The solver's next frame: [1, 1, rows, columns] in single precision."""
        for source, rows in self.parts:
            self.solver.Recv(self.field[rows], source=source, tag=FIELD)
        return torch.from_numpy(self.field.astype(np.float32))[None, None]

    def send(self, forecast: torch.Tensor) -> None:
        """Send a forecast of the same shape to the ranks of the solver."""
        values = forecast[0, 0].double().numpy()
        for target, rows in self.parts:
            self.solver.Send(values[rows], dest=target, tag=FORECAST)


class Forecast(nn.Module):
    """The change from one frame to the next: three convolutions on the split field, periodic as the solver is."""

    def __init__(self, grid: CartesianGrid, blocks: Decomposition) -> None:
        super().__init__()
        channels = (1, 16, 16, 1)
        self.layers = nn.ModuleList(
            tplayers.FieldConv(before, after, 5, grid, blocks, padding="same", padding_mode="circular")
            for before, after in itertools.pairwise(channels)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for layer in self.layers[:-1]:
            y = torch.nn.functional.gelu(layer(y))
        return x + self.layers[-1](y)


def learn(model: Forecast, rows: Rows, plan: np.ndarray, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Train on each frame as it comes, and answer the solver's last ones. Returns the last frame that was forecast, and
    the forecast.
    """
    height, width, last_frame, tests = plan.tolist()
    random = np.random.default_rng(0)  # in the same state on all ranks
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=(last_frame + 1) * steps)
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    now = answered = forecast = torch.zeros(1, 1, *rows.field.shape)
    for frame in range(last_frame + 1):
        begins = frame % RESTART == 0
        before, tested = now, frame > last_frame - tests and not begins
        if tested:
            with torch.no_grad():
                forecast = model(before)
            rows.send(forecast)
        now = rows.receive()
        if tested:
            answered = now
        if not begins:
            pairs.append((before, now))
        for _ in range(steps if pairs else 0):  # the solver computes its next frame meanwhile
            batch = [pairs[pick] for pick in random.integers(0, len(pairs), 2)]
            x, y = (torch.cat(fields) for fields in zip(*batch, strict=True))
            # This rank's part of the mean over the whole field. The layers add the ranks' gradients.
            loss = (model(x) - y).square().sum() / (2 * height * width)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return answered, forecast


def draw(path: Path, frame: np.ndarray, forecast: np.ndarray) -> None:
    """A frame of the solver, its forecast by the network, and the difference."""
    from matplotlib.figure import Figure  # here: it takes a second to load, and only one rank draws

    figure = Figure(figsize=(9, 3), layout="constrained")
    titles = ("solver", "network", "difference times 10")
    for axes, title, field in zip(
        figure.subplots(1, 3), titles, (frame, forecast, 10 * (forecast - frame)), strict=True
    ):
        image = axes.imshow(field, vmin=-1, vmax=1, cmap="RdBu_r")
        axes.set(title=title, xticks=[], yticks=[])
    figure.colorbar(image)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    """One rank of the network."""
    parser = argparse.ArgumentParser(description="A network beside the C solver.")
    parser.add_argument("--steps", type=int, default=10, help="steps of the optimizer for each frame")
    parser.add_argument(
        "--color", type=int, help="this program's part, where the launcher numbers no programs (srun): 1"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/examples/mpmd.png"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with launch.split_world(options.color) as part:
        solver, plan = part.other, np.empty(4, np.int32)
        solver.Bcast(plan, root=0)
        with Communicator(part.comm, device="cpu") as comm:
            grid = CartesianGrid(comm, (comm.size, 1), periodic=True)
            blocks = grid.decompose(plan[:2].tolist())
            model = Forecast(grid, blocks)
            tplayers.initialize(model, seed=0)  # equal on all ranks
            fields = learn(model, Rows(solver, blocks, comm.rank), plan, options.steps)
            wholes = []
            for field in fields:
                whole = np.empty(blocks.shape, np.float32)
                counts = [height * blocks.shape[1] for height in blocks.blocks[0]]
                part.comm.Gatherv(np.ascontiguousarray(field[0, 0].numpy()), [whole, counts])
                wholes.append(whole)
            if comm.rank == 0:
                draw(options.output, *wholes)
                print(f"network: picture: {options.output}")


if __name__ == "__main__":
    with launch.abort_on_error():
        main()
