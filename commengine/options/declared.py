"""The options of a command: fields of a dataclass that are flags and keys of a YAML file, each with its valid range."""

from __future__ import annotations

import os
import re
import shlex
import types
import typing
from argparse import BooleanOptionalAction
from collections.abc import Mapping, Sequence
from dataclasses import Field, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from commengine.errors import UsageError

from .parser import Foreign, OneLineParser, Parser
from .ranges import ValidRange, require_range

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Settings = TypeVar("Settings", bound="DataclassInstance")


def option(
    default: Any, text: str, *, choices: Sequence[str] | None = None, fixed: bool = False,
    default_of: str | None = None, words: bool = False, short: str | None = None,
) -> Any:  # fmt: skip
    """A dataclass field that is also a flag. Its type says which values are valid: ``Annotated[int, AT_LEAST_ONE]``.

    None, where it is the default, is always valid.

    text: the flag's help. choices: the valid words. fixed: a run that goes on from a checkpoint must have the
    checkpoint's value. default_of: the field whose value this one has when it is None. words: the flag takes one word
    or several, a YAML file a string or a list; the field is then a string or a list of strings. short: another name of
    the flag, such as "-i".
    """
    about = {"help": text, "choices": choices, "fixed": fixed, "default_of": default_of, "words": words, "short": short}
    return field(default=default, metadata=about)


def ranges_of(kind: type[DataclassInstance]) -> dict[str, tuple[ValidRange, ...]]:
    """The ranges of each option of dataclass ``kind``, by its field's name."""
    found = {}
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        every = (getattr(one, "__metadata__", ()) for one in (hint, *typing.get_args(hint)))
        found[name] = tuple(one for some in every for one in some if isinstance(one, ValidRange))
    return found


def parse(kind: type[Settings], argv: Sequence[str] | None, prog: str, **more: Any) -> Settings:
    """The settings of dataclass ``kind`` from the flags in ``argv`` and from ``--config FILE``; flags win.

    argv: None for the arguments of this process. more: for `argparse`. Raises OptionError, and SystemExit for --help.
    """
    return kind(**values_of(kind, parser_of(kind, prog, **more), argv))


def values_of(kind: type[DataclassInstance], parser: Parser, argv: Sequence[str] | None) -> dict[str, Any]:
    """The values of the fields of dataclass ``kind`` that a command line gives. parser: of `parser_of`."""
    read = vars(parser.parse_args(argv))
    read.pop("config")
    given = {name: value for name, value in read.items() if value is not None}
    for item in fields(kind):
        if item.metadata["words"] and len(given.get(item.name, ())) == 1:
            (given[item.name],) = given[item.name]
    return given


def parser_of(kind: type[DataclassInstance], prog: str, foreign: Foreign | None = None, **more: Any) -> Parser:
    """A parser of the options of dataclass ``kind``: an option that is not given is None. foreign, more: for `Parser`.

    It checks no ranges; `require_ranges` does.
    """
    parser, hints = Parser(foreign, prog=prog, **more), typing.get_type_hints(kind)
    for item in fields(kind):
        _add(parser, item, hints[item.name], default=None)
    return parser


def add_some(
    parser: OneLineParser,
    kind: type[DataclassInstance],
    names: Sequence[str],
    defaults: Mapping[str, str] | None = None,
) -> None:
    """Add the options ``names`` of dataclass ``kind`` to another command's parser, which checks their ranges.

    defaults: the words for the defaults that the other command has in place of the dataclass's.
    """
    hints, ranges = typing.get_type_hints(kind), ranges_of(kind)
    for item in fields(kind):
        if item.name in names:
            told = (defaults or {}).get(item.name)
            _add(parser, item, hints[item.name], default=item.default, valid=ranges[item.name], told=told)


def _add(
    parser: OneLineParser, item: Field[Any], hint: Any, *, default: Any, valid: Sequence[ValidRange] = (),
    told: str | None = None,
) -> None:  # fmt: skip
    """Add one field to ``parser`` as a flag. valid: the ranges that the parser itself checks. told: its default."""
    names = [*filter(None, [item.metadata["short"]]), flag_of(item.name)]
    kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType] or [hint]
    text = item.metadata["help"] + ("" if item.default is None else f" (default {item.default})")
    if told:
        text = re.sub(r" \(default:? .*\)$", "", text) + f" (default: {told})"
    if kinds == [bool]:
        parser.add_argument(*names, dest=item.name, action=BooleanOptionalAction, default=default, help=text)
    else:
        more = {"choices": item.metadata["choices"], "nargs": "+" if item.metadata["words"] else None}
        if item.metadata["choices"] is None:
            more["metavar"] = item.name.rstrip("_").upper()
        settings = {"type": kinds[0], "default": default, "help": text.replace("%", "%%"), **more}
        parser.add_argument(*names, dest=item.name, valid=valid, **settings)


def flag_of(name: str) -> str:
    """The flag of a field. A field whose flag is a word of Python ends in _: ``from_`` is --from."""
    return f"--{name.rstrip('_').replace('_', '-')}"


def as_flags(message: str, kind: type[DataclassInstance]) -> str:
    """``message`` with ``name=value`` of fields of ``kind`` written as on a command line: ``--name value``."""
    names = {item.name for item in fields(kind)}

    def flag(found: re.Match[str]) -> str:
        return f"{flag_of(found[1])} {found[2]}" if found[1] in names else found[0]

    return re.sub(r"\b([a-z]\w*)=([\w.]+)", flag, message)


def given(settings: DataclassInstance, name: str) -> str:
    """An option and its value as they stand on a command line: ``--train-iters 1000``."""
    value = getattr(settings, name)
    if isinstance(value, str) and not value.strip():
        value = shlex.quote(value)
    return f"{flag_of(name)} {shlex.join(value) if isinstance(value, list | tuple) else value}"


def require(condition: object, message: str) -> None:
    """Raise UsageError with ``message`` unless ``condition`` is true."""
    if not condition:
        raise UsageError(message)


def require_ranges(settings: DataclassInstance) -> None:
    """Raise UsageError, naming the option and what is valid, unless every field of ``settings`` is in its ranges."""
    ranges = ranges_of(type(settings))
    for item in fields(settings):
        value = getattr(settings, item.name)
        require(value is not None or item.default is None, f"{given(settings, item.name)}: is no value")
        require_range(given(settings, item.name), value, ranges[item.name])


def words_of(value: str | Sequence[str] | None) -> list[str]:
    """The words of an option that takes several (`option`, words)."""
    return [value] if isinstance(value, str) else list(value or [])


def make_writable(option: str, folder: Path) -> None:
    """Make the folder that ``option`` names, if there is none. Raises UsageError if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{option} {folder}: {error.strerror}; give a folder that can be made") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{option} {folder}: cannot be written to")
