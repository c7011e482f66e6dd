"""The page that bench.doctor prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, PackageLoader

from bench.checkup.findings import Finding, by_host, cores_of
from bench.command.machine import heading

TEMPLATE = Environment(loader=PackageLoader("bench", "checkup")).get_template("page.md.jinja")  # of markdown


def page(result: dict[str, Any], found: Sequence[Finding]) -> str:
    """The page in markdown. result: what the command writes as JSON. found: its findings."""
    hosts = by_host(result["rank_facts"])
    skipped = {(one["group"], one["transport"], one["reason"]): one for one in result["skipped"]}  # each once
    return TEMPLATE.render(
        heading="\n".join(heading("Doctor", result)), result=result, hosts=hosts, found=found,
        cores={host: len(cores_of(here)) for host, here in hosts.items()}, skipped=skipped.values(),
    )  # fmt: skip
