"""Content of files: its checks by a pydantic model. It alone imports pydantic, which is of the extra ``train``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from .reading import RESULTS_BYTES, InputFileError, read_text

Checked = TypeVar("Checked", bound=BaseModel)
_SHOWN = 100  # characters of a key, and of a value


class ReadPart(BaseModel):
    """An object in a file, of which some keys are read. They have the types that they say, and numbers are finite."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


class FilePart(ReadPart):
    """The same without other keys than those that are read."""

    model_config = ConfigDict(extra="forbid")


def checked(kind: type[Checked], data: Any) -> Checked:
    """``data``, of JSON's types, as ``kind``. Raises ValueError that names the first key at fault, and its value."""
    try:
        return kind.model_validate_json(json.dumps(data))  # of JSON, so that a list may be a tuple
    except ValidationError as error:
        raise ValueError(told(error)) from None


def read_as(path: Path, kind: type[Checked], most: int = RESULTS_BYTES, fault: str = ":") -> Checked:
    """The content of a JSON file as ``kind``. Raises InputFileError that names the file and the first key at fault.

    fault: stands between the two. The file has at most ``most`` bytes.
    """
    try:
        return kind.model_validate_json(read_text(path, most))
    except ValidationError as error:
        raise InputFileError(f"{path}{fault} {told(error)}") from None


def told(error: ValidationError) -> str:
    """The first fault, such as ``node.nics=0: should be greater than or equal to 1``."""
    first = error.errors(include_url=False)[0]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).removeprefix(".")
    name = ascii(name[:_SHOWN])[1:-1]
    if first["type"] == "missing":
        return f"{name} is missing"
    if first["type"] == "extra_forbidden":
        return f"unknown: {name}"
    said = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{name}={repr(first['input'])[:_SHOWN]}: {said}" if name else said
