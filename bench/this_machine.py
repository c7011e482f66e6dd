"""Measure one core of this machine, and write the file that bench.predict takes as ``--cluster this-machine``.

    mpirun -n 2 python -m bench.overhead --json overhead.json
    python -m bench.this_machine --overhead overhead.json --output this-machine.yaml

It runs matrix products and passes over memory in fp32 with one thread for about a second. Times are processor time,
because other programs may use the machine. The links follow from the results of bench.overhead: alpha is the engine's
time at 8 bytes, beta the slope at the largest size. Without them the links are those of bench/clusters/amd-epyc.yaml,
and the machine's name says so.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from bench.clusters.cluster import OWN_FILE, load
from bench.command.files import check_writable
from bench.command.machine import processor
from bench.command.parser import CommandParser, new_parser
from bench.command.start import user_errors
from commengine import UsageError
from trainers.files.reading import InputFileError, read_json

COMMAND = "bench.this_machine"

#: the machine whose links stand for those that are not measured
LIKE = "amd-epyc"


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
    options.add_argument("--output", metavar="FILE", help=f"write the YAML file, such as {OWN_FILE}")
    options.add_argument(
        "--overhead",
        metavar="FILE",
        help=f"what bench.overhead --json wrote on this machine: the links (default: those of {LIKE}.yaml)",
    )
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
        found = links(given.overhead)
    text = machine(section(), found)
    print(text, end="")
    if given.output:
        Path(given.output).write_text(text, encoding="utf-8")
    return 0


@dataclass(frozen=True)
class Links:
    """A collective's least time in us, the rate of an all-reduce in GB/s, and their source; known: it is measured."""

    base_us: float
    gb_per_s: float
    source: str
    known: bool


def links(overhead: str | None) -> Links:
    """The links from a result of bench.overhead, or those of LIKE. Raises UsageError, naming the file and the key."""
    if overhead is None:
        like = load(LIKE)
        return Links(
            1e6 * like.base, 1 / (1e9 * like.machine.inside.beta), f"not measured: of {LIKE}.yaml", known=False
        )
    try:
        data = read_json(Path(overhead))
        ranks, rows = data["ranks"], {row["bytes"]: float(row["commengine"]) for row in data["rows"]}
        size, least = max(rows), rows[min(rows)]
        sent = 2 * (ranks - 1) / ranks * size  # bytes of a ring's rank
        rate = sent / rows[size] / 1e3
        if not (0 < least < 1e9 and 0 < rate < 1e9):
            raise ValueError(f"{least} us and {rate} GB/s are no times of an all-reduce")
    except InputFileError as error:
        raise UsageError(f"--overhead {error}") from error
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UsageError(f"--overhead {overhead}: is not what bench.overhead --json writes ({error!r})") from error
    return Links(least, rate, f"bench.overhead on {ranks} ranks: {size} bytes in {rows[size] / 1e3:.1f} ms", known=True)


def machine(device: str, found: Links) -> str:
    """The whole file: a machine of one node, with a rank on each core that this process may use."""
    ranks = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks
    name = f"this machine, {ranks} cores{'' if found.known else '; its links are not measured'}"
    return (
        f"# Written by python -m {COMMAND}, {dt.datetime.now(dt.UTC):%Y-%m-%d}, torch {torch.__version__}.\n"
        f"name: {json.dumps(name)}\n"
        f"device:\n{device}\n"
        "  gemm_efficiency: 1.0 # the peak is what a product reached\n"
        "  units: 1\n"
        "  tiles: [[16, 16]] # no waves; a register block\n"
        "  cache_gb_per_s: 100 # not measured\n"
        f"  memory_gb: {memory / 1e9:.2f} # of {ranks} ranks, each has a share\n"
        "  memory_efficiency: 1.0\n"
        "  latency_us: 0\n"
        "  launch_us: 0\n"
        "  random_state_us: 0\n"
        "  element_bytes: 4\n"
        "  kernels: fused\n"
        "node:\n"
        f"  ranks: {ranks}\n"
        "  nics: 1\n"
        f"collective_base_us: {found.base_us:.2f} # {found.source}\n"
        "inside:\n"
        "  alpha_us: 0\n"
        f"  gb_per_s: {found.gb_per_s:.2f} # {found.source}\n"
        "between: # not measured: loopback TCP\n"
        "  alpha_us: 30\n"
        "  gb_per_s: 1\n"
        "overlap: false\n"
    )


def section() -> str:
    """The lines of the device section that are measured."""
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
        f"  name: {json.dumps(f'one core of {processor()}')}\n"
        f"  peak_tflops: {peak / 1e12:.4f} # fp32, 1024 x 1024 x 1024; at 256 x 256 x 256: {at_256 / 1e12:.4f}\n"
        f"  memory_gb_per_s: {plain / 1e9:.1f} # add of 32 MB tensors\n"
        f"  layernorm_efficiency: [{min(forward, 1):.2f}, {min(backward, 1):.2f}] # of the add's\n"
        f"  dispatch_us: {dispatch * 1e6:.1f} # an in-place add of one element"
    )


if __name__ == "__main__":
    sys.exit(main())
