"""The pages of the repository, and what stands in them: blocks of code, commands, links, inline code."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from commengine.command.table import command_of
from tests.support.mpirun import ROOT

PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
LANGUAGES = ("sh", "python", "c", "cpp", "fortran", "text", "yaml")
LAUNCHERS = ("mpirun", "mpiexec", "srun")
#: inline code that begins with one of these is a command
PROGRAMS = ("mpirun ", "mpiexec ", "srun ", "python ", "make ", "pip ", "commengine ")

_FENCE = re.compile(r"^```(?P<language>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of code. language: the first word after the fence. line: of the fence, from 1."""

    page: str
    line: int
    language: str
    text: str


@dataclass(frozen=True)
class Command:
    """One command of a page, in one line. fenced: it stands in a block of its own, not inside a sentence."""

    page: str
    text: str
    fenced: bool

    @property
    def words(self) -> list[str]:
        """The words that a shell would make of it; commengine's command is the python -m that it runs."""
        found = shlex.split(self.text, comments=True)
        at = found.index("commengine") if "commengine" in found else -1
        if at != 0 and (at < 0 or found[0] not in LAUNCHERS):
            return found
        listed = command_of(found[at + 1 :])
        rest = found[at + 1 :] if listed is None else found[at + 1 + len(listed.words.split()) :]
        return [*found[:at], "python", "-m", "commengine" if listed is None else listed.module, *rest]


def name(page: Path) -> str:
    """The page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    """All blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(name(page), text.count("\n", 0, found.start()) + 1, found["language"].split(" ")[0], found["text"])
        for found in _FENCE.finditer(text)
    ]


def prose(page: Path) -> str:
    """A page without its blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def inline_code(page: Path) -> list[str]:
    """What stands between single backticks."""
    return _INLINE.findall(prose(page))


def links(page: Path) -> list[str]:
    """The targets of a page's links and pictures."""
    return _LINK.findall(_INLINE.sub("", prose(page)))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    plain = (re.sub(r"[^\w\- ]", "", heading).strip().lower() for heading in _HEADING.findall(prose(page)))
    return {heading.replace(" ", "-") for heading in plain}


def commands(*pages: Path) -> Iterator[Command]:
    """The commands of pages: each line of their sh blocks, and inline code that begins with one of PROGRAMS."""
    for page in pages:
        for block in blocks(page):
            if block.language == "sh":
                for line in block.text.replace("\\\n", " ").splitlines():
                    if shlex.split(line, comments=True):
                        yield Command(name(page), " ".join(line.split()), fenced=True)
        for text in inline_code(page):
            if text.startswith(PROGRAMS):
                yield Command(name(page), text, fenced=False)
