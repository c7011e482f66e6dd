"""Pictures that are embedded in the page, each once."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.files.reading import InputFileError, read_json, require_regular

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: kinds of pictures: of several with one stem, the first is shown
PICTURES = {".svg": "image/svg+xml", ".png": "image/png", ".jpg": "image/jpeg"}


def embedded(data: bytes, kind: str, name: str) -> str:
    """The HTML of an image that is part of the page."""
    return f'<img alt="{html.escape(name)}" src="data:{kind};base64,{base64.b64encode(data).decode()}">'


def drawing(figure: Figure, name: str) -> str:
    """The HTML of a plot, without the SVG prologue, which names a DTD on another server."""
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg")
    text = drawn.getvalue()
    return embedded(text[text.index("<svg") :].encode(), PICTURES[".svg"], name)


def of_stem(files: Mapping[str, Path], shown: set[bytes]) -> Iterator[str]:
    """Yield the HTML of the picture among the files of one stem, unless the page has the same one already.

    files: by their suffixes. shown: the pictures of the page so far, to which this one is added.
    """
    for kind in PICTURES:
        if kind in files:
            data = require_regular(files[kind]).read_bytes()
            if data not in shown:
                shown.add(data)
                yield embedded(data, PICTURES[kind], files[kind].stem)
            return


def is_drawn(path: Path, pictures: Collection[str]) -> bool:
    """Whether the folder has the picture of a JSON file: one of its stem, or the one that its command drew.

    pictures: the names of the folder's pictures.
    """
    if any(path.with_suffix(kind).name in pictures for kind in PICTURES):
        return True
    try:
        data: Any = read_json(path)
    except InputFileError:  # `measured` says so
        return False
    words = str(data.get("command", "")).replace("=", " ").split() if isinstance(data, dict) else []
    return any(word == "--plot" and Path(name).name in pictures for word, name in pairwise(words))
