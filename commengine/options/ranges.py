"""The valid values of options: ranges, and the types that name them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from commengine.errors import UsageError


class OptionError(UsageError, ValueError):
    """The error of a command line that cannot be parsed, or of a value that is out of range. It is one line."""


@dataclass(frozen=True)
class ValidRange:
    """The valid values of an option. ``text`` ends the error message about any other value."""

    holds: Callable[[Any], bool]
    text: str


AT_LEAST_ONE = ValidRange(lambda value: value >= 1, "must be at least 1")
NOT_NEGATIVE = ValidRange(lambda value: 0 <= value < math.inf, "must not be negative, and finite")
NOT_EMPTY = ValidRange(lambda text: text.strip() != "", "must not be empty: is a variable of the shell not set?")
FRACTION = ValidRange(lambda value: 0 <= value < 1, "must be at least 0 and below 1")
OPEN_FRACTION = ValidRange(lambda value: 0 < value < 1, "must be a number above 0 and below 1")
ABOVE_ZERO = ValidRange(lambda value: 0 < value < math.inf, "must be a number above 0, and finite")
#: of every option that is an integer: what a 64-bit number holds
_LARGEST = 2**63 - 1


def between(least: float, most: float) -> ValidRange:
    """The numbers from ``least`` to ``most``."""
    return ValidRange(lambda value: least <= value <= most, f"must be at least {least}, and at most {most}")


def at_least(least: float) -> ValidRange:
    """The finite numbers from ``least`` on."""
    return ValidRange(lambda value: least <= value < math.inf, f"must be at least {least}")


#: of steps, rounds and the like; of seeds; of seconds
COUNT = between(1, 10**6)
SEED = NOT_NEGATIVE
#: of a model and its batches: far above all that is trained, and far below what no memory holds
LAYERS, HEADS, WIDTH, LENGTH = between(1, 2**14), between(1, 2**16), between(1, 2**20), between(1, 2**24)
EXPERTS = between(1, 2**12)
VOCABULARY, BATCH = between(1, 2**24), between(1, 2**31)
SECONDS = ValidRange(lambda value: 0 < value <= 10**6, "must be a number above 0, and at most 1000000")

#: the types of options: a type says which values are valid
AtLeastOne = Annotated[int, AT_LEAST_ONE]
Batch = Annotated[int, BATCH]
Count = Annotated[int, COUNT]
Heads = Annotated[int, HEADS]
Layers = Annotated[int, LAYERS]
Experts = Annotated[int, EXPERTS]
Length = Annotated[int, LENGTH]
Natural = Annotated[int, NOT_NEGATIVE]
NotNegative = Annotated[float, NOT_NEGATIVE]
Positive = Annotated[float, ABOVE_ZERO]
Seed = Annotated[int, SEED]
Share = Annotated[float, FRACTION]
Text = Annotated[str, NOT_EMPTY]
Vocabulary = Annotated[int, VOCABULARY]
Width = Annotated[int, WIDTH]


def require_range(name: str, value: Any, ranges: Sequence[ValidRange]) -> None:
    """Raise OptionError, which begins with ``name``, unless ``value`` is in all ranges. None is in all."""
    for valid in ranges if value is not None else ():
        if not valid.holds(value):
            raise OptionError(f"{name}: {valid.text}")
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise OptionError(f"{name}: must be below 2**63")


def divisors(number: int) -> list[int]:
    """The positive divisors of ``number``, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]
