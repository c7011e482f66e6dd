"""Changing checkpoints as another version, or somebody's hand, would have written them."""

import json
from pathlib import Path
from typing import Any

from trainers.files import checksums


def rewrite_state(checkpoint: Path, state: Any, *, listed: bool = True) -> None:
    """Give a checkpoint another ``state.json``. listed: with checksums that fit it; False: without a list of them."""
    path = checkpoint / "checksums"
    (checkpoint / "state.json").write_text(json.dumps(state))
    names = [piece.name for piece in checksums.read(path)]
    path.unlink()
    if listed:
        pieces = [piece for name in sorted(set(names)) for piece in checksums.of_file(checkpoint / name)]
        path.write_text(checksums.text(pieces))
