"""Command: how the settings of a command come from its command line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from commengine.options.declared import parser_of
from commengine.options.parser import OneLineParser
from commengine.startup.tasks import task_number
from trainers.megatron_flags.parsing import parse

from .rules import Rule, require_valid

Settings = TypeVar("Settings", bound=Any)
#: the value of an option by the name of its field; None if it is not given
Value = Callable[[str], Any]


def answer_help(settings: type[Any], name: str, **more: Any) -> None:
    """`print_help` of the options of dataclass ``settings``. more: for `argparse`."""
    print_help(lambda: parser_of(settings, name, **more))


def print_help(parser: Callable[[], OneLineParser]) -> None:
    """Print the help of a command and exit, if this process's words ask for it: before imports that take seconds.

    Only the first process of a job prints it.
    """
    if {"-h", "--help"} & set(sys.argv[1:]):
        if task_number() == 0:
            parser().print_help()
        sys.exit(0)


def nothing(_: Value) -> Mapping[str, Any]:
    """What the words of a command imply where they imply nothing."""
    return {}


def as_they_are(settings: Settings, ranks: int) -> Settings:
    """The settings of a command that reads no files."""
    del ranks
    return settings


@dataclass(frozen=True)
class Command(Generic[Settings]):
    """A command: ``python -m trainers.NAME``.

    settings: the class of its records. megatron: the command of which Megatron-LM's other flags are taken, too; None:
    of none. rules: those that only this command has. implied: the fields that words such as the name of a preset set;
    flags and files win. complete: gives valid settings, for a number of ranks, the values that only files tell; it
    reads files, and raises UsageError or ValueError that names the option.
    """

    name: str
    settings: type[Settings]
    megatron: str | None = None
    rules: Sequence[Rule] = ()
    implied: Callable[[Value], Mapping[str, Any]] = nothing
    complete: Callable[[Settings, int], Settings] = as_they_are

    def parse(self, argv: Sequence[str] | None, tell: Callable[[str], None] = lambda line: None) -> Settings:
        """The settings of a command line; None: that of this process. Their ranges and rules are not checked.

        tell: called with lines about flags of Megatron-LM, and about defaults that are not Megatron-LM's. Raises
        OptionError, UsageError, and SystemExit for --help.
        """
        return parse(self.settings, argv, self.name, megatron=self.megatron, implied=self.implied, tell=tell)

    def require_valid(self, settings: Settings, ranks: int) -> None:
        """Raise UsageError, naming the option and what is valid, unless the command is possible on ``ranks`` ranks."""
        require_valid(settings, ranks, self.rules)

    def read(self, argv: Sequence[str] | None, ranks: int, tell: Callable[[str], None] = lambda line: None) -> Settings:
        """The valid and complete settings of a job of ``ranks`` ranks. It reads files, so on rank 0 only.

        tell: as for `parse`, and called only where all is valid. Raises UsageError or ValueError, naming the option.
        """
        said = list[str]()
        settings = self.parse(argv, said.append)
        self.require_valid(settings, ranks)
        settings = self.complete(settings, ranks)
        for line in said:
            tell(line)
        return settings
