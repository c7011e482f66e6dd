"""The argument parser of a command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection
from functools import partial

from commengine.options.parser import OneLineParser, Parser


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """A description as it is, and after an option's help its default, if that is a word or a number."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        told = type(default) in (str, int, float) and default != argparse.SUPPRESS
        return f"{text} (default: %(default)s)" if told and "(default" not in text else text


def new_parser(command: str, description: str | None, *, passes_on: bool = False) -> OneLineParser:
    """A parser for ``python -m COMMAND``, whose options may also stand in the YAML file of ``--config``.

    It raises `OptionError`, a ValueError, instead of printing and exiting; `bench.command.start` prints the error.
    description: the module's docstring, which ``--help`` prints as it is. passes_on: the command also takes a training
    command's options, of which ``--config`` is one. Use ``parse_known_args``, which leaves them.
    """
    made = partial(OneLineParser, allow_abbrev=False) if passes_on else Parser
    return made(prog=f"python -m {command}", description=description, formatter_class=HelpFormatter)


def part_alone(parts: Collection[str]) -> tuple[str, list[str]]:
    """The part of this process's command that ``--only`` names, and the other words; no part without ``--only``.

    parts: those that have options of their own.
    """
    first = OneLineParser(add_help=False, allow_abbrev=False)
    first.add_argument("--only")
    given, others = first.parse_known_args()
    return (given.only, others) if given.only in parts else ("", sys.argv[1:])
