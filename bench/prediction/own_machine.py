"""Measure one core of this machine for the file that bench.predict takes as ``--cluster this-machine``.

`measured` runs matrix products and passes over memory in fp32 with one thread for about a second. Times are processor
time, because other programs may use the machine. The links follow from the results of bench.collectives --only
overhead: alpha is the engine's time at 8 bytes, beta the slope at the largest size. Without them the links are those of
bench/clusters/amd-epyc.yaml, and the machine's name says so.
"""

from __future__ import annotations

import datetime as dt
import os
import time
import timeit
from collections.abc import Callable
from pathlib import Path

import torch
import yaml

from bench.clusters.cluster import MEASURE, load
from bench.clusters.device_rates import measure_rates
from bench.command.machine import processor, usable_cores
from commengine import UsageError
from commengine.files.reading import InputFileError, fault_in, read_json

#: the machine whose links stand for those that are not measured
LIKE = "amd-epyc"


def seconds(run: Callable[[], object], rounds: int) -> float:
    """The least processor time of a call, which is the one that other programs disturbed least."""
    return min(timeit.repeat(run, timer=time.thread_time, repeat=rounds, number=1))


def measured(overhead: str | None) -> str:
    """Measure one core, and return the machine's file as YAML: one node, with a rank on each core of this process.

    overhead: the file for the links, of ``--only overhead``. Raises UsageError that names the file.
    """
    ranks = len(usable_cores())
    if overhead is None:
        like = load(LIKE)
        base, rate = 1e6 * like.base, 1 / (1e9 * like.machine.inside.beta)
        name, source = f"this machine, {ranks} cores; its links are not measured", f"not measured: of {LIKE}.yaml"
    else:
        base, rate, source = links(overhead)
        name = f"this machine, {ranks} cores"
    torch.set_num_threads(1)
    rates = measure_rates(seconds)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks
    data = {
        "name": name,
        "source": {
            "peak, product's start": "fp32 products of 1024 and of 256 rows and columns; their rate is the peak",
            "memory": "adds of 32 MB tensors; LayerNorm is its share of the adds' rate",
            "attention": "16 heads of 64, 512 positions; its share of the products' rate",
            "dispatch": "an in-place add of one element", "memory_gb": "the share of each rank",
            "links": source, "not measured": "cache; between, which is loopback TCP",
        },
        "device": {"name": f"one core of {processor()}"} | rates.section() | {
            "dispatch_us": round(1e6 * rates.dispatch, 1), "cache_gb_per_s": 100, "memory_gb": round(memory / 1e9, 2),
        },
        "node": {"ranks": ranks, "nics": 1},
        "collective_base_us": round(base, 2),
        "inside": {"alpha_us": 0, "gb_per_s": round(rate, 2)},
        "between": {"alpha_us": 30, "gb_per_s": 1},
        "overlap": False,
    }  # fmt: skip
    written = f"# Written by {MEASURE}, {dt.datetime.now(dt.UTC):%Y-%m-%d}, torch {torch.__version__}.\n"
    return written + yaml.safe_dump(data, sort_keys=False)


def links(overhead: str) -> tuple[float, float, str]:
    """A collective's least time in us, the rate of an all-reduce in GB/s, and their source, of ``--only overhead``.

    Raises UsageError, naming the file and the key.
    """
    try:
        data = read_json(Path(overhead))
    except InputFileError as error:
        raise UsageError(f"--overhead {error}") from error
    with fault_in(f"--overhead {overhead}: is not what bench.collectives --only overhead --json writes"):
        ranks, rows = data["ranks"], {row["bytes"]: float(row["commengine"]) for row in data["rows"]}
        size, least = max(rows), rows[min(rows)]
        sent = 2 * (ranks - 1) / ranks * size  # bytes of a ring's rank
        rate = sent / rows[size] / 1e3
        if not (0 < least < 1e9 and 0 < rate < 1e9):
            raise ValueError(f"{least} us and {rate} GB/s are no times of an all-reduce")
    took = f"{size} bytes in {rows[size] / 1e3:.1f} ms"
    return least, rate, f"bench.collectives --only overhead on {ranks} ranks: {took}"
