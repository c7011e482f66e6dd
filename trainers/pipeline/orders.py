"""Orders: what a pipeline stage computes, one action after the other (Narayanan et al. 2021, section 2.2, Figure 4).

p: the stages, i: the number of one of them, m: micro-batches, v: chunks of layers that a rank has. Chunk c of rank i is
the virtual stage c p + i: the first chunks of all ranks come before the second ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple


class Action(NamedTuple):
    """The forward, or the backward, of one chunk for one micro-batch."""

    backward: bool
    microbatch: int
    chunk: int

    def __str__(self) -> str:
        return f"{'backward' if self.backward else 'forward'} of micro-batch {self.microbatch}, chunk {self.chunk}"


def order(stage: int, stages: int, microbatches: int, chunks: int = 1) -> list[Action]:
    """The actions of rank ``stage``: 1F1B, or with several chunks interleaved 1F1B.

    After its first forwards a rank does one forward and one backward in turn, and at the end the backwards that are
    left. There are p - i - 1 first forwards, or 2 (p - i - 1) + (v - 1) g if chunks are interleaved. Micro-batches then
    go through the chunks in groups of g, which is p, or more where p does not divide m.

    Raises ValueError if there are several chunks and fewer micro-batches than stages.
    """
    groups = _groups(stages, microbatches, chunks)
    forwards = [Action(False, one, chunk) for group in groups for chunk in range(chunks) for one in group]
    backwards = [Action(True, one, chunk) for group in groups for chunk in reversed(range(chunks)) for one in group]
    first = stages - stage - 1 if chunks == 1 else 2 * (stages - stage - 1) + (chunks - 1) * len(groups[0])
    first = min(first, len(forwards))
    found = forwards[:first]
    for forward, backward in zip(forwards[first:], backwards, strict=False):
        found += [forward, backward]
    return found + backwards[len(forwards) - first :]


def forwards(stages: int, microbatches: int, chunks: int = 1) -> list[Action]:
    """The actions of every rank in a pass without backwards, of any number of micro-batches."""
    groups = _groups(stages, microbatches, chunks) if microbatches >= stages else [range(microbatches)]
    return [Action(False, one, chunk) for group in groups for chunk in range(chunks) for one in group]


def in_turn(orders: Sequence[Sequence[Action]]) -> list[tuple[int, Action]]:
    """(Rank, action) for all actions of a pass, one after the other: each comes after the ones whose results it needs.

    orders: the actions of each rank. Among those that could come next, every rank does one in turn.
    """
    stages = len(orders)
    last = stages * (1 + max((action.chunk for order in orders for action in order), default=0)) - 1
    left, done, found = [list(reversed(order)) for order in orders], set(), []
    while any(left):
        for rank, actions in enumerate(left):
            if not actions:
                continue
            backward, microbatch, chunk = actions[-1]
            virtual = chunk * stages + rank
            first = virtual == (last if backward else 0)
            if first or (backward, microbatch, virtual + (1 if backward else -1)) in done:
                done.add((backward, microbatch, virtual))
                found.append((rank, actions.pop()))
    return found


def _groups(stages: int, microbatches: int, chunks: int) -> Sequence[range]:
    """The micro-batches that go through all chunks before the next ones start: p of them, or nearly so."""
    if chunks == 1:
        return [range(microbatches)]
    if microbatches < stages:
        raise ValueError(f"{microbatches} micro-batches are fewer than the {stages} stages, which interleaving needs")
    count = microbatches // stages
    bounds = [-(-number * microbatches // count) for number in range(count + 1)]  # the larger groups first
    return [range(low, high) for low, high in itertools.pairwise(bounds)]
