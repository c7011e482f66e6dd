"""Parsers of command lines and of ``--config FILE``, a YAML file of the same options. Each error is one line."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from argparse import ArgumentError, BooleanOptionalAction, _AppendAction, _StoreTrueAction
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NoReturn, Protocol

from commengine.errors import one_line
from commengine.files.reading import InputFileError
from commengine.files.writing import require_different

from .ranges import OptionError, ValidRange, require_range

#: characters of the name of a file or folder, as Linux has it
_LONGEST_NAME = 255
#: what a command does with the file of an option (`OneLineParser.add_argument`)
FILES = ("written", "read")
#: the words of a file that turn an option on
TRUE = ("true", "yes", "on", "1")


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that raises `OptionError` instead of printing and exiting, and checks the ranges of values."""

    def add_argument(
        self, *names: Any, valid: ValidRange | Sequence[ValidRange] = (), file: str = "", **settings: Any
    ) -> Any:
        """As in `argparse`. valid: the valid values, of each word if there are several; None is always valid.

        file: "written" or "read", if the value is a file: those that are written must differ from all others.
        """
        action: Any = super().add_argument(*names, **settings)
        action.ranges = (valid,) if isinstance(valid, ValidRange) else tuple(valid)
        action.file = file
        return action

    def error(self, message: str) -> NoReturn:
        word = re.match(r"unrecognized arguments: .*?(--[^\s=]+)", message)
        near = difflib.get_close_matches(word[1][:100], self._names(), 1) if word else []
        raise OptionError(one_line(message) + (f" (is {near[0]} meant?)" if near else ""))

    def _names(self) -> Iterable[str]:
        """The flags that may be meant where one is not known."""
        return self._option_string_actions

    def parse_known_args(  # type: ignore[override]  # of any signature of the library
        self, *arguments: Any, **settings: Any
    ) -> tuple[argparse.Namespace, list[str]]:
        found, rest = super().parse_known_args(*arguments, **settings)
        for action in self._actions:
            value = getattr(found, action.dest, None)
            name = next(iter(action.option_strings), action.metavar or action.dest)
            for one in value if isinstance(value, list | tuple) else [value]:
                require_range(f"{name} {one}", one, getattr(action, "ranges", ()))
        of = {kind: [one.dest for one in self._actions if getattr(one, "file", "") == kind] for kind in FILES}
        try:
            values = {kind: {name: getattr(found, name, None) for name in names} for kind, names in of.items()}
            require_different(values["written"], [*values["read"].values()])
        except ValueError as error:
            raise OptionError(one_line(str(error))) from None
        return found, rest

    def _get_values(self, action: Any, words: list[str]) -> Any:
        if words and not any(word != "--" for word in words):
            # argparse takes "--" in "--option=--" for the end of the options, and then finds no value.
            raise ArgumentError(action, "expected a value, and -- is none")
        for word in words:
            if not word:
                raise ArgumentError(action, "expected a value, and got an empty one (from a variable that is not set?)")
            names = re.split(r"[/,]", word)  # of a path, or of a list such as --hosts
            if not any(map(str.isspace, word)) and any(len(name) > _LONGEST_NAME for name in names):
                raise ArgumentError(action, f"{word[:40]}... is longer than any name")
            if "\0" in word or (not word.isascii() and word != word.encode(errors="replace").decode()):
                raise ArgumentError(action, f"{word!r} is not text in UTF-8 without zero bytes")
        return super()._get_values(action, words)


class Foreign(Protocol):
    """Flags of another program that a parser takes, too. It is asked only where a word may be one of them."""

    def names(self) -> Iterable[str]:
        """The flags."""

    def without(self, words: Sequence[str], own: Collection[str], over: Sequence[str]) -> list[str]:
        """``words`` without these flags, which the object keeps.

        own: the parser's flags, which are none of these. over: other words, which win. Raises UsageError.
        """

    def given(self) -> Iterable[str]:
        """The flags that it has kept."""

    def words(self, flag: str, parts: Sequence[str]) -> list[str] | None:
        """The words of a key of a file; None if ``flag`` is none of these. parts: its values."""


class Parser(OneLineParser):
    """A parser of flags and of ``--config FILE``, a YAML file of the same options.

    foreign: the flags of another program that it also takes.
    """

    def __init__(self, foreign: Foreign | None = None, **settings: Any) -> None:
        self._foreign = foreign
        about = "The file of --config is YAML: option: value, in a line each."
        super().__init__(allow_abbrev=False, epilog=about, **settings)
        self.add_argument("--config", metavar="FILE", help="YAML file of these options; flags win")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = sys.argv[1:] if args is None else list(args)
        first = OneLineParser(add_help=False, allow_abbrev=False)
        first.add_argument("--config")
        path = first.parse_known_args(words)[0].config
        words = self._without_foreign(words, [])
        if path is not None:
            given = [*words, *(self._foreign.given() if self._foreign else [])]
            words += self._without_foreign(self._words_of(path, given), words)
        return super().parse_known_args(words, namespace)

    def _without_foreign(self, words: list[str], over: Sequence[str]) -> list[str]:
        if self._foreign is None or not self._is_foreign(words):
            return words
        return self._foreign.without(words, self._option_string_actions, over)

    def _is_foreign(self, words: Sequence[str]) -> bool:
        """Whether a word may be a flag of another program, because it is none of this parser."""
        flags = (word.partition("=")[0] for word in words if word.startswith("--"))
        return any(flag not in self._option_string_actions for flag in flags)

    def _names(self) -> Iterable[str]:
        return [*super()._names(), *(self._foreign.names() if self._foreign else [])]

    def _words_of(self, path: str, given: Sequence[str]) -> list[str]:
        """The content of a file as words of a command line, but for options that ``given`` has. Raises OptionError."""
        from commengine.files.yaml_files import read_yaml  # here: it needs PyYAML, and only --config does

        try:
            data = read_yaml(path, as_written=True)
        except InputFileError as error:
            raise OptionError(f"--config {error}") from error
        flags, found = {word.partition("=")[0] for word in given}, list[str]()
        for key, value in data.items():
            flag = f"--{key.strip('-').replace('_', '-')}"
            if flag in ("--config", "--help"):
                raise OptionError(f"--config {path}: {key}: is no option of a file")
            if value is None:
                continue
            parts = value if isinstance(value, list) else [value]
            if not all(isinstance(part, str) for part in parts):
                raise OptionError(f"--config: {key}: want one value, or a list of values without null")
            action: Any = self._option_string_actions.get(flag)
            if action is None and self._foreign and (words := self._foreign.words(flag, parts)) is not None:
                found += [] if flag in flags else words
                continue
            if action is None:
                raise OptionError(f"--config: {flag}: there is no such option")
            if flags & set(action.option_strings):
                continue
            if isinstance(value, list) and action.nargs not in ("+", "*") and not isinstance(action, _AppendAction):
                raise OptionError(f"--config: {key}: want one value, got a list")
            if isinstance(action, BooleanOptionalAction | _StoreTrueAction):
                found += _switch(action, flag, key, parts[0])
            elif action.nargs in ("+", "*") and len(parts) > 1:
                found += [flag, *parts]
            else:
                found += [f"{flag}={part}" for part in parts]
        return found


def _switch(action: argparse.Action, flag: str, key: str, value: str) -> list[str]:
    """The words that turn an option without a value on or off. value: of ``key`` in a file."""
    if isinstance(action, BooleanOptionalAction) and flag.startswith("--no-"):
        raise OptionError(f"{key}: in a file, write {action.option_strings[0].lstrip('-')}: true or false")
    if value.lower() in TRUE:
        return [flag]
    if value.lower() not in ("false", "no", "off", "0"):
        raise OptionError(f"--config: {key}: {value[:100]!r}: must be true or false")
    return [f"--no-{flag[2:]}"] if isinstance(action, BooleanOptionalAction) else []
