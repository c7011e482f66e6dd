"""A network that learns to heat a plate, by gradients through a C++ solver of its own ranks.

    mpicxx -O2 -I tplayers/bridge -o heat examples/bridge/heat.cpp
    mpirun -n 2 ./heat : -n 2 python -m mpi4py examples/bridge/heating.py

Asked for a temperature, the network says how to heat the plate, so that it has this temperature some steps later. There
are no examples to learn from: its loss is the distance between what was asked for and what the solver makes of its
answer, and the gradient of the loss goes through the solver. The network has the plate in columns, the solver in rows.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import tplayers
from commengine import CartesianGrid, Communicator, Decomposition, launch

#: iterations between two lines
TOLD = 50


class Heater(nn.Module):
    """From a temperature to the heating that leads there: a correction of the temperature by convolutions."""

    def __init__(self, grid: CartesianGrid, blocks: Decomposition) -> None:
        super().__init__()
        widths = [1, 12, 12, 12, 1]
        self.layers = nn.ModuleList(
            tplayers.FieldConv(a, b, 7, grid, blocks, padding=3, dtype=torch.float64)
            for a, b in itertools.pairwise(widths)
        )

    def forward(self, wanted: Tensor) -> Tensor:
        x = wanted
        for layer in self.layers[:-1]:
            x = torch.nn.functional.gelu(layer(x))
        return wanted + self.layers[-1](x)


def temperatures(number: int, blocks: Decomposition, coords: tuple[int, ...]) -> Tensor:
    """This rank's block [1, 1, rows, columns] of a smooth temperature, 0 to 0.5: spots that the number draws."""
    random = np.random.default_rng(number)
    n = blocks.shape[0]
    rows, columns = (np.arange(part.start, part.stop) / (n - 1) for part in blocks.slices(coords))
    field = np.zeros((len(rows), len(columns)))
    for _ in range(4):
        y, x, height, width = random.uniform([0.25, 0.25, 0.1, 0.06], [0.75, 0.75, 0.3, 0.15])
        field += height * np.exp(-((rows[:, None] - y) ** 2 + (columns - x) ** 2) / (2 * width**2))
    edge = np.sin(np.pi * rows)[:, None] * np.sin(np.pi * columns)
    return torch.from_numpy(np.minimum(field, 0.5) * edge)[None, None]


def draw(path: Path, wanted: np.ndarray, heating: np.ndarray, reached: np.ndarray) -> None:
    """The temperature that was asked for, the heating, and what it became."""
    from matplotlib.figure import Figure  # here: it takes a second to load, and only one rank draws

    figure = Figure(figsize=(9, 3), layout="constrained")
    titles = ("wanted", "the network's heating", "what the solver makes of it")
    for axes, title, field in zip(figure.subplots(1, 3), titles, (wanted, heating, reached), strict=True):
        image = axes.imshow(field, vmin=0, vmax=0.8, cmap="inferno")
        axes.set(title=title, xticks=[], yticks=[])
    figure.colorbar(image)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    """One rank of the network's program."""
    parser = argparse.ArgumentParser(description="A network that learns through a C++ solver.")
    parser.add_argument("--points", type=int, default=48, help="along each edge of the plate: as the solver's")
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument(
        "--color", type=int, help="this program's part, where the launcher numbers no programs (srun): 1"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/examples/heating.png"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with launch.split_world(options.color) as part, Communicator(part.comm, device="cpu") as comm:
        grid = CartesianGrid(comm, (1, comm.size))  # columns
        blocks = grid.decompose((options.points, options.points))
        field = tplayers.BridgeField(blocks, leading=(1, 1))
        model = Heater(grid, blocks)
        tplayers.initialize(model, seed=0)
        optimizer = torch.optim.Adam(model.parameters(), 2e-3)
        with tplayers.Bridge(part.other, comm, gives=field, takes=field) as solver:

            def error(number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
                wanted = temperatures(number, blocks, grid.coords)
                heating = model(wanted)
                reached = solver.call(heating)
                return (reached - wanted).pow(2).sum() / options.points**2, wanted, heating, reached

            lately = torch.zeros((), dtype=torch.float64)
            for iteration in range(1, options.iterations + 1):
                loss = error(iteration)[0]
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                lately += loss.detach() / TOLD
                if iteration % TOLD == 0:
                    tell(comm, f"iteration {iteration}", lately)
                    lately.zero_()
            with torch.no_grad():
                loss, *fields = error(100_000)  # one that it has not seen
                tell(comm, "a new temperature", loss)
                tell(comm, "without a network", (solver.call(fields[0]) - fields[0]).pow(2).sum() / options.points**2)
            wholes = [part.comm.gather(one[0, 0].numpy()) for one in fields]
        if comm.rank == 0:
            draw(options.output, *(np.concatenate(one, axis=1) for one in wholes))
            print(f"picture: {options.output}")


def tell(comm: Communicator, about: str, share: Tensor) -> None:
    """Rank 0 says the root mean square error over all ranks."""
    total = share.detach().clone()
    comm.all_reduce(total)
    if comm.rank == 0:
        print(f"{about}: the temperature is wrong by {float(total) ** 0.5:.4f}", flush=True)


if __name__ == "__main__":
    with launch.abort_on_error():
        main()
