"""Many small networks at once, on disjoint groups of ranks: which size of network does a longer time step need?

    mpirun -n 4 python examples/parameter_study.py

Each network learns where a damped, driven pendulum is after a given time. The study has a network for each time and
each width. The ranks form groups. A group takes the next case from a counter that all groups share, trains its network
on all its ranks, and goes on with the next case until none is left; so no group waits for a slower one. The program
prints the error of each case, and who computed it, and writes a picture.
"""

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI
from torch import nn

from commengine import Communicator, launch
from trainers.data_parallel import DataParallel

TIMES, WIDTHS = (0.5, 1.0, 2.0, 4.0), (4, 8, 16, 32, 64)
CASES = list(itertools.product(TIMES, WIDTHS))
BATCH, STEP = 256, 0.05  # samples; the pendulum's step in time


def pendulum(state: torch.Tensor, time: float) -> torch.Tensor:
    """The states [samples, 2] (angle, velocity) after ``time``, by Runge-Kutta steps."""

    def change(state: torch.Tensor, at: float) -> torch.Tensor:
        angle, velocity = state.unbind(1)
        return torch.stack([velocity, -torch.sin(angle) - 0.1 * velocity + 0.5 * np.cos(at)], 1)

    for step in range(round(time / STEP)):
        at = step * STEP
        k1 = change(state, at)
        k2 = change(state + STEP / 2 * k1, at + STEP / 2)
        k3 = change(state + STEP / 2 * k2, at + STEP / 2)
        state = state + STEP / 6 * (k1 + 2 * k2 + 2 * k3 + change(state + STEP * k3, at + STEP))
    return state


def samples(seed: int, count: int, time: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Random states, and where they are after ``time``: the same on all ranks."""
    state = 4 * torch.rand(count, 2, generator=torch.Generator().manual_seed(seed)) - 2
    return state, pendulum(state, time)


def train(group: Communicator, case: int, steps: int) -> float:
    """Train the network of a case on all ranks of the group; return its root mean square error on other samples."""
    time, width = CASES[case]
    torch.manual_seed(case)
    net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))
    states, targets = samples(2 * case, 16 * BATCH, time)
    optimizer = torch.optim.Adam(net.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    share = torch.arange(BATCH).tensor_split(group.size)[group.rank]  # of each batch
    with DataParallel(net, group) as replicas:  # its backward leaves the mean over the group in each gradient
        weight = replicas.sample_weight(2 * len(share))  # the shares may have different sizes
        for step in range(steps):
            mine = (step * BATCH + share) % len(states)
            optimizer.zero_grad()
            loss = (net(states[mine]) - targets[mine]).square().sum() * weight
            loss.backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        states, targets = samples(2 * case + 1, 1000, time)
        return float((net(states) - targets).square().mean().sqrt())


def next_cases(counter: MPI.Win, group: Communicator) -> Iterator[int]:
    """The cases that this group takes, the same on all its ranks. ``counter`` lies on rank 0 of the world."""
    taken, one = np.zeros(1, np.int64), np.ones(1, np.int64)
    while True:
        if group.rank == 0:
            counter.Lock(0)
            counter.Fetch_and_op(one, taken, 0, op=MPI.SUM)
            counter.Unlock(0)
        group.broadcast(torch.from_numpy(taken), root=0)
        if taken[0] >= len(CASES):
            return
        yield int(taken[0])


def draw(path: Path, errors: np.ndarray) -> None:
    """The errors [times, widths] as a map."""
    from matplotlib.figure import Figure  # here: it takes a second to load, and only one rank draws

    figure = Figure(figsize=(5, 3.4), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(np.log10(errors), cmap="viridis_r", origin="lower")
    axes.set(xlabel="width", ylabel="time", xticks=range(len(WIDTHS)), yticks=range(len(TIMES)))
    axes.set_xticklabels(WIDTHS)
    axes.set_yticklabels(TIMES)
    figure.colorbar(image, label="log10 of the root mean square error")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    """One rank of the job."""
    parser = argparse.ArgumentParser(description="Many small networks on disjoint groups of ranks.")
    parser.add_argument("--groups", type=int, default=2, help="groups of ranks")
    parser.add_argument("--steps", type=int, default=400, help="steps of the optimizer for each network")
    parser.add_argument("--output", type=Path, default=Path("runs/examples/parameter_study.png"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with Communicator(MPI.COMM_WORLD, device="cpu") as world:
        number = world.rank * min(options.groups, world.size) // world.size
        group = world.split(number, name=f"group {number}")
        assert group is not None
        counter = MPI.Win.Allocate(8 if world.rank == 0 else 0, 8, comm=MPI.COMM_WORLD)
        if world.rank == 0:
            np.frombuffer(counter.tomemory(), np.int64)[0] = 0
        world.barrier()
        found = torch.zeros(len(CASES), 2, dtype=torch.float64)  # error, and the group that computed it
        with group:
            for case in next_cases(counter, group):
                error = train(group, case, options.steps)
                if group.rank == 0:
                    found[case] = torch.tensor([error, number])
        world.all_reduce(found)
        counter.Free()
        if world.rank == 0:
            for (time, width), (error, by) in zip(CASES, found.tolist(), strict=True):
                print(f"time {time:g}, width {width}: error {error:.4f} (group {by:g})")
            draw(options.output, found[:, 0].reshape(len(TIMES), len(WIDTHS)).numpy())
            print(f"picture: {options.output}")


if __name__ == "__main__":
    with launch.abort_on_error():
        main()
