"""A network is the unknown law of a material in a finite-element solver, and learns it through the solver.

    apt install python3-dolfinx-real python3-matplotlib
    mpirun -n 2 python examples/dolfinx_closure.py

Heat flows through a plate whose conductivity k(u) depends on the temperature u:  -div(k(u) grad u) = f. The law k is
not known; the temperatures are, with some noise, for a given source f. The network gives k at the points of quadrature
of each rank's cells, and dolfinx solves the equation by Newton's method. The gradient of the misfit comes from the
adjoint equation, which PETSc solves with the transposed matrix. Each rank computes the gradient of its own cells' part,
and the ranks add them up. Without the package dolfinx the example says so, and ends.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor, nn

from commengine import Communicator, launch

try:
    import basix
    import ufl
    from dolfinx import fem, mesh
    from petsc4py import PETSc
except ImportError:
    fem = None

SOURCE = 30.0  # it brings the temperatures to 0.85
NOISE = 0.002  # of the temperatures that are known: its root mean square
Law = Callable[[Tensor], Tensor]


def truth(u: Tensor) -> Tensor:
    """The law that the temperatures come from: above a temperature of about 0.5 the plate conducts better."""
    return 0.8 + 1.6 * torch.sigmoid(12 * (u - 0.5))


class Network(nn.Module):
    """The conductivity at temperatures, which is positive."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1), nn.Softplus()
        ).double()

    def forward(self, u: Tensor) -> Tensor:
        """The conductivity at each of the temperatures ``u``."""
        return 0.1 + self.layers(4 * u[:, None] - 2)[:, 0]


class Plate:
    """The equation on a mesh that dolfinx has divided among the ranks."""

    def __init__(self, comm: Communicator, cells: int) -> None:

        self.comm = comm
        square = mesh.create_unit_square(comm.mpi, cells, cells)
        of_points = ufl.FiniteElement("Quadrature", square.ufl_cell(), 2, quad_scheme="default")
        self.space = fem.FunctionSpace(square, ("Lagrange", 1))
        points = fem.FunctionSpace(square, of_points)
        self.u, self.adjoint, self.known = (fem.Function(self.space) for _ in range(3))
        #: k and its derivative at the points of quadrature
        self.k, self.slope = fem.Function(points), fem.Function(points)
        trial, test, test_k = ufl.TrialFunction(self.space), ufl.TestFunction(self.space), ufl.TestFunction(points)
        dx = ufl.dx(metadata={"quadrature_degree": 2, "quadrature_scheme": "default"})
        x = ufl.SpatialCoordinate(square)
        source = SOURCE * ufl.exp(-8 * ((x[0] - 0.35) ** 2 + (x[1] - 0.4) ** 2))

        residual = self.k * ufl.inner(ufl.grad(self.u), ufl.grad(test)) * dx - source * test * dx
        flux = self.k * ufl.grad(trial) + self.slope * trial * ufl.grad(self.u)
        self.residual = fem.form(residual)
        self.jacobian = fem.form(ufl.inner(flux, ufl.grad(test)) * dx)
        self.misfit = fem.form(((self.u - self.known) / NOISE) ** 2 * dx)
        self.misfit_by_u = fem.form(2 * (self.u - self.known) / NOISE**2 * test * dx)
        # By a value of k at one point of quadrature: the product of the adjoint and the residual's derivative.
        self.by_k = fem.form(-ufl.inner(ufl.grad(self.u), ufl.grad(self.adjoint)) * test_k * dx)

        square.topology.create_connectivity(1, 2)
        border = mesh.exterior_facet_indices(square.topology)
        cold = fem.locate_dofs_topological(self.space, 1, border)
        self.border = [fem.dirichletbc(PETSc.ScalarType(0), cold, self.space)]
        # A rank asks the law at the points of its own cells. The copies of neighbours' cells, which come after them in
        # dolfinx's numbers, are not assembled here.
        self.cells = np.arange(square.topology.index_map(2).size_local, dtype=np.int32)
        places, _ = basix.make_quadrature(basix.CellType.triangle, 2)
        self.u_at_points = fem.Expression(self.u, places)
        self.at_points = points.dofmap.list.array.reshape(-1, len(places))[self.cells].ravel()

        self.matrix = fem.petsc.create_matrix(self.jacobian)
        self.vector = fem.petsc.create_vector(self.residual)
        self.solver = PETSc.KSP().create(comm.mpi)
        self.solver.setOperators(self.matrix)
        self.solver.setType("preonly")
        self.solver.getPC().setType("lu")  # it also solves with the transposed matrix
        self.solver.getPC().setFactorSolverType("mumps")

    def assemble(self, form: Any) -> Any:
        """The vector of a form, with zeros at the border, where the temperature is given."""
        with self.vector.localForm() as local:
            local.set(0)
        fem.petsc.assemble_vector(self.vector, form)
        self.vector.ghostUpdate(PETSc.InsertMode.ADD, PETSc.ScatterMode.REVERSE)  # what ranks add to each other's
        fem.petsc.set_bc(self.vector, self.border)
        return self.vector

    def temperatures(self) -> Tensor:
        """The temperature at the points of quadrature of this rank's cells."""
        return torch.from_numpy(self.u_at_points.eval(self.cells).ravel())

    def apply(self, law: Law) -> None:
        """Put the values of the law and of its derivative where dolfinx finds them."""
        u = self.temperatures().requires_grad_()
        k = law(u)
        (slope,) = torch.autograd.grad(k.sum(), u)
        self.k.x.array[self.at_points] = k.detach().numpy()
        self.slope.x.array[self.at_points] = slope.numpy()

    def linearise(self) -> None:
        """The Jacobian matrix of the present temperatures and law."""
        self.matrix.zeroEntries()
        fem.petsc.assemble_matrix(self.matrix, self.jacobian, bcs=self.border)
        self.matrix.assemble()

    def solve(self, law: Law) -> int:
        """Newton's method from the last temperatures. Returns its iterations. Collective."""
        change = self.vector.duplicate()
        for iteration in range(30):
            self.apply(law)
            vector = self.assemble(self.residual)
            if vector.norm() < 1e-12:
                return iteration
            self.linearise()
            self.solver.solve(vector, change)
            self.u.vector.axpy(-1.0, change)
            self.u.x.scatter_forward()  # also the copies that other ranks have
        raise RuntimeError(f"Newton's method has not converged: the residual is {vector.norm():.1e}")

    def error(self, law: Law) -> float:
        """Solve with the law, and return the mean square misfit over the plate, in units of the noise. Collective."""
        self.solve(law)
        misfit = torch.tensor([fem.assemble_scalar(self.misfit)], dtype=torch.float64)
        self.comm.all_reduce(misfit)  # the same bits on all ranks, which decide by it
        return float(misfit)

    def learn(self, network: nn.Module) -> float:
        """Set the gradients of the network, which are equal on all ranks, and return the misfit."""
        misfit = self.error(network)
        self.linearise()
        self.solver.solveTranspose(self.assemble(self.misfit_by_u), self.adjoint.vector)
        self.adjoint.x.scatter_forward()
        by_k = fem.petsc.assemble_vector(self.by_k)
        with by_k.localForm() as local:
            weights = torch.from_numpy(local.getArray()[self.at_points])
        network.zero_grad()
        network(self.temperatures()).backward(
            weights
        )  # the temperatures count as constants: the adjoint has their part
        parameters = list(network.parameters())
        total = torch.cat([one.grad.flatten() for one in parameters])  # type: ignore[union-attr]
        self.comm.all_reduce(total)
        for one, gradient in zip(parameters, total.split([one.numel() for one in parameters]), strict=True):
            one.grad = gradient.view_as(one)
        return misfit


def check(plate: Plate, network: nn.Module) -> float:
    """The relative error of the gradient along a random direction, beside differences of the misfit."""
    plate.learn(network)
    parameters, step = list(network.parameters()), 2e-5
    directions = [torch.randn_like(one) for one in parameters]  # equal on all ranks, as the seed
    slope = sum(float((one.grad * along).sum()) for one, along in zip(parameters, directions, strict=True))  # type: ignore[operator]
    misfits = []
    for moved in (step, -2 * step, step):
        with torch.no_grad():
            for one, along in zip(parameters, directions, strict=True):
                one += moved * along
        misfits.append(plate.error(network))
    return abs((misfits[0] - misfits[1]) / (2 * step) / slope - 1)


def draw(path: Path, u: np.ndarray, laws: dict[str, Tensor], misfits: list[float], plate: tuple[Any, Any, Any]) -> None:
    """The temperatures, the laws, and the misfit while the network learns."""
    from matplotlib.figure import Figure  # here: it takes a second to load, and only one rank draws

    figure = Figure(figsize=(11, 3), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    figure.colorbar(left.tripcolor(*plate[:2], plate[2], shading="gouraud"))
    left.set(title="temperature u", xticks=[], yticks=[], aspect="equal")
    for (name, k), style in zip(laws.items(), ("k-", "C0:", "C1--"), strict=True):
        middle.plot(u, k.numpy(), style, label=name)
    middle.set(xlabel="u", title="conductivity k(u)")
    middle.legend()
    right.semilogy(misfits)
    right.set(xlabel="solutions of the equation", title="misfit")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main() -> None:
    """One rank."""
    parser = argparse.ArgumentParser(description="A network as the law of a material in dolfinx.")
    parser.add_argument("--cells", type=int, default=32, help="cells along each side")
    parser.add_argument("--solutions", type=int, default=100, help="of the equation, for which the network learns")
    parser.add_argument("--width", type=int, default=16, help="of the network's layers")
    parser.add_argument("--output", type=Path, default=Path("runs/examples/dolfinx_closure.png"))
    options = parser.parse_args()
    if fem is None:
        if MPI.COMM_WORLD.rank == 0:
            print("skipped: this example needs the package dolfinx: apt install python3-dolfinx-real")
        return

    logging.disable(logging.INFO)  # the first time dolfinx compiles its forms, and tells each command
    torch.set_num_threads(1)
    torch.manual_seed(0)  # equal on all ranks
    with Communicator(MPI.COMM_WORLD, device="cpu") as comm:
        plate = Plate(comm, options.cells)
        network = Network(options.width)
        iterations = plate.solve(truth)
        plate.known.x.array[:] = plate.u.x.array
        # The noise is a function of the place, so that it does not depend on the ranks.
        x = plate.space.tabulate_dof_coordinates()
        plate.known.x.array[:] += 2**0.5 * NOISE * np.sin(1e4 * (x[:, 0] + 1.7 * x[:, 1] ** 2))
        ends = torch.tensor([plate.u.x.array.max()], dtype=torch.float64)
        comm.all_reduce(ends, op="max")
        error = check(plate, network)
        cells = comm.mpi.allgather(len(plate.cells))
        if comm.rank == 0:
            print(f"cells of the ranks: {cells}; Newton's method with the true law: {iterations} iterations")
            print(f"gradient by the adjoint and by differences: relative error {error:.1e}", flush=True)

        u = torch.linspace(0, float(ends), 200, dtype=torch.float64)
        with torch.no_grad():
            laws = {"truth": truth(u), "network before": network(u)}
        misfits: list[float] = []

        def learn() -> float:
            misfits.append(plate.learn(network))
            if comm.rank == 0 and len(misfits) % 50 == 1:
                print(f"solution {len(misfits)}: misfit {misfits[-1]:.2f}", flush=True)
            return misfits[-1]

        # All ranks have the same misfits and gradients, so this optimizer takes the same decisions on all of them.
        optimizer = torch.optim.LBFGS(
            network.parameters(), max_iter=options.solutions, max_eval=options.solutions, line_search_fn="strong_wolfe"
        )
        optimizer.step(learn)
        with torch.no_grad():
            laws["network"] = network(u)
        for name in ("network before", "network"):
            wrong = float(((laws[name] - laws["truth"]) / laws["truth"]).square().mean().sqrt())
            if comm.rank == 0:
                print(f"{name}: the law is wrong by {wrong:.1%}, for temperatures from 0 to {float(ends):.2f}")

        own = plate.space.dofmap.index_map.size_local
        parts = comm.mpi.gather((x[:own, 0], x[:own, 1], plate.u.x.array[:own]), 0)
        if comm.rank == 0:
            draw(options.output, u.numpy(), laws, misfits, tuple(map(np.concatenate, zip(*parts, strict=True))))
            print(f"picture: {options.output}")


if __name__ == "__main__":
    with launch.abort_on_error():
        main()
