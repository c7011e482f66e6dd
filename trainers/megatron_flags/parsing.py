"""Settings from a command line that may also have flags of Megatron-LM."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from commengine.options.declared import parser_of, values_of
from commengine.options.parser import TRUE

from .defaults import remark

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from .reading import Found

Settings = TypeVar("Settings", bound="DataclassInstance")


class MegatronFlags:
    """The flags of Megatron-LM that a command takes: `commengine.options.parser.Foreign`.

    command: one of `answers.COMMANDS`. found: the flags of a command line. The table of them is imported when a word
    may be one.
    """

    def __init__(self, command: str) -> None:
        self.command, self.found = command, list["Found"]()

    def names(self) -> Iterable[str]:
        """See `Foreign.names`."""
        from .table import answers

        return answers(self.command)

    def without(self, words: Sequence[str], own: Collection[str], over: Sequence[str]) -> list[str]:
        """See `Foreign.without`."""
        from .reading import split

        kept, found = split(self.command, words, own, over)
        self.found += found
        return kept

    def given(self) -> Iterable[str]:
        """See `Foreign.given`."""
        return [one.flag.name for one in self.found]

    def words(self, flag: str, parts: Sequence[str]) -> list[str] | None:
        """See `Foreign.words`."""
        from .table import answers

        if (known := answers(self.command).get(flag)) is None:
            return None
        if known[1].words:
            return [flag, *parts]
        return [flag] if parts[0].lower() in TRUE else []


def parse(
    kind: type[Settings], argv: Sequence[str] | None, prog: str, *, megatron: str | None,
    implied: Callable[[Callable[[str], Any]], Mapping[str, Any]], tell: Callable[[str], None],
) -> Settings:  # fmt: skip
    """As `commengine.options.declared.parse`, and with the flags of Megatron-LM that the command ``megatron`` takes.

    implied: gives the fields that the words of the command line set; it is called with a function that tells the value
    of an option by its field's name, None if it is not given. tell: called with lines about Megatron-LM's flags, and
    about defaults that are not Megatron-LM's.
    """
    flags = None if megatron is None else MegatronFlags(megatron)
    given = values_of(kind, parser_of(kind, prog, flags), argv)
    made = implied(given.get)
    config = kind(**{**made, **given})
    if flags is None:
        return config
    found, settled = flags.found, dict[str, Any]()
    if found:
        from .reading import remarks, settle

        settled = settle(flags.command, found, given, _value_of(config))
        config = kind(**{**made, **given, **settled})
        for line in remarks(found, settled, _value_of(config)):
            tell(line)
    named = {one.flag.name[2:].replace("-", "_") for one in found}
    if line := remark(flags.command, {*given, *made, *settled, *named}, _value_of(config)):
        tell(line)
    return config


def _value_of(settings: DataclassInstance) -> Callable[[str], Any]:
    """The value of a setting by the name of its field; None where there is no such field."""
    return lambda name: getattr(settings, name, None)
