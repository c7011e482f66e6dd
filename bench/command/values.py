"""Values of options: sizes such as 64M, lists of names, numbers within bounds.

Every function raises ValueError that names the option, its value, and what is valid.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_bytes(text: str) -> int:
    """Bytes from "4096", "64M" or "1.5GiB". K, M, G and T are powers of 1024. Raises ValueError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", text.strip().upper())
    if found is None:
        raise ValueError(f"{text!r} is not a size; valid: bytes, or a number with a unit, such as 32K, 64M, 1G")
    return int(float(found[1]) * UNITS[found[2]])


def size_of(option: str, text: str) -> int:
    """`parse_bytes` for the value of ``option``."""
    try:
        return parse_bytes(str(text))
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def listed(values: Sequence[str], choices: Sequence[str], option: str) -> list[str]:
    """Names separated by spaces or commas, without repetitions. choices: the valid names."""
    names = list(dict.fromkeys(name for value in values for name in value.split(",") if name))
    valid = ", ".join(choices)
    if unknown := [name for name in names if name not in choices]:
        raise ValueError(f"{option} {unknown[0]}: there is no such name; valid: {valid}")
    if not names:
        raise ValueError(f"{option}: no name is given; valid: {valid}")
    return names


def one_of(value: str, choices: Sequence[str], option: str) -> str:
    """``value`` if it is among ``choices``."""
    if value not in choices:
        raise ValueError(f"{option} {value}: there is no such name; valid: {', '.join(choices)}")
    return value


def check_least(given: Any, **least: int) -> None:
    """Check that numbers are not too small. given: the parsed arguments. least: the smallest valid value by name."""
    for name, smallest in least.items():
        value = getattr(given, name)
        if value < smallest:
            raise ValueError(f"{flag(name)} {value}: must be at least {smallest}")


def check_positive(given: Any, *names: str) -> None:
    """Check that numbers are finite and above 0. given: the parsed arguments."""
    for name in names:
        value = getattr(given, name)
        if not 0 < value < math.inf:
            raise ValueError(f"{flag(name)} {value}: must be a number above 0")


def flag(name: str) -> str:
    """The option of an attribute: ``--min-bytes`` for min_bytes."""
    return f"--{name.replace('_', '-')}"
