"""griffe: the lines ``name: text`` of a docstring become a list, so that a page shows one parameter a line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe

LINE = re.compile(r"(?P<names>\w+(?:, \w+)*): (?P<text>.*)")


class Parameters(griffe.Extension):
    """Rewrite the docstring of each class and function; the source files are left as they are."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Of a class the parameters of ``__init__`` and the attributes."""
        self._rewrite(cls, {*_parameters(cls), *cls.members, "forward"})

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Of a function its parameters."""
        self._rewrite(func, _parameters(func))

    def _rewrite(self, found: griffe.Class | griffe.Function, known: set[str]) -> None:
        if found.docstring is not None:
            found.docstring.value = "\n".join(listed(found.docstring.value.splitlines(), known))


def _parameters(found: griffe.Class | griffe.Function) -> set[str]:
    return {parameter.name for parameter in found.parameters}


def listed(lines: list[str], known: set[str]) -> Iterator[str]:
    """``lines``, where each line that begins with names out of ``known`` and a colon begins an item of a list."""
    in_list = False
    for number, line in enumerate(lines):
        match = LINE.fullmatch(line)
        if number and match and set(match["names"].split(", ")) <= known:
            if not in_list:
                yield ""
            in_list = True
            yield f"- **{match['names']}**: {match['text']}"
        elif in_list and line.strip():
            yield f"  {line.strip()}"  # the item goes on
        else:
            in_list = False
            yield line
