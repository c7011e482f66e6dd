"""The page of ``bits``: a table of yes and no for each operation, and an example of each no."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from bench.conformance.sums import BETWEEN, QUESTIONS

#: whom a row asks, where its name does not say it
WHOM = (
    "mpi4py: over the MPI of the environment; engine: private tensors of commengine; shared: tensors of its "
    "`Communicator.empty`, in shared memory; with -rank and -tree: `Communicator(..., order=)`"
)


def page(
    answers: Sequence[Mapping[str, Any]], problems: Mapping[str, str], given: Mapping[str, Any], ranks: int,
    beside: Sequence[Mapping[str, Any]],
) -> list[str]:  # fmt: skip
    """The tables, and an example of each no.

    given: the options. beside: the answers of the same transports on other nodes.
    """
    lines = [
        f"- {ranks} ranks, {given['dtype']}, messages (of a reduce_scatter, the part of a rank) of up to "
        f"{given['max_bytes']}; numbers with other sums in each usual order of additions",
        "- yes: no difference was found; no: there is an example of it below; -: not asked",
        f"- {WHOM}",
        "",
    ]
    lines += ["| column | yes means |", "|---|---|", *(f"| {name} | {text} |" for name, text in names().items()), ""]
    examples = []
    for operation in dict.fromkeys(one["operation"] for one in answers):
        lines += [f"## {operation}", "", f"| transport | {' | '.join(names())} |", "|---" * (len(names()) + 1) + "|"]
        own = [one for one in answers if one["operation"] == operation]
        for transport, found in groupby(own, lambda one: one["transport"]):
            elsewhere = [o for o in beside if (o["transport"], o["operation"]) == (transport, operation)]
            row, no = verdicts([*found], elsewhere)
            lines.append(f"| {transport} | {' | '.join(row)} |")
            examples += [f"| {transport} | {operation} | {name} | {example} |" for name, example in no.items()]
        lines.append("")
    if examples:
        lines += [
            "## An example of each no",
            "",
            "The smallest message that showed it; bits of the sum in hexadecimal.",
            "",
        ]
        lines += ["| transport | operation | column | example |", "|---|---|---|---|", *examples, ""]
    return lines + [f"- {name}: not asked: {text}" for name, text in problems.items()]


def names() -> dict[str, str]:
    """All columns, each with what yes means."""
    return QUESTIONS | BETWEEN


def verdicts(
    ranks: Sequence[Mapping[str, Any]], elsewhere: Sequence[Mapping[str, Any]]
) -> tuple[list[str], dict[str, str]]:
    """The cells of a row, and by column an example of each no. ranks: the answers of all ranks to one operation."""
    no: dict[str, str] = {}
    asked = set(ranks[0]["asked"])
    for one in ranks:
        for name, example in one["no"].items():
            no.setdefault(name, f"{example} (rank {one['rank']})")
    having = [one for one in ranks if any(one["seen"].values())]
    if len(having) > 1:
        asked.add("ranks")
        no |= difference("ranks", having[0]["seen"], [(f"rank {one['rank']}", one["seen"]) for one in having[1:]])
    there = {one["rank"]: one["seen"] for one in elsewhere}
    if there:
        asked.add("nodes")
        for one in having:
            no = difference("nodes", one["seen"], [("other nodes", there.get(one["rank"], {}))]) | no
    return ["no" if name in no else "yes" if name in asked else "-" for name in names()], no


def difference(
    name: str, seen: Mapping[str, list[str]], others: Sequence[tuple[str, Mapping[str, list[str]]]]
) -> dict[str, str]:
    """The first element that differs in the smallest message, as an example."""
    for count, bits in seen.items():
        for who, other in others:
            for at, (mine, theirs) in enumerate(zip(bits, other.get(count, []), strict=False)):
                if mine != theirs:
                    return {name: f"element {at} of {count} is {mine}, and on {who} {theirs}"}
    return {}
