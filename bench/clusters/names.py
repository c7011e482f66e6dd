"""The names of the machines for bench.predict. Importing this imports no torch."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
#: the name of the user's own machine, and its file, which the command writes into the user's folder
OWN, OWN_FILE = "this-machine", "this-machine.yaml"


def names() -> list[str]:
    """The names of the clusters in this folder."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))
