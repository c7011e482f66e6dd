"""A field of PETSc goes into a distributed convolution without a copy, and the result goes back into PETSc.

    mpirun -n 4 python examples/petsc_dmda.py

It needs petsc4py. A DMDA distributes the field; the network's grid and blocks are the DMDA's own. The convolution gets
known coefficients, a Helmholtz operator, so that its results can be compared with a matrix of PETSc. Then PETSc's
conjugate gradients solve an equation with the convolution in the place of the matrix. It writes a picture of the
solution.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI

import tplayers
from commengine import CartesianGrid, Communicator, Decomposition, launch

try:
    import petsc4py

    petsc4py.init(sys.argv[:1])
    from petsc4py import PETSc
except ImportError:
    PETSc = None

SHIFT = 0.05  # of the Helmholtz equation  SHIFT u - laplacian(u) = f


def as_field(vector: "PETSc.Vec", shape: tuple[int, int]) -> torch.Tensor:
    """The memory of a vector of PETSc as a field [1, 1, rows, columns] of this rank. Nothing is copied.

    Call it on every rank, also where only one of them changes the field: PETSc remembers the norms of a vector, and
    forgets them on the ranks that ask for its memory. If some ranks remember a norm and others do not, they part.
    """
    return torch.from_numpy(vector.getArray()).view(1, 1, *shape)


def as_vector(field: torch.Tensor, comm: MPI.Intracomm) -> "PETSc.Vec":
    """The memory of a field as a vector of PETSc, which keeps the field alive. Nothing is copied."""
    return PETSc.Vec().createWithArray(field.detach().contiguous().view(-1).numpy(), comm=comm)


class Helmholtz:
    """SHIFT u - laplacian(u) as a convolution: the Python side of a shell matrix of PETSc."""

    def __init__(self, conv: tplayers.FieldConv, shape: tuple[int, int]) -> None:
        self.conv, self.shape = conv, shape

    def mult(self, _: "PETSc.Mat", source: "PETSc.Vec", target: "PETSc.Vec") -> None:
        """PETSc calls it for the product of the matrix and ``source``. Collective."""
        with torch.no_grad():
            as_field(target, self.shape).copy_(self.conv(as_field(source, self.shape)))


def matrix(dmda: "PETSc.DMDA") -> "PETSc.Mat":
    """The same operator as a sparse matrix of PETSc, to compare with."""
    made = dmda.createMatrix()
    (first_x, last_x), (first_y, last_y) = dmda.getRanges()
    row, column = PETSc.Mat.Stencil(), PETSc.Mat.Stencil()
    for y in range(first_y, last_y):
        for x in range(first_x, last_x):
            row.index = (x, y)
            for dx, dy, value in ((0, 0, SHIFT + 4.0), (1, 0, -1.0), (-1, 0, -1.0), (0, 1, -1.0), (0, -1, -1.0)):
                column.index = (x + dx, y + dy)
                made.setValueStencil(row, column, value)
    made.assemble()
    return made


def draw(path: Path, field: np.ndarray) -> None:
    """The solution."""
    from matplotlib.figure import Figure  # here: it takes a second to load, and only one rank draws

    figure = Figure(figsize=(4.4, 3.6), layout="constrained")
    axes = figure.subplots()
    figure.colorbar(axes.imshow(field, origin="lower"))
    axes.set(title="u", xticks=[], yticks=[])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    """One rank of the job."""
    parser = argparse.ArgumentParser(description="A convolution on a field of PETSc.")
    parser.add_argument("--size", type=int, nargs=2, default=(61, 50), metavar=("ROWS", "COLUMNS"))
    parser.add_argument("--output", type=Path, default=Path("runs/examples/petsc_dmda.png"))
    options = parser.parse_args()
    rows, columns = options.size
    periodic = PETSc.DM.BoundaryType.PERIODIC
    dmda = PETSc.DMDA().create(
        [columns, rows], dof=1, stencil_width=1, boundary_type=(periodic, periodic), comm=MPI.COMM_WORLD
    )
    # PETSc's first axis is the one that runs fastest, in its arrays and in the numbers of its ranks: our last one.
    blocks = Decomposition(tuple(tuple(map(int, sizes)) for sizes in dmda.getOwnershipRanges()[::-1]))
    with Communicator(MPI.COMM_WORLD, device="cpu") as comm:
        grid = CartesianGrid(comm, dmda.getProcSizes()[::-1], periodic=True)
        shape = blocks.local_shape(grid.coords)
        conv = tplayers.FieldConv(
            1, 1, 3, grid, blocks, padding=1, bias=False, padding_mode="circular", dtype=torch.float64
        )
        stencil = [[0.0, -1.0, 0.0], [-1.0, SHIFT + 4.0, -1.0], [0.0, -1.0, 0.0]]
        conv.load_state_dict({"weight": torch.tensor(stencil, dtype=torch.float64).view(1, 1, 3, 3)})

        source = dmda.createGlobalVec()
        source.setRandom()
        field = as_field(source, shape)
        with torch.no_grad():
            result = as_vector(conv(field), MPI.COMM_WORLD)
        field = as_field(source, shape)
        field[0, 0, 0, 0] = 7.0  # PETSc sees it: the memory is its own
        shared = source.getArray(readonly=True)[0] == 7.0
        with torch.no_grad():
            result = as_vector(conv(field), MPI.COMM_WORLD)
        exact = dmda.createGlobalVec()
        matrix(dmda).mult(source, exact)
        exact.axpy(-1.0, result)
        difference = exact.norm(PETSc.NormType.INFINITY)

        operator = PETSc.Mat().createPython([source.getSizes()] * 2, Helmholtz(conv, shape), comm=MPI.COMM_WORLD)
        operator.setUp()
        source.zeroEntries()
        field, own = as_field(source, shape), blocks.slices(grid.coords)
        for y, x, value in ((rows // 4, columns // 4, 1.0), (rows // 2, 3 * columns // 4, -1.0)):
            if y in range(own[0].start, own[0].stop) and x in range(own[1].start, own[1].stop):
                field[0, 0, y - own[0].start, x - own[1].start] = value
        solution = dmda.createGlobalVec()
        solver = PETSc.KSP().create(MPI.COMM_WORLD)
        solver.setOperators(operator)
        solver.setType("cg")
        solver.getPC().setType("none")
        solver.setTolerances(rtol=1e-10)
        solver.solve(source, solution)
        check = dmda.createGlobalVec()
        matrix(dmda).mult(solution, check)
        check.axpy(-1.0, source)
        residual = check.norm()

        whole = np.zeros((rows, columns))
        whole[blocks.slices(grid.coords)] = as_field(solution, shape)[0, 0].numpy()
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, whole)
        if comm.rank == 0:
            print(
                f"PETSc {'.'.join(map(str, PETSc.Sys.getVersion()))}, grid {list(grid.shape)}, blocks {blocks.blocks}"
            )
            print(f"the field is PETSc's memory: {bool(shared)}")
            print(f"largest difference from PETSc's matrix: {difference:.1e}")
            print(f"conjugate gradients with the convolution: {solver.getIterationNumber()} iterations, residual "
                  f"{residual:.1e}")  # fmt: skip
            draw(options.output, whole)
            print(f"picture: {options.output}")


if __name__ == "__main__":
    if PETSc is None:
        if MPI.COMM_WORLD.rank == 0:
            print("skipped: this Python has no petsc4py")
    else:
        with launch.abort_on_error():
            main()
