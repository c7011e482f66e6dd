"""Measure one core of this machine: the device section of bench/clusters/this-machine.yaml.

    python -m bench.this_machine --output device.yaml

It runs matrix products and passes over memory in fp32 with one thread for about a second. Times are processor time,
because other programs may use the machine. The file's links come from the results of bench.overhead: alpha is the
engine's time at 8 bytes, beta the slope at the largest size.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.nn import functional as F

from bench.command.files import check_writable
from bench.command.machine import processor
from bench.command.parser import CommandParser, new_parser
from bench.command.start import run_alone, user_errors

COMMAND = "bench.this_machine"


def seconds(run: Callable[[], object], rounds: int = 15) -> float:
    """The least processor time of a call, which is the one that other programs disturbed least."""
    times = []
    for _ in range(rounds):
        began = time.thread_time()
        run()
        times.append(time.thread_time() - began)
    return min(times)


def parser() -> CommandParser:
    """The command line."""
    options = new_parser(COMMAND, __doc__)
    options.add_argument("--output", metavar="FILE", help="write the section to a YAML file")
    return options


def read(argv: Sequence[str] | None = None) -> Namespace:
    """The options. Raises ValueError that names the option at fault."""
    given = parser().parse_args(argv)
    check_writable(output=given.output)
    return given


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Returns the exit status."""
    with user_errors(COMMAND):
        given = read(argv)
    text = section()
    print(text)
    if given.output:
        Path(given.output).write_text(f"device:\n{text}\n", encoding="utf-8")
    return 0


def section() -> str:
    """The lines of the device section."""
    torch.set_num_threads(1)
    large, wide = torch.randn(1024, 1024), torch.randn(8 << 20)
    small, other = torch.randn(256, 256), torch.randn_like(wide)
    rows = torch.randn(1 << 13, 1024, requires_grad=True)
    out, product, tiny = torch.empty_like(wide), torch.empty_like(large), torch.zeros(1)
    peak = 2 * 1024**3 / seconds(lambda: torch.mm(large, large, out=product))
    at_256 = 2 * 256**3 / seconds(lambda: torch.mm(small, small, out=product[:256, :256]), 101)
    plain = 3 * 4 * wide.numel() / seconds(lambda: torch.add(wide, other, out=out))
    forward_s = seconds(lambda: F.layer_norm(rows, (1024,)))
    normal = F.layer_norm(rows, (1024,))
    gradient = torch.randn_like(normal)
    backward_s = seconds(lambda: torch.autograd.grad(normal, rows, gradient, retain_graph=True))
    forward, backward = 8 * rows.numel() / forward_s / plain, 12 * rows.numel() / backward_s / plain
    dispatch = seconds(lambda: [tiny.add_(1) for _ in range(1000)]) / 1000
    return (
        f"  name: one core of {processor()}\n"
        f"  peak_tflops: {peak / 1e12:.4f} # fp32, 1024 x 1024 x 1024; at 256 x 256 x 256: {at_256 / 1e12:.4f}\n"
        f"  memory_gb_per_s: {plain / 1e9:.1f} # add of 32 MB tensors\n"
        f"  layernorm_efficiency: [{min(forward, 1):.2f}, {min(backward, 1):.2f}] # of the add's\n"
        f"  dispatch_us: {dispatch * 1e6:.1f} # an in-place add of one element"
    )


if __name__ == "__main__":
    run_alone(main)
