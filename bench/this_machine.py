"""Measure one core of this machine for bench/clusters/this-machine.yaml: ``python -m bench.this_machine``.

Prints the device section, from a second of matrix products and passes over memory in fp32 with one thread; processor
time, for the machine may be shared. The links are those of bench.overhead's results (alpha: the engine's time at 8
bytes; beta: its slope at the largest size).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

from bench.command.machine import processor


def seconds(run: Callable[[], object], rounds: int = 15) -> float:
    """The least processor time of a call: what it takes on a core of its own, as far as others let it be seen."""
    times = []
    for _ in range(rounds):
        began = time.thread_time()
        run()
        times.append(time.thread_time() - began)
    return min(times)


def main() -> None:
    """Measure and print."""
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
    print(
        f"  name: one core of {processor()}\n"
        f"  peak_tflops: {peak / 1e12:.4f} # fp32, 1024 x 1024 x 1024; at 256 x 256 x 256: {at_256 / 1e12:.4f}\n"
        f"  memory_gb_per_s: {plain / 1e9:.1f} # add of 32 MB tensors\n"
        f"  layernorm_efficiency: [{min(forward, 1):.2f}, {min(backward, 1):.2f}] # of the add's\n"
        f"  dispatch_us: {dispatch * 1e6:.1f} # an in-place add of one element"
    )


if __name__ == "__main__":
    main()
