"""Calls the C++ solver of examples/bridge as its network does: ``bridge_caller.py WHAT POINTS STEPS``."""

import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from mpi4py import MPI

import tplayers
from commengine import Communicator, Decomposition, launch

WHAT, POINTS, STEPS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


def solver(u):
    """The steps of heat.cpp on the whole plate."""
    for _ in range(STEPS):
        wide = torch.nn.functional.pad(u, (1, 1, 1, 1))
        around = wide[2:, 1:-1] + wide[:-2, 1:-1] + wide[1:-1, 2:] + wide[1:-1, :-2]
        u = u + 0.1 * 0.5 * (around - 4 * u) - 0.1 * 0.3 * u**4
    return u


def loss_of(u):
    return torch.sin(3 * u).sum()


def gradient(bridge, comm, mine):
    """Against the same steps in torch, and against differences of the solver's own results."""
    torch.manual_seed(0)
    whole = torch.rand(POINTS, POINTS, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(loss_of(solver(whole)), whole)
    u = whole.detach()[mine].contiguous().requires_grad_()
    twice = bridge.call(torch.sin(bridge.call(u)))
    (alone,) = torch.autograd.grad(loss_of(bridge.call(u)), u)
    (found,) = torch.autograd.grad(loss_of(twice), u)
    (both,) = torch.autograd.grad(loss_of(solver(torch.sin(solver(whole)))), whole)
    way = torch.rand(POINTS, POINTS, dtype=torch.float64)[mine]
    sides = [float(loss_of(bridge.call(u.detach() + sign * 1e-5 * way))) for sign in (1, -1)]
    numbers = (
        float((alone - expected[mine]).abs().max()), float((found - both[mine]).abs().max()),
        sides[0] - sides[1], float((alone * way).sum()),
    )  # fmt: skip
    each = comm.mpi.allgather(numbers)
    difference, slope = (sum(one[n] for one in each) for n in (2, 3))
    if comm.rank == 0:
        print("ERRORS", max(one[0] for one in each), max(one[1] for one in each), difference / 2e-5 / slope - 1)


def memory():
    """Bytes of all processes of both programs on this machine."""
    found = subprocess.run(
        ["pgrep", "-f", f"heat {POINTS} {STEPS}|bridge_caller.py {WHAT}"], capture_output=True, text=True
    )
    total = 0
    for pid in found.stdout.split():
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * 4096
        except OSError:
            continue  # it has ended
    return total


def many(bridge, comm, mine):
    u = torch.rand(POINTS, POINTS, dtype=torch.float64)[mine].contiguous().requires_grad_()
    sizes = {}
    for number in range(1001):
        found = bridge.call(u)
        if number % 2:
            found.sum().backward()
        if number in (300, 1000):
            comm.barrier()
            sizes[number] = memory()
    if comm.rank == 0:
        print("GROWTH", sizes[1000] - sizes[300], sizes[300])


def wait_for_a_kill(bridge, comm, mine):
    u = torch.rand(POINTS, POINTS, dtype=torch.float64)[mine].contiguous()
    bridge.call(u)
    if comm.rank == 0:
        print("READY", os.getpid(), flush=True)
    while True:
        bridge.call(u)
        time.sleep(0.01)


def fail(bridge, comm, mine):
    bridge.call(torch.zeros(POINTS, POINTS, dtype=torch.float64)[mine].contiguous())
    if comm.rank == comm.size - 1:
        raise ArithmeticError("a rank that calls the solver has failed")
    bridge.call(torch.zeros(POINTS, POINTS, dtype=torch.float64)[mine].contiguous())


def leave(bridge, comm, mine):
    bridge.call(torch.zeros(POINTS, POINTS, dtype=torch.float64)[mine].contiguous())
    sys.exit(0)


def main():
    torch.set_num_threads(1)
    with launch.split_world() as part, Communicator(part.comm, device="cpu") as comm:
        blocks = Decomposition.even((POINTS, POINTS), (1, comm.size))
        field = tplayers.BridgeField(blocks)
        if WHAT == "other points":
            field = tplayers.BridgeField(Decomposition.even((POINTS, POINTS + 1), (1, comm.size)))
        if WHAT == "forget":
            tplayers.Bridge(part.other, comm, field, field).call(torch.zeros(field.local_shape(comm.rank)).double())
            return
        with tplayers.Bridge(part.other, comm, field, field) as bridge:
            globals()[WHAT](bridge, comm, blocks.slices((0, comm.rank)))


assert MPI.Is_initialized()
with launch.abort_on_error():
    main()
