"""Flags of Megatron-LM on a command line here: which words they are, what they set, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from commengine import UsageError
from commengine.options.declared import flag_of

from .answers import Flag, Verdict
from .table import answers


@dataclass(frozen=True)
class Found:
    """A flag of the table that a command line has, and its words."""

    flag: Flag
    answer: Verdict
    words: tuple[str, ...]

    @property
    def given(self) -> str:
        """As it stands on the command line."""
        return " ".join((self.flag.name, *self.words))


def split(
    command: str, words: Sequence[str], own: Collection[str], over: Sequence[str] = ()
) -> tuple[list[str], list[Found]]:
    """The words of a command line for the parser of ``command``, and the flags of the table among the others.

    A flag that only has another name there has it changed, and is left out if ``over``, other words that win, has it.
    own: the parser's flags, which are never looked up. Raises UsageError where a flag lacks its value, or contradicts
    one with its other name.
    """
    known = answers(command)
    kept, found, at = list[str](), dict[str, Found](), 0
    while at < len(words):
        word, at = words[at], at + 1
        name, has_value, value = word.partition("=")
        if not name.startswith("--") or name in own or name not in known:
            kept.append(word)
            continue
        answer, flag = known[name]
        if flag.words == 0 and has_value:
            raise UsageError(f"{word}: {name} takes no value")
        taken = [value] if has_value else []
        while not has_value and len(taken) < (flag.words if flag.words < 2 else len(words)) and at < len(words):
            if words[at].startswith("--"):
                break
            taken, at = [*taken, words[at]], at + 1
        if flag.words == 1 and not (taken and taken[0]):
            raise UsageError(f"{name}: expected a value")
        found[name] = Found(flag, answer, tuple(taken))
    winning = {word.partition("=")[0] for word in over}
    for one in [one for one in found.values() if one.answer.kind == "same"]:
        if one.answer.text.split(" ")[0] in winning:
            del found[one.flag.name]
        else:
            kept += _renamed(one, kept)
    return kept, list(found.values())


def _renamed(one: Found, kept: Sequence[str]) -> list[str]:
    """The words of this command line that a flag stands for; none where they are there already."""
    target, *fixed = one.answer.text.split(" ")
    values = fixed or list(one.words)
    for at, word in enumerate(kept):
        if word.partition("=")[0] != target:
            continue
        there = [word.partition("=")[2]] if "=" in word else list(kept[at + 1 : at + 1 + len(values)])
        if there[: len(values)] != values:
            raise UsageError(f"{one.given}: is {' '.join((target, *values))}, and {target} says {' '.join(there)}")
        return []
    return [target, *values]


def settle(
    command: str, found: Sequence[Found], given: Mapping[str, Any], value: Callable[[str], Any]
) -> dict[str, Any]:
    """The settings that the flags set, by the names of their fields.

    given: the settings that the command line has. value: of any setting, with its default. Raises UsageError, which
    says what to write, for a flag that is refused, or that contradicts a setting.
    """
    order = list(answers(command))
    made: dict[str, Any] = {}
    for one in sorted(found, key=lambda one: order.index(one.flag.name)):
        if one.answer.kind == "same":
            continue
        sets = one.answer.effect(one.flag, one.words, lambda name: made[name] if name in made else value(name))
        for name, new in sets.items():
            flag = flag_of(name)
            if name in given and given[name] != new:
                raise UsageError(f"{one.given}: is {flag} {new}, and {flag} says {given[name]}")
            if made.setdefault(name, new) != new:
                raise UsageError(f"{one.given}: is {flag} {new}, and another flag says {made[name]}")
    return made


def remarks(found: Sequence[Found], made: Mapping[str, Any], value: Callable[[str], Any]) -> Iterator[str]:
    """Yield lines: what flags stand for, and which have no effect and why.

    made: as `settle` gives it. value: of any setting of the run.
    """
    idle: dict[str, list[str]] = {}
    for one in found:
        if one.answer.kind == "same":
            target, *fixed = one.answer.text.split(" ")
            yield f"{one.given}: is {' '.join((target, *(fixed or one.words)))} here"
        elif one.answer.kind != "no effect" and one.answer.work is None:
            idle.setdefault(one.answer.idle, []).append(one.given)
        elif one.answer.work is None:
            idle.setdefault(one.answer.text, []).append(one.given)
        elif not (sets := one.answer.effect(one.flag, one.words, value)):
            idle.setdefault(one.answer.idle, []).append(one.given)
        else:
            made_here = ", ".join(f"{flag_of(name)} {made[name]}" for name in sets)
            yield f"{one.given}: is {made_here} here{one.answer.how and f', {one.answer.how}'}"
    for why, flags in idle.items():
        yield f"no effect here: {', '.join(flags)} ({why})"
