"""The options of a command: fields of a dataclass that are flags and keys of a YAML file, each with its valid range."""

from __future__ import annotations

import math
import os
import shlex
import types
import typing
from argparse import BooleanOptionalAction
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import configargparse

from commengine import UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Settings = TypeVar("Settings", bound="DataclassInstance")


class OptionError(ValueError):
    """The error of a command line that cannot be parsed. Its message is one line."""


@dataclass(frozen=True)
class ValidRange:
    """The valid values of an option. ``text`` ends the error message about any other value."""

    holds: Callable[[Any], bool]
    text: str


AT_LEAST_ONE = ValidRange(lambda value: value >= 1, "must be at least 1")
NOT_NEGATIVE = ValidRange(lambda value: 0 <= value < math.inf, "must not be negative, and finite")
NOT_EMPTY = ValidRange(lambda text: text.strip() != "", "must not be empty: is a variable of the shell not set?")
FRACTION = ValidRange(lambda value: 0 <= value < 1, "must be at least 0 and below 1")


def option(
    default: Any,
    text: str,
    *,
    choices: Sequence[str] | None = None,
    valid: ValidRange | Sequence[ValidRange] = (),
    fixed: bool = False,
    default_of: str | None = None,
    words: bool = False,
    sets: Callable[[Any, str], Mapping[str, Any]] | None = None,
) -> Any:
    """A dataclass field that is also a flag.

    text: the flag's help. choices: the valid words. valid: the valid values; None, where it is the default, is always
    valid. fixed: a run that goes on from a checkpoint must have the checkpoint's value. default_of: the field whose
    value this one has when it is None. words: the flag takes one word or several, a YAML file a string or a list; the
    field is then a string or a list of strings. sets: called with the settings' class and the option's word, gives the
    values of other fields that the word stands for; flags and files win over these.
    """
    ranges = (valid,) if isinstance(valid, ValidRange) else tuple(valid)
    about = {
        "help": text, "choices": choices, "ranges": ranges, "fixed": fixed, "default_of": default_of, "words": words,
        "sets": sets,
    }  # fmt: skip
    return field(default=default, metadata=about)


class Parser(configargparse.ArgumentParser):
    """An argument parser with ``--config FILE`` that raises `OptionError` instead of printing and exiting."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(config_file_parser_class=configargparse.YAMLConfigFileParser, allow_abbrev=False, **settings)
        self.add_argument("--config", is_config_file=True, metavar="FILE", help="YAML file of these options; flags win")

    def error(self, message: str) -> NoReturn:
        words = " ".join(message.split())
        raise OptionError(f"--config: {words}" if "config file" in words and "--config" not in words else words)

    def get_possible_config_keys(self, action: Any) -> list[str]:
        keys: list[str] = super().get_possible_config_keys(action)
        return [*keys, *(key.replace("-", "_") for key in keys if "-" in key.lstrip("-") and not key.startswith("-"))]

    def convert_item_to_command_line_arg(self, action: Any, key: str, value: Any) -> list[str]:
        # ConfigArgParse would read the value of "no-overlap-grad-reduce" as the value of "overlap-grad-reduce".
        if isinstance(action, BooleanOptionalAction) and key.lstrip("-").startswith(("no-", "no_")):
            self.error(f"{key}: in a file, write {action.option_strings[0].lstrip('-')}: true or false")
        arguments: list[str] = super().convert_item_to_command_line_arg(action, key, value)
        return arguments


def parse(kind: type[Settings], argv: Sequence[str] | None, prog: str) -> Settings:
    """The settings of dataclass ``kind`` from the flags in ``argv`` and from ``--config FILE``; flags win.

    argv: None for the arguments of this process. Raises OptionError, UsageError for a word that sets nothing (`option`,
    sets), and SystemExit for --help.
    """
    parser = Parser(prog=prog)
    hints = typing.get_type_hints(kind)
    for item in fields(kind):
        _add(parser, item, hints[item.name])
    for item in fields(kind):
        if item.metadata["sets"] is not None:
            word = value_of(kind, item.name, argv, prog)
            if word is not None:
                parser.set_defaults(**item.metadata["sets"](kind, word))
    values = vars(parser.parse_args(argv))
    values.pop("config")
    for item in fields(kind):
        if item.metadata["words"] and values[item.name] is not None and len(values[item.name]) == 1:
            (values[item.name],) = values[item.name]
    return kind(**values)


def value_of(kind: type[DataclassInstance], name: str, argv: Sequence[str] | None, prog: str) -> Any:
    """The value of one option, as `parse` would read it; whatever else ``argv`` and the file hold is left alone."""
    (item,) = (item for item in fields(kind) if item.name == name)
    parser = Parser(prog=prog, add_help=False)
    _add(parser, item, typing.get_type_hints(kind)[name])
    return getattr(parser.parse_known_args(argv)[0], name)


def _add(parser: Parser, item: Field[Any], hint: Any) -> None:
    """Add one field to ``parser`` as a flag."""
    flag = "--" + item.name.replace("_", "-")
    kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType] or [hint]
    text = item.metadata["help"] + ("" if item.default is None else f" (default {item.default})")
    if kinds == [bool]:
        parser.add_argument(flag, action=BooleanOptionalAction, default=item.default, help=text)
    else:
        more = {"choices": item.metadata["choices"], "nargs": "+" if item.metadata["words"] else None}
        parser.add_argument(flag, type=kinds[0], default=item.default, help=text.replace("%", "%%"), **more)


def given(settings: DataclassInstance, name: str) -> str:
    """An option and its value as they stand on a command line: ``--train-iters 1000``."""
    value = getattr(settings, name)
    if isinstance(value, str) and not value.strip():
        value = shlex.quote(value)
    return f"--{name.replace('_', '-')} {shlex.join(value) if isinstance(value, list | tuple) else value}"


def require(condition: bool, message: str) -> None:
    """Raise UsageError with ``message`` unless ``condition`` is true."""
    if not condition:
        raise UsageError(message)


def require_ranges(settings: DataclassInstance) -> None:
    """Raise UsageError, naming the option and what is valid, unless every field of ``settings`` is in its ranges."""
    for item in fields(settings):
        value = getattr(settings, item.name)
        for valid in item.metadata["ranges"]:
            fits = (value is None and item.default is None) or valid.holds(value)
            require(fits, f"{given(settings, item.name)}: {valid.text}")


def make_writable(option: str, folder: Path) -> None:
    """Make the folder that ``option`` names, if there is none. Raises UsageError if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{option} {folder}: {error.strerror}; give a folder that can be made") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{option} {folder}: cannot be written to")
