"""Drawn programs for the recorded runs: which collectives follow each other, and how their data lie."""

from __future__ import annotations

import random
from dataclasses import dataclass

from .checking import NUMBERS

PRIVATE, IN_SLOT, PEER, WINDOW = (NUMBERS[name] for name in ("PRIVATE", "IN_SLOT", "PEER", "WINDOW"))
ALL_TO_ALL_V, ALL_GATHER_V, COMPARED = (NUMBERS[name] for name in ("ALL_TO_ALL_V", "ALL_GATHER_V", "COMPARED"))
#: the codes of protocol.pml by kind, through slots with 1 to 3 chunks
WINDOWS, SLOTS, ROOTS, TWICE = range(1, 7), range(7, 10), range(10, 16), range(16, 19)


@dataclass
class Call:
    """One collective. places, rows: of each rank's input. unfit: the rank that expects other numbers, or None."""

    code: int
    places: list[int]
    rows: list[list[int]]
    unfit: int | None


@dataclass
class Program:
    """The calls of all ranks. slots: whether private tensors go through slots; else they go by MPI."""

    ranks: int
    slots: bool
    calls: list[Call]


def drawn(seed: int, number: int, ranks: int) -> Program:
    """Return program ``number``: 2 to 4 calls."""
    chance = random.Random(f"{seed} {number} {ranks}")
    slots = chance.random() < 0.75
    calls = []
    for _ in range(chance.randint(2, 4)):
        private = [*(TWICE if ranks > 2 else SLOTS), *SLOTS, *ROOTS] if slots else [COMPARED] * 4
        code = chance.choice([*WINDOWS, *WINDOWS, *private, *[ALL_TO_ALL_V] * 5, *[ALL_GATHER_V] * 2])
        among = [WINDOW, IN_SLOT, PEER] if slots else [WINDOW, PRIVATE]
        few = among if code == ALL_TO_ALL_V else [WINDOW, WINDOW, PRIVATE]
        places = [chance.choice(few) for _ in range(ranks)]
        if chance.random() < 0.4:
            places = [places[0]] * ranks
        rows = [[chance.randint(5, 7) if place == PEER else chance.randint(1, 2) for _ in places] for place in places]
        unfit = chance.randrange(ranks) if chance.random() < 0.2 else None
        calls.append(Call(code, places, rows, unfit))
    return Program(ranks, slots, calls)
