"""The options of bench.gpu, but for those of each study. Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Callable

from bench.command.parser import new_parser
from commengine.options.parser import OneLineParser

#: the studies, each with the first line of its module's docstring
LINES = {
    "machine": "The machine: its GPUs, the driver, and the versions of CUDA, CuPy and NCCL. It measures nothing.",
    "flops": "FLOP/s of GPT training steps on one GPU in bf16, beside the FLOP/s of a matrix product on the same GPU.",
    "overhead": "An all-reduce of device tensors by the engine and by torch.distributed, both through NCCL.",
    "overlap": "All-reduces of device tensors beside matrix products, on the products' CUDA stream and on a stream "
    "of their own.",
    "profile": "A profile of one training step with dropout: how often the host waits for the device, and which "
    "kernels take longest.",
    "dropout": "What dropout costs a training step of one GPU: no dropout, that of the hidden states, and that of "
    "attention, too.",
    "blocks": "What one rank of a ring computes for attention on one GPU: blocks by the fused kernels, and by "
    "torch's operators.",
    "losses": "The verdict on training: the losses of runs that must agree, compared step by step.",
}


def gpu_parser(
    description: str | None, fill: Callable[[str, OneLineParser], object] = lambda name, own: None
) -> OneLineParser:
    """The command line: a subcommand for each study.

    description: the docstring of the command. fill: gives the parser of a study its options; ``--help`` of the command
    itself needs none of them.
    """
    options = new_parser("bench.gpu", description)
    studies = options.add_subparsers(dest="study", required=True, metavar="STUDY")
    for name, line in LINES.items():
        own = studies.add_parser(
            name, prog=f"{options.prog} {name}", help=line, formatter_class=options.formatter_class
        )  # fmt: skip
        fill(name, own)
    return options
