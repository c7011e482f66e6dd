"""The options of a command: fields of a dataclass that are flags and keys of a YAML file, each with its valid range."""

from __future__ import annotations

import difflib
import io
import math
import os
import re
import shlex
import types
import typing
from argparse import ArgumentError, ArgumentParser, BooleanOptionalAction, Namespace, _AppendAction, _StoreTrueAction
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import configargparse

from commengine import UsageError
from commengine.errors import one_line
from trainers.files.reading import InputFileError, read_yaml

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Settings = TypeVar("Settings", bound="DataclassInstance")


class OptionError(UsageError, ValueError):
    """The error of a command line that cannot be parsed, or of a value that is out of range. It is one line."""


@dataclass(frozen=True)
class ValidRange:
    """The valid values of an option. ``text`` ends the error message about any other value."""

    holds: Callable[[Any], bool]
    text: str


AT_LEAST_ONE = ValidRange(lambda value: value >= 1, "must be at least 1")
NOT_NEGATIVE = ValidRange(lambda value: 0 <= value < math.inf, "must not be negative, and finite")
NOT_EMPTY = ValidRange(lambda text: text.strip() != "", "must not be empty: is a variable of the shell not set?")
FRACTION = ValidRange(lambda value: 0 <= value < 1, "must be at least 0 and below 1")
OPEN_FRACTION = ValidRange(lambda value: 0 < value < 1, "must be a number above 0 and below 1")
ABOVE_ZERO = ValidRange(lambda value: 0 < value < math.inf, "must be a number above 0, and finite")
#: of every option that is an integer: what a 64-bit number holds
_LARGEST = 2**63 - 1


def between(least: float, most: float) -> ValidRange:
    """The numbers from ``least`` to ``most``."""
    return ValidRange(lambda value: least <= value <= most, f"must be at least {least}, and at most {most}")


def at_least(least: float) -> ValidRange:
    """The finite numbers from ``least`` on."""
    return ValidRange(lambda value: least <= value < math.inf, f"must be at least {least}")


#: characters of the name of a file or folder, as Linux has it
_LONGEST_NAME = 255
#: of steps, rounds and the like; of seeds; of seconds
COUNT = between(1, 10**6)
SEED = NOT_NEGATIVE
#: of a model and its batches: far above all that is trained, and far below what no memory holds
LAYERS, HEADS, WIDTH, LENGTH = between(1, 2**14), between(1, 2**16), between(1, 2**20), between(1, 2**24)
VOCABULARY, BATCH = between(1, 2**24), between(1, 2**31)
SECONDS = ValidRange(lambda value: 0 < value <= 10**6, "must be a number above 0, and at most 1000000")


def option(
    default: Any,
    text: str,
    *,
    choices: Sequence[str] | None = None,
    valid: ValidRange | Sequence[ValidRange] = (),
    fixed: bool = False,
    default_of: str | None = None,
    words: bool = False,
    short: str | None = None,
    sets: Callable[[Any, str, Callable[[str], Any]], Mapping[str, Any]] | None = None,
) -> Any:
    """A dataclass field that is also a flag.

    text: the flag's help. choices: the valid words. valid: the valid values; None, where it is the default, is always
    valid. fixed: a run that goes on from a checkpoint must have the checkpoint's value. default_of: the field whose
    value this one has when it is None. words: the flag takes one word or several, a YAML file a string or a list; the
    field is then a string or a list of strings. short: another name of the flag, such as "-i". sets: gives the values
    of other fields that the option's word stands for; flags and files win over these. It is called with the settings'
    class, the word, and a function that tells the value of another option by its field's name, None if it is not given.
    """
    ranges = (valid,) if isinstance(valid, ValidRange) else tuple(valid)
    about = {
        "help": text, "choices": choices, "ranges": ranges, "fixed": fixed, "default_of": default_of, "words": words,
        "sets": sets, "short": short,
    }  # fmt: skip
    return field(default=default, metadata=about)


class _StrictYAML(configargparse.ConfigFileParser):
    """The files of ``--config``: keys with plain values, or lists of plain values, as a command line has them."""

    def get_syntax_description(self) -> str:
        """A sentence of ``--help``."""
        return "The file of --config is YAML: option: value, in a line each."

    def parse(self, stream: io.StringIO) -> dict[str, str | list[str]]:
        """The values by key; a key whose value is null is left out. stream: it has the file's name alone.

        Raises OptionError.
        """
        found: dict[str, str | list[str]] = {}
        try:
            data = read_yaml(stream.name, as_written=True)
        except InputFileError as error:
            raise OptionError(f"--config {error}") from error
        for key, value in data.items():
            if key.strip("-") in ("config", "help"):
                raise OptionError(f"--config {stream.name}: {key}: is no option of a file")
            parts = value if isinstance(value, list) else [value]
            if not all(isinstance(part, str) for part in parts):
                if value is not None:
                    raise OptionError(f"--config: {key}: want one value, or a list of values without null")
            else:
                found[key] = value
        return found


class OneLineParser(ArgumentParser):
    """An argument parser that raises `OptionError` instead of printing and exiting, and checks the ranges of values."""

    def add_argument(self, *names: Any, valid: ValidRange | Sequence[ValidRange] = (), **settings: Any) -> Any:
        """As in `argparse`. valid: the valid values, of each word if there are several; None is always valid."""
        action: Any = super().add_argument(*names, **settings)
        action.ranges = (valid,) if isinstance(valid, ValidRange) else tuple(valid)
        return action

    def error(self, message: str) -> NoReturn:
        word = re.match(r"unrecognized arguments: .*?(--[^\s=]+)", message)
        near = difflib.get_close_matches(word[1][:100], self._option_string_actions, 1) if word else []
        raise OptionError(one_line(message) + (f" (is {near[0]} meant?)" if near else ""))

    def parse_known_args(  # type: ignore[override]  # of any signature of the library
        self, *arguments: Any, **settings: Any
    ) -> tuple[Namespace, list[str]]:
        found, rest = super().parse_known_args(*arguments, **settings)
        for action in self._actions:
            value = getattr(found, action.dest, None)
            name = next(iter(action.option_strings), action.metavar or action.dest)
            for one in value if isinstance(value, list | tuple) else [value]:
                _require_range(f"{name} {one}", one, getattr(action, "ranges", ()))
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


class Parser(OneLineParser, configargparse.ArgumentParser):
    """A parser of flags and of ``--config FILE``, a YAML file of the same options.

    unknown_keys: whether the file may have keys that are none of this parser's options.
    """

    def __init__(self, *, unknown_keys: bool = False, **settings: Any) -> None:
        self._unknown_keys = unknown_keys
        library: dict[str, Any] = {"config_file_parser_class": _StrictYAML, "config_file_open_func": _named}
        super().__init__(allow_abbrev=False, **library, **settings)
        self.add_argument("--config", is_config_file=True, metavar="FILE", help="YAML file of these options; flags win")

    def get_possible_config_keys(self, action: Any) -> list[str]:
        keys: list[str] = super().get_possible_config_keys(action)
        return [*keys, *(key.replace("-", "_") for key in keys if "-" in key.lstrip("-") and not key.startswith("-"))]

    def convert_item_to_command_line_arg(self, action: Any, key: str, value: Any) -> list[str]:
        # ConfigArgParse would read the value of "no-overlap-grad-reduce" as the value of "overlap-grad-reduce".
        if isinstance(action, BooleanOptionalAction) and key.lstrip("-").startswith(("no-", "no_")):
            self.error(f"{key}: in a file, write {action.option_strings[0].lstrip('-')}: true or false")
        if action is None:
            if self._unknown_keys:
                return []
            raise OptionError(f"--config: --{key}: there is no such option")
        is_flag = isinstance(action, BooleanOptionalAction | _StoreTrueAction) and isinstance(value, str)
        if is_flag and value.lower() not in ("true", "yes", "on", "1", "false", "no", "off", "0"):
            raise OptionError(f"--config: {key}: {value[:100]!r}: must be true or false")
        if isinstance(value, list) and action.nargs not in ("+", "*") and not isinstance(action, _AppendAction):
            raise OptionError(f"--config: {key}: want one value, got a list")
        arguments: list[str] = super().convert_item_to_command_line_arg(action, key, value)
        return arguments


def _named(path: str) -> io.StringIO:
    """An empty stream with the name of a file, which `_StrictYAML` opens: its errors name the option and the file."""
    stream = io.StringIO()
    stream.name = path
    return stream


def parse(kind: type[Settings], argv: Sequence[str] | None, prog: str) -> Settings:
    """The settings of dataclass ``kind`` from the flags in ``argv`` and from ``--config FILE``; flags win.

    argv: None for the arguments of this process. Raises OptionError, UsageError for a word that sets nothing (`option`,
    sets), and SystemExit for --help.
    """
    parser = parser_of(kind, prog)
    for item in fields(kind):
        if item.metadata["sets"] is not None:
            word = value_of(kind, item.name, argv, prog)
            if word is not None:
                read = partial(_read_option, kind, argv, prog)
                parser.set_defaults(**item.metadata["sets"](kind, word, read))
    values = vars(parser.parse_args(argv))
    values.pop("config")
    for item in fields(kind):
        if item.metadata["words"] and values[item.name] is not None and len(values[item.name]) == 1:
            (values[item.name],) = values[item.name]
    return kind(**values)


def _read_option(kind: type[DataclassInstance], argv: Sequence[str] | None, prog: str, name: str) -> Any:
    return value_of(kind, name, argv, prog, default=False)


def parser_of(kind: type[DataclassInstance], prog: str) -> Parser:
    """A parser of the options of dataclass ``kind``. It checks no ranges; `require_ranges` does."""
    parser, hints = Parser(prog=prog), typing.get_type_hints(kind)
    for item in fields(kind):
        _add(parser, item, hints[item.name])
    return parser


def add_some(parser: Parser, kind: type[DataclassInstance], names: Sequence[str]) -> None:
    """Add the options ``names`` of dataclass ``kind`` to another command's parser, which checks their ranges."""
    hints = typing.get_type_hints(kind)
    for item in fields(kind):
        if item.name in names:
            _add(parser, item, hints[item.name], valid=item.metadata["ranges"])


def value_of(
    kind: type[DataclassInstance], name: str, argv: Sequence[str] | None, prog: str, *, default: bool = True
) -> Any:
    """The value of one option, as `parse` would read it; whatever else ``argv`` and the file hold is left alone.

    default: of an option that is not given: its default; else None.
    """
    (item,) = (item for item in fields(kind) if item.name == name)
    parser = Parser(prog=prog, add_help=False, unknown_keys=True)
    _add(parser, item, typing.get_type_hints(kind)[name])
    if not default:
        parser.set_defaults(**{name: None})
    return getattr(parser.parse_known_args(argv)[0], name)


def _add(parser: Parser, item: Field[Any], hint: Any, valid: Sequence[ValidRange] = ()) -> None:
    """Add one field to ``parser`` as a flag. valid: the ranges that the parser itself checks."""
    names = [*filter(None, [item.metadata["short"]]), flag_of(item.name)]
    kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType] or [hint]
    text = item.metadata["help"] + ("" if item.default is None else f" (default {item.default})")
    if kinds == [bool]:
        parser.add_argument(*names, dest=item.name, action=BooleanOptionalAction, default=item.default, help=text)
    else:
        more = {"choices": item.metadata["choices"], "nargs": "+" if item.metadata["words"] else None}
        if item.metadata["choices"] is None:
            more["metavar"] = item.name.rstrip("_").upper()
        settings = {"type": kinds[0], "default": item.default, "help": text.replace("%", "%%"), **more}
        parser.add_argument(*names, dest=item.name, valid=valid, **settings)


def flag_of(name: str) -> str:
    """The flag of a field. A field whose flag is a word of Python ends in _: ``from_`` is --from."""
    return f"--{name.rstrip('_').replace('_', '-')}"


def as_flags(message: str, kind: type[DataclassInstance]) -> str:
    """``message`` with ``name=value`` of fields of ``kind`` written as on a command line: ``--name value``."""
    names = {item.name for item in fields(kind)}

    def flag(found: re.Match[str]) -> str:
        return f"--{found[1].replace('_', '-')} {found[2]}" if found[1] in names else found[0]

    return re.sub(r"\b([a-z]\w*)=([\w.]+)", flag, message)


def given(settings: DataclassInstance, name: str) -> str:
    """An option and its value as they stand on a command line: ``--train-iters 1000``."""
    value = getattr(settings, name)
    if isinstance(value, str) and not value.strip():
        value = shlex.quote(value)
    return f"{flag_of(name)} {shlex.join(value) if isinstance(value, list | tuple) else value}"


def require(condition: bool, message: str) -> None:
    """Raise UsageError with ``message`` unless ``condition`` is true."""
    if not condition:
        raise UsageError(message)


def require_ranges(settings: DataclassInstance) -> None:
    """Raise UsageError, naming the option and what is valid, unless every field of ``settings`` is in its ranges."""
    for item in fields(settings):
        value = getattr(settings, item.name)
        require(value is not None or item.default is None, f"{given(settings, item.name)}: is no value")
        _require_range(given(settings, item.name), value, item.metadata["ranges"])


def _require_range(name: str, value: Any, ranges: Sequence[ValidRange]) -> None:
    """Raise OptionError, which begins with ``name``, unless ``value`` is in all ranges. None is in all."""
    for valid in ranges if value is not None else ():
        if not valid.holds(value):
            raise OptionError(f"{name}: {valid.text}")
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise OptionError(f"{name}: must be below 2**63")


def make_writable(option: str, folder: Path) -> None:
    """Make the folder that ``option`` names, if there is none. Raises UsageError if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{option} {folder}: {error.strerror}; give a folder that can be made") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{option} {folder}: cannot be written to")
