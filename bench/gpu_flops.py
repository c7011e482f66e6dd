"""FLOP/s of GPT training steps on one GPU, bf16, against the ceiling that a matrix product reaches there.

    python -m bench.gpu_flops --output bench/results/gpu_flops.md

A step is forward, loss and backward of one micro-batch (no optimizer), flash attention and no dropout, eager and
compiled. FLOPs are those of the matrix products, 72 b s l h^2 (1 + s / 6h + V / 12lh): Narayanan et al. 2021, section
5.1, without recomputation. The ceiling is a bf16 product of 8192 x 8192 matrices.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.command.machine import environment, heading
from commengine import Communicator, launch
from tplayers.models.gpt import GPT, GPTConfig

#: name: layers, hidden size, heads, micro-batch (Shoeybi et al. 2019, table 1)
MODELS = {"355M": (24, 1024, 16, 8), "1.2B": (40, 1536, 16, 4)}
LENGTH = 1024


def flops(config: GPTConfig, batch: int, length: int) -> float:
    """Of one step's matrix products."""
    layers, hidden = config.num_layers, config.hidden_size
    rest = length / (6 * hidden) + config.padded_vocab_size / (12 * layers * hidden)
    return 72 * batch * length * layers * hidden**2 * (1 + rest)


def seconds(call: Callable[[], object], device: torch.device, warm: int, count: int) -> float:
    """Median of ``count`` calls after ``warm`` ones, each until the device is done."""
    times = []
    for _ in range(warm + count):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[warm:])


def ceiling(device: torch.device, side: int) -> float:
    """FLOP/s of a bf16 product."""
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * side**3 / seconds(lambda: left @ right, device, 5, 20)


def model_speed(world: Communicator, config: GPTConfig, batch: int, length: int, compiled: bool) -> float:
    """FLOP/s of a step."""
    model = GPT(config, world).to(world.device, torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02)
    forward = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model
    tokens = torch.randint(config.vocab_size, (batch, length), device=world.device)

    def step() -> None:
        model.zero_grad(set_to_none=False)
        forward(tokens, tokens).float().mean().backward()

    return flops(config, batch, length) / seconds(step, world.device, 5, 15)


def main(world: Communicator) -> None:
    """Measure, print and write."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tiny", action="store_true", help="two layers of 64, to try the program without a GPU")
    options.add_argument("--output", type=Path, help="write the table as markdown")
    arguments = options.parse_args()
    result = environment("bench.gpu_flops")
    models, length, side = ({"tiny": (2, 64, 4, 2)}, 32, 256) if arguments.tiny else (MODELS, LENGTH, 8192)
    best = ceiling(world.device, side)
    lines = heading(f"Training steps of one {world.device.type} device, bf16", result)
    lines += ["", f"ceiling: {best / 1e12:.3g} TFLOP/s, a product of {side} x {side} matrices", ""]
    lines += ["| model | micro-batch | | TFLOP/s | of the ceiling |", "|---|--:|---|--:|--:|"]
    for name, (layers, hidden, heads, batch) in models.items():
        config = GPTConfig(layers, hidden, heads, 50257, length, hidden_dropout=0.0, attention_dropout=0.0)
        for compiled in (False, True):
            try:
                speed = model_speed(world, config, batch, length, compiled)
            except RuntimeError as error:  # out of memory, or no compiler: the other rows still count
                cells = f"{type(error).__name__}: {str(error).splitlines()[0]} | "
            else:
                cells = f"{speed / 1e12:.3g} | {speed / best:.0%}"
            lines.append(f"| {name} | {batch} | {'compiled' if compiled else 'eager'} | {cells} |")
            torch.compiler.reset()
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    launch.run(main, device="cuda" if torch.cuda.is_available() else "cpu")
