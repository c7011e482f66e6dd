"""The options of the two all-reduce programs that bench.gpu compares."""

from __future__ import annotations

import argparse


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser of the size of the all-reduce and of the number of calls."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--bytes", type=int, default=1 << 20, help="of the tensor, fp32")
    options.add_argument("--calls", type=int, default=100, help="per step")
    return options
