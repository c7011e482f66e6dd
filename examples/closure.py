"""Half of the ranks solve, the other half train a tensor-parallel network on the solution and then serve it.

    mpirun -n 4 python examples/closure.py

The solver is the model of Lorenz (1996, "Predictability: a problem partly solved") with two scales: slow variables X on
a circle, and ten fast variables Y for each of them, whose sum U acts on X. The first half of COMM_WORLD integrates
both, each rank with an arc of the circle. The other half learns U as a function of X, while the solver runs. Then the
solver drops the fast variables and asks the network for U in each step. The program compares the resulting forecasts
with the full model's, and with forecasts of a constant U. It writes a picture.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI
from torch import nn

import tplayers
from commengine import Communicator, launch

SLOW, FAST = 36, 10  # X, and Y for each X
FORCING, COUPLING, RATIO = 10.0, 1.0, 10.0  # F, h, and c = b of the model
STEP = 0.005  # of time; the fast variables need it
MEMBERS = 16  # simulations at a time
SPIN_UP, EVERY = 1000, 10  # steps that forget the start; steps between two exchanges


class Lorenz96:
    """An arc of the circle on each rank of ``comm``; arrays are [place, member].

    x [places, members] and y [places, FAST, members] are this rank's variables. Every rank must call the methods.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.counts = [SLOW // comm.size + (rank < SLOW % comm.size) for rank in range(comm.size)]
        if min(self.counts) < 2:
            raise SystemExit(f"{SLOW} places on {comm.size} ranks: each rank needs two")
        random = np.random.default_rng(0)  # the same on all ranks, which take their arcs
        first = sum(self.counts[: comm.rank])
        arc = slice(first, first + self.counts[comm.rank])
        self.x = random.normal(size=(SLOW, MEMBERS))[arc] + 2.0
        self.y = 0.1 * random.normal(size=(SLOW, FAST, MEMBERS))[arc]

    def neighbours(self, x: np.ndarray, y: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """The last two X and the last Y of the rank before, and the first X and the first two Y of the rank after."""
        to_before, to_after = np.zeros((2, 3, x.shape[1]))
        to_before[0], to_after[:2] = x[0], x[-2:]
        if y is not None:
            to_before[1:], to_after[2] = y[0, :2], y[-1, -1]
        before, after = (self.comm.rank - 1) % self.comm.size, (self.comm.rank + 1) % self.comm.size
        self.comm.Sendrecv_replace(to_before, dest=before, source=after)
        self.comm.Sendrecv_replace(to_after, dest=after, source=before)
        return to_after, to_before

    def slow_tendency(self, x: np.ndarray, before: np.ndarray, after: np.ndarray, u: np.ndarray) -> np.ndarray:
        """The derivative of X, given U."""
        around = np.concatenate([before[:2], x, after[:1]])
        return around[1:-2] * (around[3:] - around[:-3]) - x + FORCING - u

    def tendency(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The derivatives of X and Y."""
        before, after = self.neighbours(x, y)
        circle = np.concatenate([before[2:], y.reshape(-1, y.shape[2]), after[1:]])
        advection = RATIO * RATIO * circle[2:-1] * (circle[:-3] - circle[3:])
        change = advection.reshape(y.shape) - RATIO * y + COUPLING * x[:, None]
        return self.slow_tendency(x, before, after, self.subgrid(y)), change

    def subgrid(self, y: np.ndarray) -> np.ndarray:
        """U: the effect of the fast variables on X."""
        return COUPLING * y.sum(axis=1)

    def advance(self, steps: int) -> None:
        """Integrate the full model by the Runge-Kutta method of four stages."""
        for _ in range(steps):
            x, y = self.x, self.y
            k1 = self.tendency(x, y)
            k2 = self.tendency(x + STEP / 2 * k1[0], y + STEP / 2 * k1[1])
            k3 = self.tendency(x + STEP / 2 * k2[0], y + STEP / 2 * k2[1])
            k4 = self.tendency(x + STEP * k3[0], y + STEP * k3[1])
            slopes = zip((x, y), k1, k2, k3, k4, strict=True)
            self.x, self.y = (z + STEP / 6 * (a + 2 * b + 2 * c + d) for z, a, b, c, d in slopes)

    def slow_step(self, x: np.ndarray, u: np.ndarray) -> np.ndarray:
        """X after a step of the slow equation alone, with a constant U during the step."""

        def change(x: np.ndarray) -> np.ndarray:
            return self.slow_tendency(x, *self.neighbours(x, None), u)

        k1 = change(x)
        k2 = change(x + STEP / 2 * k1)
        k3 = change(x + STEP / 2 * k2)
        return x + STEP / 6 * (k1 + 2 * k2 + 2 * k3 + change(x + STEP * k3))


def solve(comm: MPI.Intracomm, network: MPI.Intercomm, exchanges: int, span: int, output: Path) -> None:
    """The solver's half."""
    model = Lorenz96(comm)
    model.advance(SPIN_UP)
    mean, none = 0.0, np.empty(0)
    for _ in range(exchanges):
        model.advance(EVERY)
        u = model.subgrid(model.y)
        mean += u.mean() / exchanges
        network.Allgatherv(np.stack([model.x, u], axis=1), none)  # [place, 2, member]; nothing comes back
    all_of_u = np.array([mean * len(model.x)])
    comm.Allreduce(MPI.IN_PLACE, all_of_u)
    model.advance(SPIN_UP)  # away from the states of the training
    states = dict.fromkeys(("network", "constant"), model.x)
    errors, fields = np.zeros((span, 2)), []
    for step in range(span):
        model.advance(1)
        u = np.empty_like(model.x)
        network.Allgatherv(states["network"], none)
        network.Scatterv(None, u, root=0)
        states["network"] = model.slow_step(states["network"], u)
        states["constant"] = model.slow_step(states["constant"], np.full_like(u, all_of_u[0] / SLOW))
        errors[step] = [np.square(x - model.x).sum() for x in states.values()]
        fields.append([model.x[:, 0], *(x[:, 0] for x in states.values())])
    comm.Allreduce(MPI.IN_PLACE, errors)
    errors = np.sqrt(errors / (SLOW * MEMBERS))
    mine = np.ascontiguousarray(np.array(fields).transpose(2, 1, 0))  # [place, forecast, step]
    whole = np.empty((SLOW, *mine.shape[1:]))
    comm.Gatherv(mine, [whole, [count * mine[0].size for count in model.counts]])
    if comm.rank == 0:
        for step in range(span // 4, span + 1, span // 4):
            network_error, constant_error = errors[step - 1]
            print(f"time {step * STEP:g}: error with the network {network_error:.3f}, with a constant U "
                  f"{constant_error:.3f}")  # fmt: skip
        draw(output, whole, errors)
        print(f"picture: {output}")


class Closure(nn.Module):
    """U as a function of five neighbouring X; each rank of ``tensor`` holds a part of the hidden layer."""

    def __init__(self, tensor: Communicator) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 32)
        self.mlp = tplayers.MLP(32, 240, tensor)
        self.leave = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [SLOW, members] on the whole circle; returns U in the same shape."""
        windows = torch.stack([x.roll(shift, dims=0) for shift in (2, 1, 0, -1, -2)], dim=-1) / 5.0
        entered = torch.tanh(self.enter(windows))
        return 5.0 * self.leave(torch.tanh(entered + self.mlp(entered))).squeeze(-1)


def serve(comm: MPI.Intracomm, solver: MPI.Intercomm, exchanges: int, span: int) -> None:
    """The network's half."""
    torch.manual_seed(0)  # PyTorch's layers must begin equal on all ranks
    size = solver.remote_size
    places = [SLOW // size + (rank < SLOW % size) for rank in range(size)]

    def receive(values: int) -> torch.Tensor:
        """[SLOW, values, MEMBERS], put together from the arcs of the solver's ranks."""
        whole = np.empty((SLOW, values, MEMBERS))
        counts = [count * values * MEMBERS for count in places]
        solver.Allgatherv(np.empty(0), [whole, counts])
        return torch.from_numpy(whole).float()

    with Communicator(comm, device="cpu") as tensor:
        model = Closure(tensor)
        tplayers.initialize(model, seed=0)
        optimizer = torch.optim.Adam(model.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=exchanges)
        for exchange in range(exchanges):
            x, u = receive(2).unbind(1)
            loss = (model(x) - u).square().mean()
            optimizer.zero_grad()
            loss.backward()  # each rank gets the whole gradient of what it holds
            optimizer.step()
            schedule.step()
            if tensor.rank == 0 and (exchange + 1) % max(exchanges // 4, 1) == 0:
                print(
                    f"exchange {exchange + 1}: loss {loss.item():.3f}, variance of U {u.var().item():.3f}", flush=True
                )
        with torch.no_grad():
            for _ in range(span):
                u = model(receive(1)[:, 0])
                if tensor.rank == 0:
                    solver.Scatterv([u.double().numpy(), [count * MEMBERS for count in places]], None, root=MPI.ROOT)
                else:
                    solver.Scatterv(None, None, root=MPI.PROC_NULL)


def draw(path: Path, fields: np.ndarray, errors: np.ndarray) -> None:
    """X over time and place: of the full model and of both forecasts; and their errors."""
    from matplotlib.figure import Figure  # here: it takes a second to load, and only one rank draws

    figure = Figure(figsize=(11, 3.2), layout="constrained")
    axes = figure.subplots(1, 4)
    times = np.arange(1, len(errors) + 1) * STEP
    titles = ("X of the full model", "with the network", "with a constant U")
    for one, title, index in zip(axes, titles, range(3), strict=False):
        one.imshow(fields[:, index].T, aspect="auto", origin="lower", extent=(0, SLOW, 0, times[-1]), vmin=-6, vmax=12)
        one.set(title=title, xlabel="place", ylabel="time")
    for label, error in zip(titles[1:], errors.T, strict=True):
        axes[3].plot(times, error, label=label)
    axes[3].set(title="root mean square error", xlabel="time")
    axes[3].legend(loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    """One rank of the job."""
    parser = argparse.ArgumentParser(description="A network in the place of the fast variables of a solver.")
    parser.add_argument("--exchanges", type=int, default=600, help="states that the network trains on")
    parser.add_argument("--forecast", type=int, default=400, help="steps of the forecasts; 4 or more")
    parser.add_argument("--output", type=Path, default=Path("runs/examples/closure.png"))
    options = parser.parse_args()
    world = MPI.COMM_WORLD
    if world.size < 2:
        raise SystemExit("start two ranks or more: half of them solve, the other half hold the network")
    torch.set_num_threads(1)
    with launch.split_world(color=int(world.rank >= world.size // 2)) as part:
        if part.color == 0:
            solve(part.comm, part.other, options.exchanges, options.forecast, options.output)
        else:
            serve(part.comm, part.other, options.exchanges, options.forecast)


if __name__ == "__main__":
    with launch.abort_on_error():
        main()
