"""The list of all commands, and the start of one as ``python -m`` starts it."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib.util
import os
import runpy
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from commengine.errors import one_line
from commengine.job_end import leave_broken_pipe
from commengine.startup.tasks import task_number

from .table import COMMANDS, GROUPS, Listed, command_of, of_package

HELP = ("-h", "--help")
#: the status of a process whose user made an error
STATUS = 2
#: other words that a person may type: the end of two words, and the modules of `python -m`
_MEANT = {
    name: one.words for one in COMMANDS.values() for name in (one.module.rpartition(".")[2], one.words.split()[-1])
}
#: the first words of the commands that have two
_FIRST = {words.split()[0] for words in COMMANDS if " " in words}


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command that the words name, or list all. Returns the exit status, or raises what the command raises.

    argv: None for the words of this process. Where a launcher started several processes, the first one alone prints
    what this module has to say.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    if "_ARGCOMPLETE" in os.environ:
        return _complete()
    if not words or words[0] in HELP:
        return _say(_listing(GROUPS))
    if words == ["--version"]:
        import importlib.metadata  # it takes longer than the rest of this

        return _say(f"commengine {importlib.metadata.version('commengine')}")
    first = words[0]
    if first in _FIRST and words[1:2] and words[1] in HELP:
        return _say(_listing({"": [one for one in COMMANDS.values() if one.words.startswith(f"{first} ")]}))
    found = command_of(words)
    if found is None:
        return _refuse(words)
    return _start(found.module, words[len(found.words.split()) :])


def _start(module: str, rest: Sequence[str]) -> int:
    """Run a module as ``python -m`` does. Returns 0 where it returns."""
    sys.argv = ["-m", *rest]  # so it stands while Python looks for the module: packages of commands ask for it
    if not sys.flags.safe_path:
        with contextlib.suppress(OSError):  # python -m finds modules of the working directory, too
            sys.path += [folder for folder in (str(Path.cwd()),) if folder not in sys.path]
    if importlib.util.find_spec(module) is None:
        return _fault(f"{module} is not installed: run it in the repository, as python -m {module}")
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def _complete() -> int:
    """Tell argcomplete the words that may follow those of the shell's line: commands, or options of one."""
    argcomplete: Any = importlib.import_module("argcomplete")
    *_, words, _ = argcomplete.split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))
    found = command_of(words[1:])
    if found is not None:
        os.environ["_ARGCOMPLETE"] = str(1 + len(found.words.split()))  # the words that are no arguments
        return _start(found.module, HELP[1:])  # a parser that is asked for its help answers argcomplete instead
    given = words[1:2] if words[1:2] and words[1] in _FIRST else []
    names = [name.removeprefix(f"{given[0]} ") for name in COMMANDS if name.startswith(given[0])] if given else COMMANDS
    parser = argparse.ArgumentParser(prog="commengine")
    parser.add_argument("command", choices=sorted({name.split()[0] for name in names}))
    os.environ["_ARGCOMPLETE"] = str(1 + len(given))
    argcomplete.autocomplete(parser)
    return 0


def _listing(groups: Mapping[str, Iterable[Listed]]) -> str:
    width = max(map(len, COMMANDS))
    parts = [
        "\n".join(
            [*([f"{title}:"] if title else []), *(f"  commengine {one.words:{width}}  {one.line}" for one in group)]
        )
        for title, group in groups.items()
    ]
    ends = ["Each command has a --help, which names the module: commengine doctor is python -m bench.doctor."]
    ends += ["A job of several ranks starts as usual: mpiexec -n 4 commengine doctor, or srun commengine doctor."]
    return "\n\n".join([*parts, *(["\n".join(ends)] if len(parts) > 1 else [])])


def _refuse(words: Sequence[str]) -> int:
    """Say that no command has these words, and which is the nearest."""
    first = words[0]
    if first in _FIRST:
        valid = [name for name in COMMANDS if name.startswith(f"{first} ")]
        if len(words) == 1 or words[1].startswith("-"):
            return _fault(f"{first}: a second word is missing; valid: {', '.join(valid)}")
        seconds = {name.split()[1]: name for name in valid}
        return _fault(f"{first} {unknown(words[1], seconds, f'commengine {first} --help')}")
    return _fault(unknown(first, {**{name: name for name in (*COMMANDS, *_FIRST, *HELP)}, **_MEANT}, "commengine"))


def unknown(word: str, meant: Mapping[str, str], lister: str) -> str:
    """The error about a word that is no command.

    meant: the command, by each word that a person may type for it. lister: the command that lists all.
    """
    near = difflib.get_close_matches(word[:100], meant, 1)
    then = f" (is {meant[near[0]]} meant?)" if near else f"; {lister} lists all"
    return f"{word[:100]}: there is no such command{then}"


def _say(text: str) -> int:
    if task_number() == 0:
        try:
            print(text, flush=True)
        except BrokenPipeError:  # the reader went away, as head does
            leave_broken_pipe()
            return 1
    return 0


def _fault(text: str, command: str = "commengine") -> int:
    if task_number() == 0:
        print(f"{command}: error: {one_line(text)}", file=sys.stderr, flush=True)
    return STATUS


def list_modules(package: str, argv: Sequence[str] | None = None) -> int:
    """Print the commands of ``package`` for ``python -m``, or the one that is asked for. Returns the exit status."""
    words = sys.argv[1:] if argv is None else argv
    lines = {one.module.removeprefix(f"{package}."): one.line for one in of_package(package)}
    asked = words[0].removeprefix(f"{package}.") if words else ""
    if asked in lines:
        return _say(f"python -m {package}.{asked}: {lines[asked]}")
    if words and asked not in HELP:
        return _fault(unknown(asked, {name: name for name in lines}, f"python -m {package}"), f"python -m {package}")
    width = max(map(len, lines))
    return _say("\n".join(f"python -m {package}.{name:{width}}  {line}" for name, line in lines.items()))
