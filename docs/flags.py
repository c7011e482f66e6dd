"""Tables of flags, made from the code: ``<!-- flags of trainers.pretrain_gpt -->`` becomes one on the site."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from dataclasses import fields

#: a command whose module has the type of its settings as CONFIG
MARK = re.compile(r"<!-- flags of (?P<module>[\w.]+) -->")


def with_flags(markdown: str) -> str:
    """``markdown`` with a table in the place of each mark."""
    return MARK.sub(lambda mark: "\n".join(table(mark["module"])), markdown)


def table(module: str) -> Iterator[str]:
    """Yield markdown: a row for each flag of the command ``module``."""
    from commengine.options.declared import flag_of  # the other pages need no torch

    yield "| flag | default | effect |"
    yield "|---|---|---|"
    for item in fields(importlib.import_module(module).COMMAND.settings):
        default = "" if item.default is None else f"`{item.default}`"
        text = item.metadata["help"].replace("|", r"\|").replace("<", "&lt;")
        yield f"| `{flag_of(item.name)}` | {default} | {text} |"
