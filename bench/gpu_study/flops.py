"""FLOP/s of GPT training steps on one GPU in bf16, beside the FLOP/s of a matrix product on the same GPU.

A step is the forward pass, the loss and the backward pass of one micro-batch, without an optimizer. Attention is
PyTorch's flash attention, because there is no dropout. Each model runs eagerly and compiled. FLOPs are those of the
matrix products (`tplayers.formulas.model_flops`), without recomputation. The ceiling is a bf16 product of 8192 x 8192
matrices.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.gpu_study.rows import RowFile, finish
from commengine import Communicator
from commengine.options.parser import OneLineParser
from tplayers.formulas import model_flops
from tplayers.models.gpt import GPT, GPTConfig

#: name: layers, hidden size, heads, micro-batch (Shoeybi et al. 2019, table 1)
MODELS = {"355M": (24, 1024, 16, 8), "1.2B": (40, 1536, 16, 4)}
LENGTH = 1024
SIDE = 8192
#: a model, a length and a product that a CPU computes in seconds
TINY_MODELS, TINY_LENGTH, TINY_SIDE = {"tiny": (2, 64, 4, 2)}, 32, 256


def add_options(parser: OneLineParser) -> None:
    """The options of this study."""
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="(default: all)")
    parser.add_argument("--eager-only", action="store_true", help="leave out the compiled models")


def seconds(call: Callable[[], object], device: torch.device, warm: int, count: int) -> float:
    """The median time of ``count`` calls after ``warm`` others. A call ends when the device has finished it."""
    times = []
    for _ in range(warm + count):
        start = time.perf_counter()
        call()
        finish(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[warm:])


def ceiling(device: torch.device, side: int) -> float:
    """FLOP/s of a bf16 product of two matrices [side, side]."""
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * side**3 / seconds(lambda: left @ right, device, 5, 20)


def drawn_model(world: Communicator, config: GPTConfig) -> GPT:
    """A model in bf16 on the device, with drawn parameters."""
    model = GPT(config, world).to(world.device, torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02)
    return model


def model_speed(world: Communicator, config: GPTConfig, batch: int, length: int, compiled: bool) -> float:
    """FLOP/s of a training step."""
    model = drawn_model(world, config)
    forward = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model
    tokens = torch.randint(config.vocab_size, (batch, length), device=world.device)

    def step() -> None:
        model.zero_grad(set_to_none=False)
        forward(tokens, tokens).float().mean().backward()

    return model_flops(config.cost_shape(length), batch) / seconds(step, world.device, 5, 15)


def run(world: Communicator, given: Any) -> None:
    """Measure each model, eager and compiled. Each row is written when it is measured."""
    chosen = {name: MODELS[name] for name in given.models}
    models, length, side = (TINY_MODELS, TINY_LENGTH, TINY_SIDE) if given.tiny else (chosen, LENGTH, SIDE)
    best = ceiling(world.device, side)
    rows = RowFile(
        given, f"Training steps of one {world.device.type} device, bf16",
        ["| model | micro-batch | | TFLOP/s | of the ceiling |", "|---|--:|---|--:|--:|"],
        [f"ceiling: {best / 1e12:.3g} TFLOP/s, a product of {side} x {side} matrices"], ceiling_flops=best,
    )  # fmt: skip
    for name, (layers, hidden, heads, batch) in models.items():
        config = GPTConfig(layers, hidden, heads, 50257, length, hidden_dropout=0.0, attention_dropout=0.0)
        for compiled in (False,) if given.eager_only else (False, True):
            numbers: dict[str, Any] = {"model": name, "micro_batch": batch, "compiled": compiled}
            try:
                speed = model_speed(world, config, batch, length, compiled)
            except RuntimeError as error:  # out of memory, or no compiler: the other rows still count
                numbers["error"] = str(error).splitlines()[0]
                cells = [f"{type(error).__name__}: {numbers['error']}", ""]
            else:
                cells = [f"{speed / 1e12:.3g}", f"{speed / best:.0%}"]
                numbers["flops"] = speed
            rows.add([name, batch, "compiled" if compiled else "eager", *cells], numbers)
            torch.compiler.reset()
