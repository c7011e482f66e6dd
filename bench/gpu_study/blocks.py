"""What one rank of a ring computes for attention on one GPU: blocks by the fused kernels, and by torch's operators.

A rank of n has 1/n of the positions, as zigzag chunks, and looks at the blocks of keys of all ranks. Here all blocks
lie on the GPU already, so nothing travels. The peer is torch's attention to the whole sequence, forward and backward,
divided by n. A rank would need that time if blocks cost nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu_study.flops import seconds
from bench.gpu_study.rows import RowFile
from bench.programs.driver import ContestError
from bench.timing.turns import Spread, ratio, take_turns
from commengine import Communicator
from commengine.options.parser import OneLineParser
from commengine.options.ranges import COUNT
from tplayers.context.blockwise import Blockwise
from tplayers.context.chunks import SequenceChunks

RANKS = (2, 4, 8)
HEADS, HEAD_SIZE, LENGTHS = 16, 128, (8192, 32768)
TINY_LENGTHS = (64,)
#: The operators keep a block's scores in float32, in several copies. Longer sequences are left to the kernels.
OPERATORS_UP_TO = 8192
#: of bf16 results against torch's attention to the whole sequence
TOLERANCE = 3e-2

_whole = functools.partial(F.scaled_dot_product_attention, is_causal=True)


def add_options(parser: OneLineParser) -> None:
    """The options of this study."""
    parser.add_argument("--rounds", type=int, valid=COUNT, default=5, help="rounds of each way")


def run(world: Communicator, given: Any) -> None:
    """Measure each length and number of ranks. Raises ContestError if a rank's result is not its part of the whole."""
    rows = RowFile(
        given, f"One rank's causal attention to a sequence that ranks share, bf16, on one {world.device.type} device",
        ["| length | ranks | blocks by | ms | over 1/ranks of torch's attention |", "|--:|--:|---|--:|--:|"],
        [f"1 sample, {HEADS} heads of {HEAD_SIZE}, forward and backward"],
    )  # fmt: skip
    for length in TINY_LENGTHS if given.tiny else LENGTHS:
        drawn = [torch.randn(1, HEADS, length, HEAD_SIZE, device=world.device).bfloat16() for _ in range(4)]
        q, k, v, grad = drawn
        with torch.no_grad():
            expected = _whole(q, k, v)
        whole = functools.partial(_pass_seconds, _whole, (q, k, v), grad)
        for ranks in RANKS:
            way = _last_ranks_way(ranks, k, v)
            mine = [way.chunks.take(x, way.rank, 2).contiguous() for x in drawn]
            with torch.no_grad():
                worst = float((_blocks(way, *mine[:3]) - way.chunks.take(expected, way.rank, 2)).abs().max())
            if worst > TOLERANCE:
                raise ContestError(f"{length} tokens, {ranks} ranks: the blocks' result is off by {worst:.2g}")
            part = functools.partial(_pass_seconds, functools.partial(_blocks, way), mine[:3], mine[3])
            turns = {"torch": whole, "kernels": part}
            if length <= OPERATORS_UP_TO:
                turns["operators"] = functools.partial(_by_operators, part)
            times = take_turns(turns, given.rounds)
            ideal = [one / ranks for one in times["torch"]]
            for name in (name for name in turns if name != "torch"):
                cells = [Spread.of(times[name]).text(2, 1e3), ratio(times[name], ideal).text()]
                numbers = {"length": length, "ranks": ranks, "way": name, "seconds": times[name], "ideal": ideal}
                rows.add([length, ranks, name, *cells], numbers)


class _AllHere:
    """A `BlockExchange` whose blocks have come already, and whose gradients nobody waits for."""

    def __init__(self, blocks: list[Tensor], rank: int) -> None:
        self._blocks, self._rank, self._total = blocks, rank, torch.zeros_like(blocks[0], dtype=torch.float32)

    def blocks(self, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
        for step in range(len(self._blocks)):
            owner = (self._rank - step) % len(self._blocks)
            yield owner, mine if step == 0 else self._blocks[owner]

    def add(self, owner: int, gradient: Tensor) -> None:
        self._total.add_(gradient)  # a ring adds what arrives to each gradient, too

    def total(self) -> Tensor:
        return self._total


def _last_ranks_way(ranks: int, k: Tensor, v: Tensor) -> Blockwise:
    """The last rank's. It has as much work as any other."""
    chunks = SequenceChunks(ranks, zigzag=True)
    blocks = [torch.stack((chunks.take(k, rank, 2), chunks.take(v, rank, 2))) for rank in range(ranks)]
    return Blockwise(chunks, ranks - 1, lambda: _AllHere(blocks, ranks - 1), True, 0.0)


def _blocks(way: Blockwise, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return way(q, k, v, None, None)


def _pass_seconds(attention: Callable[..., Tensor], inputs: tuple[Tensor, ...] | list[Tensor], grad: Tensor) -> float:
    leaves = [one.detach().requires_grad_() for one in inputs]

    def step() -> None:
        torch.autograd.grad(attention(*leaves), leaves, grad)

    return seconds(step, grad.device, 2, 5)


def _by_operators(part: Callable[[], float]) -> float:
    with mock.patch("tplayers.context.blocks.kernel_of", return_value=None):
        return part()
