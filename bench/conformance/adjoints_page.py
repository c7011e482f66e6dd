"""The page of ``adjoints``: a table for each module, and the smallest example of each answer that is not yes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.conformance.jobs import Answer


def page(answers: Sequence[Answer], checks: Sequence[str], problems: Mapping[str, str]) -> list[str]:
    """The lines of the tables. problems: by module, why it could not be asked."""
    lines: list[str] = []
    for module in dict.fromkeys(one.module for one in answers):
        own = [one for one in answers if one.module == module]
        ranks = sorted({one.ranks for one in own})
        lines += ["", f"## {module}, on {', '.join(map(str, ranks))} ranks", ""]
        lines += [f"| operator | {' | '.join(checks)} |", "|---" * (len(checks) + 1) + "|"]
        for operator in dict.fromkeys(one.operator for one in own):
            row = [cell([one for one in own if (one.operator, one.check) == (operator, check)]) for check in checks]
            lines.append(f"| {operator} | {' | '.join(row)} |")
        lines += examples(own)
    return lines + [line for module, why in problems.items() for line in ("", f"## {module}", "", f"Not asked: {why}")]


def cell(answers: Sequence[Answer]) -> str:
    """The answers of a check on all numbers of ranks, with these numbers where the answers differ."""
    given = [one for one in answers if one.answer != "-"]
    kinds = list(dict.fromkeys(one.answer for one in given))
    if len(kinds) < 2:
        return kinds[0] if kinds else "-"
    told = {kind: ", ".join(str(one.ranks) for one in given if one.answer == kind) for kind in kinds}
    return "; ".join(f"{kind} ({ranks})" for kind, ranks in told.items())


def examples(answers: Sequence[Answer]) -> list[str]:
    """A table of the smallest example of each answer that is not yes; nothing if there is none."""
    first: dict[tuple[str, str, str], Answer] = {}
    for one in sorted(answers, key=lambda one: one.ranks):
        if one.answer not in ("yes", "-"):
            first.setdefault((one.operator, one.check, one.answer), one)
    if not first:
        return []
    rows = [
        f"| {one.operator} | {one.check} | {one.answer} | {one.ranks} | {example(one.example)} |"
        for one in sorted(first.values(), key=lambda one: (one.answer != "WRONG", one.answer))
    ]
    return ["", "| operator | check | answer | ranks | the smallest example |", "|---" * 5 + "|", *rows]


def example(found: Any) -> str:
    """An example in words."""
    if not isinstance(found, Mapping):
        return str(found or "").replace("|", "\\|")
    rows = "each rank gives" if len(set(found["rows"])) == 1 else "the ranks give"
    shapes = [f"[{n}, {found['columns']}]" for n in found["rows"]]
    given = f"{rows} {shapes[0] if 'each' in rows else ', '.join(shapes)}"
    got, true = (one if isinstance(one, str) else f"{one:.6g}" for one in (found["got"], found["true"]))
    at = f" at {found['place']}" if found["place"] else ""
    return f"{given}; {found['what']} of rank {found['rank']}{at}: {got}, true is {true}"
