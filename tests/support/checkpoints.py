"""Changing checkpoints as another version, or somebody's hand, would have written them."""

import json
from pathlib import Path
from typing import Any

from commengine.files import checksums


def rewrite_state(checkpoint: Path, state: Any, *, listed: bool = True) -> None:
    """Give a checkpoint another ``state.json``. listed: with checksums that fit it; False: without a list of them."""
    path = checkpoint / "checksums"
    written = json.dumps(state).encode()
    (checkpoint / "state.json").write_bytes(written)
    pieces = [piece for piece in checksums.read(path) if piece.name != "state.json"]
    path.unlink()
    if listed:
        pieces.append(checksums.Piece("state.json", 0, len(written), checksums.digest(written)))
        path.write_text(checksums.text(sorted(pieces)))
