"""Values of options: sizes such as 64M."""

from __future__ import annotations

import re

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
