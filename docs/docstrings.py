"""Docstrings as reStructuredText. They are plain text with backticks, lines ``name: text``, bullets, tables, code."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

NAMED = re.compile(r"(?P<names>\w+(?:, \w+)*): (?P<text>.*)")
BULLET = re.compile(r"(?:-|\d+\.) ")
RULE = re.compile(r"\|(?:-+\|)+")
#: what keeps its stars: inline code, which may go over lines, and words of one emphasis
KEPT = re.compile(r"``.+?``|`[^`]+`|(?<![\w*])\*\w(?:[^*`\n]*\w)?\*(?![\w*])", re.DOTALL)


def rst(lines: list[str], known: Collection[str]) -> Iterator[str]:
    """``lines``, where a line that begins with names out of ``known`` and a colon begins an item of a list."""
    kept = KEPT.sub(lambda found: found[0].replace("*", "\0").replace("_", "\1"), "\n".join(lines))
    for line in _blocks(kept.split("\n"), known):
        yield line.replace("\0", "*").replace("\1", "_")


def _blocks(lines: list[str], known: Collection[str]) -> Iterator[str]:
    state = ""  # nothing, or the block that the line before belongs to
    for number, line in enumerate(lines):
        named = NAMED.fullmatch(line)
        if not line.strip():
            yield line
            if state != "code":
                state = ""
        elif line.startswith("    ") and state in ("", "code") and number:
            if state != "code":
                yield from ("::", "")
            state = "code"
            yield line
        elif number and named and {name.replace("\1", "_") for name in named["names"].split(", ")} <= set(known):
            if state != "named":
                yield ""
            state = "named"
            yield f"- **{named['names']}**: {_plain(named['text'])}"
        elif state == "named":
            yield f"  {_plain(line.strip())}"  # the item goes on
        elif line.startswith("|"):
            if state != "table":
                yield from ("", ".. list-table::", "   :header-rows: 1", "")
            state = "table"
            if not RULE.fullmatch(line):
                for column, cell in enumerate(line.strip("|").split("|")):
                    yield f"   {' ' if column else '*'} - {_plain(cell.strip())}"
        elif BULLET.match(line):
            if state != "bullets":
                yield ""
            state = "bullets"
            yield _plain(line)
        elif state == "bullets" and line.startswith(" "):
            yield _plain(line)
        else:
            if state not in ("", "text"):
                yield ""
            state = "text"
            yield _plain(line.strip())


def _plain(text: str) -> str:
    """``text`` in which no sign has a meaning but backticks and emphasis."""
    return re.sub(r"[*|\\]|(?<=\w)_(?!\w)", r"\\\g<0>", text)
