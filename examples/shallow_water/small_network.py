"""A network of half the layers learns from a large one that has learnt a solver's steps, on the solver's own blocks.

    mpirun -n 2 python examples/shallow_water/small_network.py

The large network learns from many states of the solver. Then the solver is no longer there: only a few of its states
are left. One small network learns from these. Another also learns what the large network answers for states that the
large network makes itself, and its hidden states are drawn to those of the large one. All start from states that the
training has not seen, and the program prints their errors over time. It writes a picture of them.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI
from solver import ShallowWater
from surrogate import AGE, CHANGE, LEAD, SCALE, STILL, single

import tplayers
from commengine import CartesianGrid, Decomposition, launch

MODES = 10  # the Fourier modes of each axis that a network keeps
BATCH = 4  # states of a step of the optimizer
ALPHA, ANGLE = 0.7, 0.1  # the weights of what the large network answers, and of the angle between hidden states

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class Network:
    """A Fourier neural operator as a solver: it advances [members, 3, rows, columns] by a lead."""

    def __init__(self, grid: CartesianGrid, blocks: Decomposition, width: int, depth: int) -> None:
        self.fno = tplayers.FNO(3, 3, grid, blocks, width=width, modes=MODES, depth=depth)
        tplayers.initialize(self.fno, seed=0)  # equal on all ranks

    def change(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The change in a lead in units of CHANGE, and the hidden states [members, 2 * width, rows, columns]."""
        with tplayers.kept_output(self.fno.project[0]) as hidden:
            change = self.fno((state - STILL) / SCALE)
        return change, hidden[0]

    @torch.no_grad()
    def advance(self, state: torch.Tensor) -> torch.Tensor:
        """The state after a lead."""
        return state + CHANGE * self.change(state)[0]


def states(solver: ShallowWater, count: int, seed: int, network: Network | None = None) -> Pairs:
    """``count`` states of drawn members, each with the one after a lead: by the solver, or by ``network``."""
    random = np.random.default_rng(seed)  # in the same state on all ranks, as all choices must be
    found: Pairs = []
    while len(found) < count:
        for member in range(solver.members):
            solver.drop(member, random)
        now = single(solver.state)
        for _ in range(AGE):
            if network is None:
                solver.advance(LEAD)
                then = single(solver.state)
            else:
                then = network.advance(now)
            found += zip(now, then, strict=True)
            now = then
    return found[:count]


def fit(solver: ShallowWater, network: Network, pairs: Pairs, steps: int, teacher: Network | None, more: Pairs) -> None:
    """Train on ``pairs`` of the solver, and with a teacher also on ``more``, which the teacher has made."""
    random = np.random.default_rng(1)
    optimizer = torch.optim.Adam(network.fno.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    points = BATCH * solver.size[0] * solver.size[1]  # of a batch, over all ranks

    def drawn(pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
        batch = [pairs[pick] for pick in random.integers(0, len(pairs), BATCH)]
        now, then = (torch.stack(blocks) for blocks in zip(*batch, strict=True))
        return now, (then - now) / CHANGE

    for _ in range(steps):
        now, right = drawn(pairs)
        # This rank's part of the mean over the whole fields. The layers add the ranks' gradients.
        loss = (network.change(now)[0] - right).square().sum() / points
        if teacher is not None:
            now, answer = drawn(more)
            own, hidden = network.change(now)
            with torch.no_grad():
                theirs = teacher.change(now)[1]
            of_teacher = ALPHA * (own - answer).square().sum()
            of_teacher = of_teacher + ANGLE * tplayers.cosine_distillation_loss(hidden, theirs, dim=1).sum()
            loss = (1 - ALPHA) * loss + of_teacher / points
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def compare(solver: ShallowWater, networks: dict[str, Network], leads: int) -> np.ndarray:
    """The root mean square errors [leads, networks] of forecasts from states that the training has not seen."""
    random = np.random.default_rng(2)
    for member in range(solver.members):
        solver.drop(member, random)
    now = [single(solver.state) for _ in networks]
    errors = np.zeros((leads, len(networks)))
    for lead in range(leads):
        solver.advance(LEAD)
        now = [network.advance(state) for network, state in zip(networks.values(), now, strict=True)]
        errors[lead] = [float((state - single(solver.state)).square().sum()) for state in now]
    solver.cart.Allreduce(MPI.IN_PLACE, errors)
    return np.sqrt(errors / (solver.members * 3 * solver.size[0] * solver.size[1]))


def seconds(network: Network, state: torch.Tensor, times: int = 5) -> float:
    """The median time of a lead, after one that is not counted."""
    found = []
    for _ in range(times + 1):
        began = time.perf_counter()
        network.advance(state)
        found.append(time.perf_counter() - began)
    return float(np.median(found[1:]))


def draw(path: Path, names: list[str], errors: np.ndarray) -> None:
    """The errors over time."""
    from matplotlib.figure import Figure  # here: it takes a second to load, and only one rank draws

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot(xlabel="lead", ylabel="root mean square error")
    for name, error in zip(names, errors.T, strict=True):
        axes.plot(np.arange(1, len(error) + 1), error, label=name)
    axes.set(ylim=(0, None))
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    """One rank of the job."""
    parser = argparse.ArgumentParser(description="A small network that learns from a large one, on a solver's blocks.")
    parser.add_argument("--size", type=int, nargs=2, default=(64, 64), metavar=("ROWS", "COLUMNS"))
    parser.add_argument("--steps", type=int, default=400, help="steps of the optimizer, for each network")
    parser.add_argument("--width", type=int, default=16, help="channels of the networks")
    parser.add_argument("--depth", type=int, default=4, help="layers of the large network; the small ones have half")
    parser.add_argument("--states", type=int, default=256, help="states from which the large network learns")
    parser.add_argument("--few", type=int, default=16, help="states of the solver that are left for the small ones")
    parser.add_argument("--leads", type=int, default=20, help="leads of the forecasts")
    parser.add_argument("--output", type=Path, default=Path("runs/examples/small_network.png"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    solver = ShallowWater(MPI.COMM_WORLD, tuple(options.size), 4)
    with CartesianGrid.from_mpi(solver.cart, device="cpu") as grid:
        made = (grid, Decomposition(solver.blocks), options.width)
        large = Network(*made, options.depth)
        alone, taught = (Network(*made, options.depth // 2) for _ in range(2))
        many = states(solver, options.states, 1)
        few = many[: options.few]
        fit(solver, large, many, options.steps, None, [])
        fit(solver, alone, few, options.steps, None, [])
        fit(solver, taught, few, options.steps, large, states(solver, options.states, 3, large))
        networks = {"the large network": large, "a small one, alone": alone, "a small one with its teacher": taught}
        errors = compare(solver, networks, options.leads)
        now = single(solver.state)
        costs = [seconds(network, now) for network in networks.values()]
    if solver.cart.rank == 0:
        for number, (name, network) in enumerate(networks.items()):
            told = ", ".join(f"at lead {n} error {errors[n - 1, number]:.4f}" for n in (1, 10, 20) if n <= len(errors))
            print(f"{name}: {parameters_of(network):,} parameters, {1e3 * costs[number]:.1f} ms a lead, {told}")
        draw(options.output, list(networks), errors)
        print(f"picture: {options.output}")
    solver.cart.Free()


def parameters_of(network: Network) -> int:
    """The parameters of a network."""
    return sum(parameter.numel() for parameter in network.fno.parameters())


if __name__ == "__main__":
    with launch.abort_on_error():
        main()
