"""The machine: its GPUs, the driver, and the versions of CUDA, CuPy and NCCL. It measures nothing."""

from __future__ import annotations

from typing import Any

import torch

from bench.command.files import add_files
from bench.command.machine import environment, heading
from bench.gpu_study.rows import RowFile
from trainers.options import OneLineParser


def add_options(parser: OneLineParser) -> None:
    """The options of this study."""
    parser.add_argument("--tiny", action="store_true", help="describe a machine without a GPU")
    add_files(parser)


def run(given: Any) -> None:
    """Print the machine, a row for each GPU."""
    result = environment("bench.gpu")
    rows = RowFile(
        heading("The machine", result), ["| GPU | | compute capability |", "|--:|---|---|"], result,
        output=given.output, json_file=given.json,
    )  # fmt: skip
    for index, name in enumerate(result["gpus"]):
        major, minor = torch.cuda.get_device_capability(index)
        rows.add(f"| {index} | {name} | {major}.{minor} |", {"gpu": name, "capability": f"{major}.{minor}"})
