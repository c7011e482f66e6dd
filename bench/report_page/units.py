"""The units of the numbers in JSON files, by the names of their columns; one SI prefix for each column."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from bench.collective_study.tables import size_label

from .tables import TableCell, text_cell

#: units by the words of a column's name, the first that is there: bytes are sizes, and shares percentages
UNITS = (
    ("flops_per_device", "FLOP/s"), ("peak_flops", "FLOP/s"), ("bandwidth", "B/s"), ("algbw", "B/s"), ("busbw", "B/s"),
    ("bytes", "B"), ("memory", "B"), ("seconds", "s"), ("exposed", "s"), ("skew", "s"), ("ci", "s"), ("share", "%"),
    ("efficiency", "%"),
)  # fmt: skip
PREFIXES = {-9: "n", -6: "u", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P"}


def unit_of(name: str) -> str:
    """The unit of a column, "" where there is none: s, B, B/s, FLOP/s or %. ``step_s`` and ``seconds_p50`` are s."""
    if name.endswith("_s"):
        return "s"
    words = name.split("_")
    return next((unit for key, unit in UNITS if key in words or ("_" in key and name.endswith(key))), "")


def column(name: str, values: Sequence[Any]) -> tuple[str, list[TableCell], bool]:
    """A column of JSON values: its heading with the unit, its cells, and whether they are numbers.

    Times and rates have one SI prefix, that of the median; sizes have units of powers of 1024, as in the pictures.
    """
    unit = unit_of(name)
    numbers = [float(one) for one in values if is_number(one)]
    plain = all(is_number(one) or one is None for one in values) and bool(numbers)
    if not plain:
        return name, [text_cell("" if one is None else one) for one in values], False
    if unit == "B":
        return f"{name}, size", [_sized(one) for one in values], True
    if unit == "%":
        return f"{name}, %", [_scaled(one, 0.01) for one in values], True
    if not unit:
        return name, [_scaled(one, 1.0) for one in values], True
    power = prefix(numbers)
    return f"{name}, {PREFIXES[power]}{unit}", [_scaled(one, 10.0**power) for one in values], True


def prefix(numbers: Sequence[float]) -> int:
    """The power of ten, a multiple of three, that leaves the median one to three digits before the point."""
    known = [abs(one) for one in numbers if one and math.isfinite(one)]
    if not known:
        return 0
    power = 3 * math.floor(math.log10(statistics.median(known) * (1 + 1e-12)) / 3)
    return min(max(power, min(PREFIXES)), max(PREFIXES))


def with_prefix(value: float, unit: str) -> str:
    """A number with four digits and its unit, such as 1.25 MB/s."""
    power = prefix([value])
    return f"{number(value / 10.0**power)} {PREFIXES[power]}{unit}"


def number(value: float) -> str:
    """Four digits, without a power of ten where the number is large."""
    if isinstance(value, int) or float(value).is_integer():
        return f"{value:,.0f}" if abs(value) < 1e15 else f"{value:.4g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _sized(value: Any) -> TableCell:
    if value is None:
        return text_cell("")
    return text_cell(size_label(value) if float(value).is_integer() else f"{number(value)} B", float(value))


def _scaled(value: Any, scale: float) -> TableCell:
    return text_cell("") if value is None else text_cell(number(value / scale if scale != 1.0 else value), float(value))
