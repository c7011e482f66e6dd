"""The list of a package's programs: ``python -m trainers`` and ``python -m bench`` print it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence


def answer(package: str, programs: Mapping[str, str], argv: Sequence[str] | None = None) -> int:
    """Print the programs of ``package``, or the one that is asked for. Returns the exit status.

    programs: a line about each, by its name.
    """
    words = sys.argv[1:] if argv is None else argv
    asked = words[0].removeprefix(f"{package}.") if words else ""
    if asked in programs:
        print(f"python -m {package}.{asked}: {programs[asked]}")
        return 0
    width = max(map(len, programs))
    for name, line in programs.items():
        print(f"python -m {package}.{name:{width}}  {line}")
    if not words or asked in ("-h", "--help"):
        return 0
    print(f"python -m {package}: error: {words[0][:100]}: there is no such program", file=sys.stderr)
    return 2
