"""The kinds of answers to a flag of Megatron-LM that a command here does not have, and how a table writes them.

A flag is written as on Megatron-LM's command line, without the dashes: ``use-flash-attn`` takes no value,
``ckpt-step=`` takes one, ``rotary-percent=1.0`` takes one whose default there is 1.0, and ``profile-ranks...`` takes
any number of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from commengine import UsageError

#: the commands that take the table, by `parsing.parse`'s name of them
COMMANDS = ("gpt", "bert", "finetune")

#: what the words of a flag, and the settings by the names of their fields, come to: values of other settings
Work = Callable[[Sequence[str], Callable[[str], Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class Flag:
    """One flag. words: how many it takes: 0, 1, or 2 for any number. default: that of Megatron-LM, or None."""

    name: str
    words: int
    default: str | None = None

    @classmethod
    def of(cls, spelt: str) -> Flag:
        """The flag that a word of a table spells."""
        name, has_value, default = spelt.removesuffix("...").partition("=")
        return cls(f"--{name}", 2 if spelt.endswith("...") else int(bool(has_value)), default or None)


@dataclass(frozen=True)
class Verdict:
    """The answer to some flags.

    kind: "no effect": taken, and ``text`` says why; "same": stands for the words ``text`` of a command line here;
    "set": `work` gives other settings their values, and ``text`` says which; "instead": refused, and ``text`` says what
    to write; "not here": refused, and ``text`` says why. A flag with Megatron-LM's default, or with one of ``valid``,
    asks for nothing and is taken. idle: why a flag has no effect that is taken so, or whose `work` sets nothing.
    how: more about what a flag sets. commands: those that the answer holds for.
    """

    kind: str
    text: str
    flags: tuple[Flag, ...]
    valid: tuple[str, ...] = ()
    work: Work | None = None
    idle: str = "asks for what a run here does anyway"
    how: str = ""
    commands: tuple[str, ...] = COMMANDS

    def effect(self, flag: Flag, words: Sequence[str], value: Callable[[str], Any]) -> Mapping[str, Any]:
        """The settings that ``flag`` with these words sets here, by the names of their fields; none for no effect.

        value: of a setting, by the name of its field. Raises UsageError, which says what to write, where it is refused.
        """
        if self.kind == "no effect":
            return {}
        given = " ".join((flag.name, *words))
        if self.work is not None:
            try:
                return self.work(words, value)
            except UsageError as error:
                raise UsageError(f"{given}: {error}") from None
        asks_nothing = [*self.valid, *([] if flag.default is None else [flag.default])]
        if words and all(any(_equal(word, one) for one in asks_nothing) for word in words):
            return {}
        valid = f"; valid: {', '.join(dict.fromkeys(asks_nothing))}" if asks_nothing else ""
        if self.kind == "instead":
            raise UsageError(f"{given}: a flag of Megatron-LM; use here {self.text}{valid}")
        raise UsageError(f"{given}: a flag of Megatron-LM that is not here: {self.text}{valid}")


def _equal(word: str, valid: str) -> bool:
    try:
        return float(word) == float(valid)
    except ValueError:
        return word == valid


def _flags(spelt: str) -> tuple[Flag, ...]:
    return tuple(map(Flag.of, spelt.split()))


def no_effect(why: str, spelt: str, commands: Sequence[str] = COMMANDS) -> Verdict:
    """Flags that change no number of a training run here."""
    return Verdict("no effect", why, _flags(spelt), commands=tuple(commands))


def without(switch: str, spelt: str) -> Verdict:
    """Flags that mean nothing, there or here, without another flag, which has an answer of its own."""
    return no_effect(f"means nothing without {switch}", spelt)


def same(words: str, spelt: str, commands: Sequence[str] = COMMANDS) -> Verdict:
    """Flags of which each stands for ``words``, followed by its value if it has one."""
    return Verdict("same", words, _flags(spelt), commands=tuple(commands))


def valid(values: str, why: str, spelt: str, commands: Sequence[str] = COMMANDS) -> Verdict:
    """Flags of which the ``values``, and the default, are what a run does here; any other one is refused."""
    return Verdict("not here", why, _flags(spelt), tuple(values.split()), commands=tuple(commands))


def instead(write: str, spelt: str, commands: Sequence[str] = COMMANDS) -> Verdict:
    """Flags that are refused in favour of something else."""
    return Verdict("instead", write, _flags(spelt), commands=tuple(commands))


def not_here(why: str, spelt: str, commands: Sequence[str] = COMMANDS) -> Verdict:
    """Flags that are refused, unless they have their default."""
    return Verdict("not here", why, _flags(spelt), commands=tuple(commands))


def computed(
    text: str, work: Work, spelt: str, commands: Sequence[str] = COMMANDS, idle: str = Verdict.idle, how: str = ""
) -> Verdict:  # fmt: skip
    """Flags of which ``work`` tells what they set, or why they are refused. text: for the page."""
    return Verdict("set", text, _flags(spelt), work=work, idle=idle, how=how, commands=tuple(commands))
