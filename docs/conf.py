"""Sphinx: the documents and the API reference as web pages, in site/. Run by make docs.

The pages are plain markdown that a code forge shows, too. Two marks become more on the site. In the place of
``<!-- flags of MODULE -->`` stands a table of the flags of a command. Between ``<!-- tabs -->`` and
``<!-- end of tabs -->`` each line of bold words alone begins a tab.
"""

from __future__ import annotations

import inspect
import re
import runpy
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent  # also the folder of the sources, so that links to bench/results lead where they lead on a forge
PACKAGES = ("commengine", "tplayers", "trainers", "bench")
sys.path.insert(0, str(ROOT))

WITH_FLAGS = runpy.run_path(str(DOCS / "flags.py"))["with_flags"]
RST = runpy.run_path(str(DOCS / "docstrings.py"))["rst"]

#: the kinds of objects that stand in no class
TOP = ("class", "exception", "function", "data")

#: the navigation: a caption, and its pages with the titles that they have there
NAV = {
    "": {
        "Install, and a first run": "install",
        "What it is, and is not": "scope",
        "What is stable": "stability",
    },
    "Train": {
        "Training": "training",
        "Megatron-LM's flags": "megatron-flags",
        "Sizes, memory and speed": "sizes",
        "The Llama family": "llama",
        "Mixtures of experts": "moe",
        "The same bits at any layout": "same-bits",
        "Other people's weights": "weights",
        "Evaluation": "evaluation",
        "Generation": "generation",
        "A corpus": "corpus",
        "Fine-tuning": "fine-tuning",
        "The paper, item by item": "paper",
    },
    "Inside MPI programs": {
        "Inside an MPI program": "embedding",
        "Long sequences": "context",
        "Gradients between programs": "bridge",
        "Two programs in one job": "two-programs",
        "Any module on several replicas": "data-parallel",
        "Networks on split fields": "fields",
        "Gradients through communication": "data-movement",
        "Examples": "examples",
    },
    "Measure": {
        "What collectives cost": "cost-study",
        "Rows to experts": "rows-to-experts",
        "Predicting a step": "prediction",
        "Traces of other tools": "traces",
        "Promises of communication": "conformance",
        "Reference": "measuring-reference",
    },
    "Clusters": {
        "Clusters": "clusters",
        "MPIs": "mpis",
        "Pipeline stages": "pipeline",
        "GPUs": "gpus",
        "Runs of days": "long-runs",
        "A job hangs": "hangs",
        "Environment variables": "environment-variables",
        "Packages for clusters": "packaging",
    },
    "For developers": {
        "Design": "design",
        "Proof, and faults on purpose": "proof",
        "Extending": "extending",
        "Decisions": "decisions/index",
    },
    "Reference": {
        "commengine": "reference/commengine",
        "commengine.cost": "reference/cost",
        "tplayers": "reference/tplayers",
        "tplayers.formulas": "reference/formulas",
        "trainers": "reference/trainers",
        "bench": "reference/bench",
    },
}
#: the pages under decisions/index
DECISIONS = (
    "engine", "devices", "failures", "layers", "fields", "gradients", "runs", "text", "measuring", "tests", "site",
)  # fmt: skip

project = html_title = "commengine"
root_doc = "docs/index"
include_patterns = ["docs/**", "bench/results/**", "packaging/**", "examples/**", "*.md"]
exclude_patterns = [".*", "runs", "build", "dist", "site", "tests", *PACKAGES[:3]]  # not walked through
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_design", "sphinx_copybutton"]
smartquotes = False

myst_heading_anchors = 6
myst_enable_extensions = ["colon_fence"]

default_role = "py:obj"  # a name in single backticks leads to what it names, if that is in the reference
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # torch's of a forward are for other readers
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 88
add_module_names = False

# Nothing is loaded from elsewhere, and all works in files, without a server.
html_theme = "furo"
html_extra_path = ["site_root"]  # index.html leads to docs/index.html
html_show_search_summary = False  # it would fetch pages, which a browser refuses in files
html_copy_source = False
html_domain_indices = False
html_show_sphinx = False

TITLE = re.compile(r'^```(?P<language>\w+) title="(?P<title>[^"]+)"$', re.MULTILINE)
TABS = re.compile(r"^<!-- tabs -->\n(?P<text>.*?)^<!-- end of tabs -->$", re.MULTILINE | re.DOTALL)
TAB = re.compile(r"^\*\*(?P<name>[^*\n]+)\*\*$", re.MULTILINE)


def tabs(text: str) -> str:
    """The tabs of ``text``; a choice of one holds for all tabs of the same name."""
    _, *parts = TAB.split(text)
    items = zip(parts[::2], parts[1::2], strict=True)
    return "\n".join([":::::{tab-set}", *(f"::::{{tab-item}} {n}\n:sync: {n}\n{t}\n::::" for n, t in items), ":::::"])


def navigation() -> str:
    """The hidden tables of contents behind the page docs/index."""
    tables = [
        "```{toctree}\n:hidden:\n"
        + f":caption: {caption}\n" * bool(caption)
        + "\n"
        + "\n".join(f"{title} <{page}>" for title, page in pages.items())
        + "\n```\n"
        for caption, pages in NAV.items()
    ]
    return "\n" + "\n".join(tables)


def on_source(_: Any, page: str, source: list[str]) -> None:
    """Turn what the forge shows as plain markdown into more."""
    text = WITH_FLAGS(source[0])
    text = TITLE.sub(r"```{code-block} \g<language>\n:caption: \g<title>\n", text)
    text = TABS.sub(lambda found: tabs(found["text"]), text)
    if page == root_doc:
        text += navigation()
    if page == "docs/decisions/index":
        text += "\n```{toctree}\n:hidden:\n\n" + "\n".join(DECISIONS) + "\n```\n"
    source[0] = text


def on_page(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """The navigation of a page, from NAV: the theme asks for it, and Sphinx would copy all headings of all pages."""

    def link(title: str, other: str, level: int, below: str = "") -> str:
        current = " current" if other == page else ""
        href = "#" if current else app.builder.get_relative_uri(page, other)
        anchor = f'<a class="reference internal{current}" href="{href}">{title}</a>'
        return f'<li class="toctree-l{level}{current}">{anchor}{below}</li>'

    def toctree(**_: object) -> str:
        parts = []
        for caption, pages in NAV.items():
            if caption:
                parts.append(f'<p class="caption" role="heading"><span class="caption-text">{caption}</span></p>')
            parts.append("<ul>")
            for title, name in pages.items():
                inner = [link(one.capitalize(), f"docs/decisions/{one}", 2) for one in DECISIONS]
                below = f"<ul>{''.join(inner)}</ul>" if name == "decisions/index" else ""
                parts.append(link(title, f"docs/{name}", 1, below))
            parts.append("</ul>")
        return "".join(parts)

    context["toctree"] = toctree


def on_read(app: Any, _: Any) -> None:
    """Results, and the pages beside docs, are reached from the pages that name them, and not from the navigation."""
    if not app.env.docname.startswith("docs/"):
        app.env.metadata[app.env.docname]["orphan"] = ""


def on_docstring(_: Any, kind: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Make a list of the parameters of a function, or of the attributes and parameters of a class."""
    if kind == "data" and inspect.getdoc(found) == inspect.getdoc(type(found)):
        lines.clear()  # they are of the value's type
        return
    known = {"forward", *parameters(found)}
    if kind in ("class", "exception"):
        known |= {*dir(found), *getattr(found, "__annotations__", ()), *parameters(getattr(found, "forward", None))}
    lines[:] = RST(lines, known)


def parameters(of: Any) -> set[str]:
    """The names of the parameters of ``of``, if it is something to call."""
    try:
        return set(inspect.signature(of).parameters)
    except (TypeError, ValueError):
        return set()


def on_missing(app: Any, env: Any, node: Any, shown: Any) -> Any:
    """A name of ours without its module, or with that where it is defined, leads to the one public name like it."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    if target.split(".")[0] in PACKAGES:
        target = target.split(".")[-1]
    objects = env.domains["py"].objects
    found = [
        name
        for name, entry in objects.items()
        if name.endswith(f".{target}") and ("." in target or entry.objtype in TOP)
    ]
    if len(found) != 1:
        return None
    return env.domains["py"].resolve_xref(env, node["refdoc"], app.builder, "obj", found[0], node, shown)


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", on_source)
    app.connect("doctree-read", on_read)
    app.connect("html-page-context", on_page, priority=100)  # before the theme
    app.connect("autodoc-process-docstring", on_docstring)
    app.connect("missing-reference", on_missing)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
