"""mkdocs: the results of ``bench/results`` become pages of the site, links lead there, flags become tables."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

RESULTS = "bench/results"
WITH_FLAGS = runpy.run_path(str(Path(__file__).with_name("flags.py")))["with_flags"]
#: a link of a page to a file of ``bench/results``, which lies outside of ``docs``
LINK = re.compile(rf"\]\((?P<up>(?:\.\./)+){RESULTS}/")


def on_files(files: Files, config: Any) -> Files:
    """Add the tables, rows, pictures and predictions of ``bench/results`` as ``results/*``."""
    for path in sorted((Path(config.config_file_path).parent / RESULTS).glob("*")):
        if path.suffix in (".md", ".png", ".json", ".csv"):
            files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Turn ``](../bench/results/x.md)`` into ``](results/x.md)``: one folder less to leave. Add the tables of flags."""
    markdown = WITH_FLAGS(markdown).replace("](../../docs/", "](../")  # a result's link to a page
    return LINK.sub(lambda link: f"]({link['up'].removeprefix('../')}results/", markdown)
