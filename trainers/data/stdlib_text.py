"""English text that every machine with Python has: the documentation inside the standard library.

It is about 2 MB for CPython 3.11: the topics of the language reference behind ``help("topic")``, and the docstrings of
the modules. That is enough to train a small model on real text if nothing can be downloaded. Its licence is the PSF's.
The text depends only on the Python version.
"""

from __future__ import annotations

import ast
import inspect
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

# Characters. A shorter document is usually a line such as "Wrapper for X".
_SHORTEST = 200
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_SKIPPED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


def documents() -> Iterator[str]:
    """One document per help topic, then one per module, each group in the order of its names.

    A module's document is its docstrings, dedented, in the order of the source, separated by blank lines. A text that
    was seen before is left out, so that no held-out document repeats a training document. Modules are parsed, never
    imported. A document of fewer than 200 characters is skipped, and a module that cannot be read or parsed is skipped.
    """
    seen: set[str] = set()
    yield from _topics(seen)
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        if _SKIPPED.isdisjoint(path.relative_to(root).parts):
            text = "\n\n".join(_new_docstrings(path, seen))
            if len(text) >= _SHORTEST:
                yield text + "\n"


def _topics(seen: set[str]) -> Iterator[str]:
    try:
        from pydoc_data.topics import topics  # a module of one dict, which some distributions leave out
    except ImportError:
        return
    for name in sorted(topics):
        text = topics[name].strip()
        if len(text) >= _SHORTEST and text not in seen:
            seen.add(text)
            yield text + "\n"


def _new_docstrings(path: Path, seen: set[str]) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in the library's strings
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            return
    nodes = (node for node in ast.walk(tree) if isinstance(node, _DOCUMENTED))
    for node in sorted(nodes, key=lambda node: getattr(node, "lineno", 0)):
        text = ast.get_docstring(node, clean=False)
        text = inspect.cleandoc(text).strip() if text else ""
        # A lone surrogate is legal in a Python string, but it is no text.
        if text and text not in seen and text.encode(errors="ignore").decode() == text:
            seen.add(text)
            yield text
