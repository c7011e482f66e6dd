"""Values of options: sizes such as 64M, and lists of names.

Every function raises ValueError that names the option, its value, and what is valid.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_bytes(text: str) -> int:
    """Bytes from "4096", "64M" or "1.5GiB". K, M, G and T are powers of 1024. Raises ValueError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", text.strip().upper())
    if found is None:
        raise ValueError(f"{text[:200]!r} is not a size; valid: bytes, or a number with a unit, such as 32K, 64M, 1G")
    size = float(found[1]) * UNITS[found[2]]
    if size >= 2**63:
        raise ValueError(f"{text[:40]!r} is more than any memory holds; valid: below 2**63 bytes")
    return int(size)


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


def flag(name: str) -> str:
    """The option of an attribute: ``--min-bytes`` for min_bytes."""
    return f"--{name.replace('_', '-')}"
