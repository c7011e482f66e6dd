"""What both contestants of bench.gpu_overhead are told."""

from __future__ import annotations

import argparse


def parser(description: str | None) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--bytes", type=int, default=1 << 20, help="of the tensor, fp32")
    options.add_argument("--calls", type=int, default=100, help="per step")
    return options
