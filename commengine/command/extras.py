"""The packages that this project's extras bring, and the line about one that is missing.

``commengine`` and ``tplayers`` need torch, numpy and mpi4py alone, and so does ``bench.doctor``. The training commands
need the extra ``train``, and the studies ``study``. This module imports the standard library alone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType

from .table import command_of

#: the packages of each extra, by the names under which they are imported; ``study`` has those of ``train``, too
PACKAGES = {
    "train": ("jinja2", "matplotlib", "pydantic", "safetensors", "tokenizers", "tqdm", "xxhash", "yaml"),
    "study": ("markdown_it",),
}


def missing(error: BaseException, extra: str = "") -> str | None:
    """One line about a package that an extra brings and that cannot be imported; None for any other error.

    extra: the one to name, instead of the smallest that has the package.
    """
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    package = error.name.partition(".")[0]
    found = [name for name, packages in PACKAGES.items() if package in packages]
    if not found:
        return None
    return f"{package} is not installed; pip install 'commengine[{extra or found[0]}]' brings it"


def say_what_is_missing(extra: str) -> None:
    """From now on, a missing package of an extra ends this process with one line, and no traceback.

    extra: the one that the line names. Where a launcher started several processes, the first one alone says it.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        line = missing(error, extra)
        if line is None:
            before(kind, error, trace)
            return
        from commengine.startup.tasks import task_number

        if task_number() == 0:
            words, listed = sys.orig_argv, command_of(sys.orig_argv[2:])  # of commengine COMMAND, or of -m MODULE
            module = words[words.index("-m") + 1] if "-m" in words[:-1] else listed and listed.module
            program = f"python -m {module}" if module else Path(sys.argv[0]).name
            print(f"{program}: error: {line}", file=sys.stderr, flush=True)

    sys.excepthook = hook
