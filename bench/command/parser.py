"""The argument parser of a command."""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn

from commengine.errors import one_line
from trainers.options import OneLineParser, Parser


class CommandParser(Parser):
    """A parser whose options may also stand in the YAML file of ``--config``.

    It raises `OptionError`, a ValueError, instead of printing and exiting; `bench.command.start` prints the error.
    """


class TrainerCommandParser(OneLineParser):
    """A parser for a command that also takes a training command's options; ``--config`` is one of those.

    Use ``parse_known_args``: the arguments that it leaves are the training command's. It raises `OptionError` as well.
    """


class ProgramParser(CommandParser):
    """A parser for a program that a contest starts, or a person tries by hand. It prints its errors itself."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {one_line(message)}", file=sys.stderr)
        sys.exit(2)


def new_parser(command: str, description: str | None) -> CommandParser:
    """A parser for ``python -m COMMAND``. description: the module's docstring, which ``--help`` prints as it is."""
    return CommandParser(**_settings(command, description))


def new_program_parser(program: str, description: str | None) -> ProgramParser:
    """A parser for ``python -m PROGRAM``, a program of a contest."""
    return ProgramParser(**_settings(program, description))


def new_trainer_parser(command: str, description: str | None) -> TrainerCommandParser:
    """A parser for ``python -m COMMAND``, which passes the options that it does not know to the trainer."""
    return TrainerCommandParser(allow_abbrev=False, **_settings(command, description))


def _settings(command: str, description: str | None) -> dict[str, Any]:
    return {
        "prog": f"python -m {command}",
        "description": description,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }
