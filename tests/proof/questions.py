"""What the model is asked: the properties, and each wait and fence left out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from .checking import NAMES, NUMBERS, Setting


class Question(NamedTuple):
    """A search. properties: what is asked, in words. name: of what is left out, or empty."""

    words: str
    ranks: int
    order: str
    setting: Setting
    name: str = ""

    @property
    def key(self) -> str:
        return f"{self.ranks} {self.order} {' '.join(map(str, self.setting))}"


#: the kinds of collectives of 2 ranks, by their codes
_KINDS = [*range(1, 16), 19, 20, 21]
#: those of one chunk
_SHORT = [kind for kind in _KINDS if kind not in (8, 9, 11, 12, 14, 15)]
#: those of 3 ranks without numbers of rows: the places of rows are too many
_OF_THREE = [1, 2, 3, 4, 5, 6, 7, 10, 13, 16, 21]


def properties() -> Iterator[Question]:
    """Yield the searches that must find no error. Those of equal words are parts of one, which needs less memory.

    What holds with the weak order holds on x86, whose runs are some of its runs.
    """
    without_rows = [*_SHORT[:-3], 21]
    yield Question("2 calls of any kinds, up to 3 chunks", 2, "x86", Setting())
    yield Question("memory is made, or not", 2, "weak", Setting(0, 7, 7, 2, 1, creation=1))
    yield Question("calls that differ or not, then a compared one, 1 chunk", 2, "weak", Setting(0, 0, 21, 2, 1, 1))
    for kind in without_rows:
        setting = Setting(first=kind, next=kind, most_chunks=1, death=1)
        yield Question("a rank may die, 2 equal calls without rows, 1 chunk", 2, "weak", setting)
    for kind in (20, 19):
        yield Question("a rank may die, 1 call with rows", 2, "weak", Setting(0, kind, 0, 1, 1, 0, 1))
    for kind in _KINDS[:-3]:
        yield Question("2 calls of any kinds, up to 3 chunks, the first without rows", 2, "weak", Setting(first=kind))
    for first, second in itertools.product(_OF_THREE, _OF_THREE):
        yield Question("2 calls without rows, 1 chunk", 3, "x86", Setting(0, first, second, 2, 1))
    yield Question("memory is made, or not", 3, "x86", Setting(0, 7, 0, 1, 1, creation=1))
    for kind in (20, 19):
        yield Question("1 call with rows", 3, "x86", Setting(0, kind, 0, 1))
    for kind in without_rows:
        yield Question("3 equal calls, 1 chunk", 2, "weak", Setting(0, kind, kind, 3, 1))
    for kind in (21, 20, 19):
        words = "2 calls of any kinds, up to 3 chunks, the first compared or with rows"
        yield Question(words, 2, "weak", Setting(first=kind))
    for kind in (21, 10, 7):
        yield Question("2 equal calls, 1 chunk", 3, "weak", Setting(0, kind, kind, 2, 1))


#: the collective in which a wait or a fence stands; all_reduce in a window else
_WHERE = {
    "SLOTS_BEGIN": "SLOTS", "FILLED_POST": "SLOTS", "FILLED_WAIT": "SLOTS", "POST_FENCE": "SLOTS",
    "REDUCED_POST": "SLOTS_TWICE", "REDUCED_WAIT": "SLOTS_TWICE", "REDUCE_SCATTER_END": "REDUCE_SCATTER",
    "ALL_GATHER_END": "ALL_GATHER", "GATHER_INTO_END": "GATHER_INTO", "BROADCAST_END": "BROADCAST",
    "BEGIN_UNEVEN_MEET": "ALL_TO_ALL_V", "ALL_TO_ALL_V_BEGIN": "ALL_TO_ALL_V", "ALL_TO_ALL_V_END": "ALL_TO_ALL_V",
    "ALL_TO_ALL_V_PEERS_END": "ALL_TO_ALL_V", "MEET_UNLESS_MEET": "ALL_GATHER_V", "ALL_GATHER_V_BEGIN": "ALL_GATHER_V",
    "ALL_GATHER_V_END": "ALL_GATHER_V",
}  # fmt: skip
_THREE_CHUNKS = ("FILLED_POST", "FILLED_WAIT", "POST_FENCE")

#: the fences that x86 does not need. Their lock stays: other processors need them (`weak`), and on x86 a copy may use
#: stores that go past the caches and leave in any order
ONLY_WEAK = ("MEET_FENCE", "POST_FENCE", "AWAIT_FENCE")


def left_out(order: str) -> Iterator[Question]:
    """Yield the searches that must find an error, on 2 ranks."""
    for name, number in NAMES.items():
        kind = NUMBERS[_WHERE.get(name, "ALL_REDUCE")] + 2 * (name in _THREE_CHUNKS)
        setting = Setting(number, kind, kind)
        if name == "ROUTES_BEGIN":
            setting = Setting(number, calls=1, differ=1)
        elif name.endswith("AGREES"):
            setting = Setting(number, NUMBERS["SLOTS"], NUMBERS["SLOTS"], creation=1)
        yield Question(f"without {name}", 2, order, setting, name)
