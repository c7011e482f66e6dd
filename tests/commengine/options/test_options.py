"""Options: every number has a range, in every command; what is no value is named; a file is no more than flags."""

import importlib
import typing
from argparse import _SubParsersAction
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import pytest

import bench
from commengine import UsageError
from commengine.options.declared import as_flags, option, parse, ranges_of, require_ranges
from commengine.options.parser import Parser
from commengine.options.ranges import OPEN_FRACTION, AtLeastOne, OptionError, between
from trainers.cleaning.settings import CorpusSettings
from trainers.preprocess_data import PreprocessSettings
from trainers.settings.commands import BERTSettings, GPTSettings

COMMANDS = sorted(path.stem for path in Path(bench.__file__).parent.glob("[!_]*.py"))


def actions(parser: Any) -> Iterator[Any]:
    """All options of a parser and of its subcommands."""
    for action in parser._actions:
        yield action
        if isinstance(action, _SubParsersAction):
            for one in action.choices.values():
                yield from actions(one)


def parsers() -> Iterator[tuple[str, Any]]:
    for name in COMMANDS:
        yield name, importlib.import_module(f"bench.{name}").parser()


def test_every_number_of_every_command_has_a_range() -> None:
    found = [(name, action) for name, parser in parsers() for action in actions(parser) if action.type in (int, float)]
    assert len(found) > 20
    assert [f"{name} {action.option_strings}" for name, action in found if not action.ranges] == []
    for name, action in found:  # and its default is in it
        value = action.default
        for one in value if isinstance(value, list) else [value]:
            assert all(one is None or valid.holds(one) for valid in action.ranges), (name, action.option_strings)


@pytest.mark.parametrize(
    "kind, least", [(GPTSettings, 26), (BERTSettings, 26), (PreprocessSettings, 3), (CorpusSettings, 4)]
)
def test_every_number_of_a_run_has_a_range(kind: type, least: int) -> None:
    hints = typing.get_type_hints(kind)
    numbers = [item for item in fields(kind) if {int, float} & {hints[item.name], *typing.get_args(hints[item.name])}]
    assert len(numbers) >= least
    assert [item.name for item in numbers if not ranges_of(kind)[item.name]] == []
    require_ranges(kind())


@dataclass(frozen=True)
class Example:
    """Settings of each kind."""

    name: str | None = option(None, "a word")
    count: AtLeastOne = option(3, "a number")
    share: Annotated[float, OPEN_FRACTION] = option(0.5, "a share")
    fast: bool = option(False, "a flag")
    parts: str | Sequence[str] | None = option(None, "words", words=True)


def example(*words: str) -> Example:
    found = parse(Example, words, "example")
    require_ranges(found)
    return found


def refusal(*words: str) -> str:
    with pytest.raises(UsageError) as caught:
        example(*words)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 2200
    return text


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--name=--"], "--name: expected a value, and -- is none"),
        (["--parts=--"], "--parts: expected a value, and -- is none"),
        (["--count=--"], "--count: expected a value, and -- is none"),
        (["--name", ""], "--name: expected a value, and got an empty one"),
        (["--name="], "--name: expected a value, and got an empty one"),
        (["--parts", "a", ""], "--parts: expected a value, and got an empty one"),
        (["--config", ""], "--config: expected a value, and got an empty one"),
        (["--name", "a\0b"], "--name: 'a\\x00b' is not text"),
        (["--name", "\udce9"], "--name: '\\udce9' is not text in UTF-8"),
        (["--count", "0"], "--count 0: must be at least 1"),
        (["--count", str(2**63)], "--count 9223372036854775808: must be below 2**63"),
        (["--count", "9" * 10**6], "--count"),
        (["--count", "x" * 10**6], "--count"),
        (["--" + "x" * 10**6], "more characters"),
        (["--share", "nan"], "--share nan: must be a number above 0 and below 1"),
        (["--share", "1"], "--share 1.0: must be a number above 0 and below 1"),
        (["--fast=--"], "--fast"),
        (["--fast=yes"], "--fast"),
        (["--cou", "3"], "--cou"),
        (["--cout", "3"], "unrecognized arguments: --cout 3 (is --count meant?)"),
    ],
)
def test_what_is_no_value_is_named_in_one_short_line(words: list[str], problem: str) -> None:
    assert problem in refusal(*words)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("count: 0", "--count 0: must be at least 1"),
        ("count: [1]", "--config: count: want one value, got a list"),
        ("fast: [true]", "--config: fast: want one value, got a list"),
        ("fast: maybe", "fast"),
        ("fast: {a: b}", "--config: fast: want one value"),
        ("parts: [a, [b]]", "--config: parts: want one value, or a list"),
        ("parts: [a, null]", "--config: parts: want one value, or a list of values without null"),
        ("name: a\nname: b", "the key 'name' is there twice"),
        ("on: true", "'True' is no key"),
        ("no-fast: true", "in a file, write fast: true or false"),
        ("config: a.yaml", "a.yaml: config: is no option of a file"),
        ("help: true", "a.yaml: help: is no option of a file"),
        ("7: a", "is no key"),
        ("name: ''", "--name: expected a value, and got an empty one"),
        ('name: "\\0"', "--name: '\\x00' is not text"),
        ("name: --", "--name: expected a value, and -- is none"),
        ("name: [", "not YAML"),
        (f"name: {'x' * 300_000}", "has more than 262144 bytes"),
        (f"count: {'x' * 200_000}", "--count"),
    ],
)
def test_a_file_of_the_wrong_shape_is_named(tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / "a.yaml").write_text(content)
    assert problem in refusal("--config", str(tmp_path / "a.yaml"))


def test_a_file_gives_what_the_same_words_give(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("name: 010\ncount: 5\nshare: 0.25\nfast: yes\nparts: [1e3, b c]\n")
    same = example("--name", "010", "--count", "5", "--share", "0.25", "--fast", "--parts", "1e3", "b c")
    assert example("--config", str(file)) == same
    assert example("--config", str(file), "--no-fast", "--count", "7") == Example("010", 7, 0.25, False, ["1e3", "b c"])
    file.write_text("name:\ncount: null\n")
    assert example("--config", str(file)) == Example()


def test_ranges_hold_for_each_word() -> None:
    parser = Parser(prog="x")
    parser.add_argument("--depths", type=int, nargs="+", valid=between(1, 9))
    assert parser.parse_args(["--depths", "1", "9"]).depths == [1, 9]
    with pytest.raises(OptionError, match=r"^--depths 10: must be at least 1, and at most 9$"):
        parser.parse_args(["--depths", "1", "10"])


def test_fields_in_messages_become_flags() -> None:
    words = "count=3 is not a share=0.5 of size=4"
    assert as_flags(words, Example) == "--count 3 is not a --share 0.5 of size=4"
