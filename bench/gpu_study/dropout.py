"""What dropout costs a training step of one GPU: no dropout, that of the hidden states, and that of attention, too.

A step is that of `bench.gpu flops`, run eagerly, in rounds that alternate. In "operators" torch's operators draw the
masks, as where CuPy is missing; otherwise one kernel does (`tplayers.dropout_kernel`). Both must give the same loss.
"""

from __future__ import annotations

import functools
from typing import Any, Literal
from unittest import mock

import torch

from bench.gpu_study.flops import LENGTH, MODELS, TINY_LENGTH, TINY_MODELS, drawn_model, seconds
from bench.gpu_study.rows import RowFile
from bench.programs.driver import ContestError
from bench.timing.turns import Spread, ratio, take_turns
from commengine import Communicator
from commengine.options.parser import OneLineParser
from commengine.options.ranges import COUNT
from tplayers import Randomness
from tplayers.dropout_kernel import drawn_mask
from tplayers.models.gpt import GPT, GPTConfig

WAYS = ("kernel", "operators")
#: of the hidden states, of attention, and how attention's mask is drawn
DROPOUTS: tuple[tuple[float, float, Literal["position", "fused"]], ...] = (
    (0.0, 0.0, "position"), (0.1, 0.0, "position"), (0.1, 0.1, "position"), (0.1, 0.1, "fused"),
)  # fmt: skip


def add_options(parser: OneLineParser) -> None:
    """The options of this study."""
    parser.add_argument("--rounds", type=int, valid=COUNT, default=5, help="rounds of each way")


def run(world: Communicator, given: Any) -> None:
    """Measure each dropout, with the kernel and without it. Raises ContestError if their losses differ."""
    name = next(iter(TINY_MODELS if given.tiny else MODELS))
    layers, hidden, heads, batch = (TINY_MODELS if given.tiny else MODELS)[name]
    length, vocabulary = (TINY_LENGTH, 512) if given.tiny else (LENGTH, 50257)
    rows = RowFile(
        given, f"Dropout in a training step of {name} on one {world.device.type} device, bf16, eager",
        ["| hidden | attention | mask | drawn by | ms a step | over operators |", "|--:|--:|---|---|--:|--:|"],
        [f"micro-batch {batch}, {length} tokens a sample"],
    )  # fmt: skip
    tokens = torch.randint(vocabulary, (batch, length), device=world.device)
    randomness = Randomness(1, 0, tuple(range(batch)), device=world.device)
    for of_hidden, of_attention, mask in DROPOUTS:
        config = GPTConfig(
            layers, hidden, heads, vocabulary, length, hidden_dropout=of_hidden, attention_dropout=of_attention,
            attention_dropout_mask=mask,
        )  # fmt: skip
        model = drawn_model(world, config)
        losses: set[float] = set()
        step = functools.partial(_step_seconds, model, tokens, randomness, losses)
        times = take_turns({way: functools.partial(step, way) for way in WAYS}, given.rounds)
        if len(losses) > 1:
            raise ContestError(f"the kernel's masks give another loss than the operators': {sorted(losses)}")
        for way, taken in times.items():
            cells = [Spread.of(taken).text(1, 1e3), ratio(taken, times["operators"]).text()]
            numbers = {"hidden": of_hidden, "attention": of_attention, "mask": mask, "way": way, "seconds": taken}
            rows.add([of_hidden, of_attention, mask, way, *cells], numbers)


def _step_seconds(model: GPT, tokens: torch.Tensor, randomness: Randomness, losses: set[float], way: str) -> float:
    """The seconds of a step in which ``way`` draws the masks. Adds its loss to ``losses``."""

    def step() -> torch.Tensor:
        model.zero_grad(set_to_none=False)
        loss: torch.Tensor = model(tokens, tokens, randomness).float().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    if way == "kernel" and tokens.is_cuda and drawn_mask(randomness.base, 1, 1, 0, 0) is None:
        raise ContestError("CuPy, which makes the kernel, is missing or cannot compile it")
    with mock.patch("tplayers.rng.drawn_mask", drawn_mask if way == "kernel" else lambda *_: None):
        losses.add(float(step()))
        return seconds(step, tokens.device, 2, 5)
