"""The options of a command: fields of a dataclass that are flags and keys of a YAML file, each with its valid range."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
import shlex
import sys
import types
import typing
from argparse import ArgumentError, BooleanOptionalAction, _AppendAction, _StoreTrueAction
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

from commengine import UsageError
from commengine.errors import one_line
from trainers.files.reading import InputFileError, read_yaml
from trainers.files.writing import require_different

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from trainers.megatron_flags.reading import Found

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
EXPERTS = between(1, 2**12)
VOCABULARY, BATCH = between(1, 2**24), between(1, 2**31)
SECONDS = ValidRange(lambda value: 0 < value <= 10**6, "must be a number above 0, and at most 1000000")

#: the types of options: a type says which values are valid
AtLeastOne = Annotated[int, AT_LEAST_ONE]
Batch = Annotated[int, BATCH]
Count = Annotated[int, COUNT]
Heads = Annotated[int, HEADS]
Layers = Annotated[int, LAYERS]
Experts = Annotated[int, EXPERTS]
Length = Annotated[int, LENGTH]
Natural = Annotated[int, NOT_NEGATIVE]
NotNegative = Annotated[float, NOT_NEGATIVE]
Positive = Annotated[float, ABOVE_ZERO]
Seed = Annotated[int, SEED]
Share = Annotated[float, FRACTION]
Text = Annotated[str, NOT_EMPTY]
Vocabulary = Annotated[int, VOCABULARY]
Width = Annotated[int, WIDTH]


def option(
    default: Any, text: str, *, choices: Sequence[str] | None = None, fixed: bool = False,
    default_of: str | None = None, words: bool = False, short: str | None = None,
    sets: Callable[[Any, str, Callable[[str], Any]], Mapping[str, Any]] | None = None,
) -> Any:  # fmt: skip
    """A dataclass field that is also a flag. Its type says which values are valid: ``Annotated[int, AT_LEAST_ONE]``.

    None, where it is the default, is always valid.

    text: the flag's help. choices: the valid words. fixed: a run that goes on from a checkpoint must have the
    checkpoint's value. default_of: the field whose value this one has when it is None. words: the flag takes one word
    or several, a YAML file a string or a list; the field is then a string or a list of strings. short: another name of
    the flag, such as "-i". sets: gives the values of other fields that the option's word stands for; flags and files
    win over these. It is called with the settings' class, the word, and a function that tells the value of another
    option by its field's name, None if it is not given.
    """
    about = {"help": text, "choices": choices, "fixed": fixed, "default_of": default_of, "words": words}
    return field(default=default, metadata=about | {"sets": sets, "short": short})


def ranges_of(kind: type[DataclassInstance]) -> dict[str, tuple[ValidRange, ...]]:
    """The ranges of each option of dataclass ``kind``, by its field's name."""
    found = {}
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        every = (getattr(one, "__metadata__", ()) for one in (hint, *typing.get_args(hint)))
        found[name] = tuple(one for some in every for one in some if isinstance(one, ValidRange))
    return found


#: what a command does with the file of an option (`OneLineParser.add_argument`)
FILES = ("written", "read")


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
                _require_range(f"{name} {one}", one, getattr(action, "ranges", ()))
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


class Parser(OneLineParser):
    """A parser of flags and of ``--config FILE``, a YAML file of the same options.

    megatron: the command of which it also takes Megatron-LM's flags (`trainers.megatron_flags.answers.COMMANDS`), None
    for no command. They are in `found` afterwards.
    """

    def __init__(self, megatron: str | None = None, **settings: Any) -> None:
        self.megatron, self.found = megatron, list["Found"]()
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
        self.found = []
        words = self._without_foreign(words, [])
        if path is not None:
            given = [*words, *(one.flag.name for one in self.found)]
            words += self._without_foreign(self._words_of(path, given), words)
        return super().parse_known_args(words, namespace)

    def _without_foreign(self, words: list[str], over: Sequence[str]) -> list[str]:
        """``words`` without flags of Megatron-LM, which are added to `found`. over: other words, which win."""
        if not self._is_foreign(words):
            return words
        from trainers.megatron_flags.reading import split

        words, found = split(self.megatron or "", words, self._option_string_actions, over)
        self.found += found
        return words

    def _is_foreign(self, words: Sequence[str]) -> bool:
        """Whether a word may be a flag of Megatron-LM. The table of these is read only if one is."""
        flags = (word.partition("=")[0] for word in words if word.startswith("--"))
        return self.megatron is not None and any(flag not in self._option_string_actions for flag in flags)

    def _names(self) -> Iterable[str]:
        if self.megatron is None:
            return super()._names()
        from trainers.megatron_flags.table import answers

        return [*self._option_string_actions, *answers(self.megatron)]

    def _words_of(self, path: str, given: Sequence[str]) -> list[str]:
        """The content of a file as words of a command line, but for options that ``given`` has. Raises OptionError."""
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
            if action is None and (foreign := self._foreign_words(flag, parts)) is not None:
                found += [] if flag in flags else foreign
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

    def _foreign_words(self, flag: str, parts: Sequence[str]) -> list[str] | None:
        """The words of a key of a file that is a flag of Megatron-LM; None if it is none."""
        if not self._is_foreign([flag]):
            return None
        from trainers.megatron_flags.table import answers

        if (known := answers(self.megatron or "").get(flag)) is None:
            return None
        if known[1].words:
            return [flag, *parts]
        return [flag] if parts[0].lower() in ("true", "yes", "on", "1") else []


def _switch(action: argparse.Action, flag: str, key: str, value: str) -> list[str]:
    """The words that turn an option without a value on or off. value: of ``key`` in a file."""
    if isinstance(action, BooleanOptionalAction) and flag.startswith("--no-"):
        raise OptionError(f"{key}: in a file, write {action.option_strings[0].lstrip('-')}: true or false")
    if value.lower() in ("true", "yes", "on", "1"):
        return [flag]
    if value.lower() not in ("false", "no", "off", "0"):
        raise OptionError(f"--config: {key}: {value[:100]!r}: must be true or false")
    return [f"--no-{flag[2:]}"] if isinstance(action, BooleanOptionalAction) else []


def parse(
    kind: type[Settings], argv: Sequence[str] | None, prog: str, tell: Callable[[str], None] = lambda line: None,
    **more: Any,
) -> Settings:  # fmt: skip
    """The settings of dataclass ``kind`` from the flags in ``argv`` and from ``--config FILE``; flags win.

    A ``kind`` with a ``megatron`` takes Megatron-LM's flags, too (`Parser`). argv: None for the arguments of this
    process. tell: called with lines about such flags, and about defaults that are not Megatron-LM's. more: for
    `Parser`. Raises OptionError, UsageError for a word that sets nothing (`option`, sets), and SystemExit for --help.
    """
    command: str | None = getattr(kind, "megatron", None)
    parser = parser_of(kind, prog, **({} if command is None else {"megatron": command}) | more)
    read = vars(parser.parse_args(argv))
    read.pop("config")
    given = {name: value for name, value in read.items() if value is not None}
    values: dict[str, Any] = {}
    for item in fields(kind):
        if item.metadata["words"] and len(given.get(item.name, ())) == 1:
            (given[item.name],) = given[item.name]
        if item.metadata["sets"] is not None and item.name in given:
            values |= item.metadata["sets"](kind, given[item.name], given.get)
    config = kind(**values | given)
    if command is None:
        return config
    made = dict[str, Any]()
    if parser.found:  # Megatron-LM's flags, whose table is read only if there are any
        from trainers.megatron_flags.reading import remarks, settle

        made = settle(command, parser.found, given, _values_of(config))
        config = kind(**values | given | made)
        for line in remarks(parser.found, made, _values_of(config)):
            tell(line)
    from trainers.megatron_flags.defaults import remark

    named = {one.flag.name[2:].replace("-", "_") for one in parser.found}
    if line := remark(command, {*values, *given, *made, *named}, _values_of(config)):
        tell(line)
    return config


def _values_of(settings: Settings) -> Callable[[str], Any]:
    """The value of a setting by the name of its field; None where there is no such field."""
    return lambda name: getattr(settings, name, None)


def parser_of(kind: type[DataclassInstance], prog: str, **more: Any) -> Parser:
    """A parser of the options of dataclass ``kind``: an option that is not given is None. more: for `Parser`.

    It checks no ranges; `require_ranges` does.
    """
    parser, hints = Parser(prog=prog, **more), typing.get_type_hints(kind)
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
        return f"--{found[1].replace('_', '-')} {found[2]}" if found[1] in names else found[0]

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
        _require_range(given(settings, item.name), value, ranges[item.name])


def _require_range(name: str, value: Any, ranges: Sequence[ValidRange]) -> None:
    """Raise OptionError, which begins with ``name``, unless ``value`` is in all ranges. None is in all."""
    for valid in ranges if value is not None else ():
        if not valid.holds(value):
            raise OptionError(f"{name}: {valid.text}")
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise OptionError(f"{name}: must be below 2**63")


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
