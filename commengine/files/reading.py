"""Reading files that a user names: text, YAML and JSON, within limits, each fault in one line that names the file.

A file must be a regular one: a pipe would wait for a writer for ever, and a device may have no end.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import yaml

#: bytes of the largest file of settings, and of the largest file of results, that is read
SETTINGS_BYTES, RESULTS_BYTES = 1 << 18, 1 << 28
#: lists and mappings within each other in a YAML file
_DEEPEST = 20
_LARGEST_INTEGER = 1 << 63
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class InputFileError(ValueError):
    """A file that a user named and that cannot be used. The message begins with its name, and is one short line."""


def require_regular(path: str | os.PathLike[str]) -> Path:
    """``path``, which must be a regular file that this process may read. Raises InputFileError."""
    found = Path(path)
    try:
        exists = found.exists()
    except (OSError, ValueError) as error:  # a name that is too long, or that has a byte of 0
        raise InputFileError(f"{str(found)[:200]!r}: not the name of a file") from error
    if found.is_dir():
        raise InputFileError(f"{found}: is a folder, not a file")
    if not found.is_file():
        is_none = "is a pipe or a device; give a regular file" if exists else "there is no such file"
        raise InputFileError(f"{found}: {is_none}")
    if not os.access(found, os.R_OK):
        raise InputFileError(f"{found}: may not be read")
    return found


def read_text(path: str | os.PathLike[str], most: int = RESULTS_BYTES) -> str:
    """The text of a regular file of UTF-8 and at most ``most`` bytes. Raises InputFileError."""
    found = require_regular(path)
    try:
        with found.open("rb") as file:
            raw = file.read(most + 1)
        if len(raw) > most:
            raise InputFileError(f"{found}: has more than {most} bytes, the most that are read of such a file")
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputFileError(f"{found}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise InputFileError(f"{found}: {error.strerror}") from error


def read_json(path: str | os.PathLike[str], most: int = RESULTS_BYTES) -> Any:
    """The value that a file of JSON holds. Raises InputFileError, also for an integer of more than 64 bits."""
    return _json(str(path), read_text(path, most))


def read_json_lines(path: str | os.PathLike[str], most: int = RESULTS_BYTES) -> list[Any]:
    """The value of each line of a file; empty lines are left out. Raises InputFileError, with the line's number."""
    lines = read_text(path, most).splitlines()
    return [_json(f"{path}: line {number}", line) for number, line in enumerate(lines, start=1) if line.strip()]


def _json(where: str, text: str) -> Any:
    try:
        return json.loads(text, parse_int=_integer)
    except RecursionError:
        raise InputFileError(f"{where}: not usable JSON: lists and objects within each other without end") from None
    except ValueError as error:
        raise InputFileError(f"{where}: not JSON: {str(error)[:200]}") from None


def _integer(digits: str) -> int:
    if len(digits) > 20 or not -_LARGEST_INTEGER <= (value := int(digits)) < _LARGEST_INTEGER:
        raise ValueError("an integer of more than 64 bits")
    return value


def read_yaml(path: str | os.PathLike[str], *, as_written: bool = False) -> dict[str, Any]:
    """The mapping that a YAML file holds: keys are strings, values are strings, numbers, true, false, lists, mappings.

    as_written: every value but null is a string, as it stands in the file: what a command line would have.

    Raises InputFileError for any other document: also for a key that is there twice, and for anchors, aliases and tags,
    because these make a small file stand for a large one, or for other types.
    """
    text = read_text(path, SETTINGS_BYTES)
    try:
        _require_plain(text)
        node = yaml.compose(text, Loader=_LOADER)
        if not isinstance(node, yaml.MappingNode):
            raise ValueError("want keys with values, such as 'seq-length: 1024'")
        value: dict[str, Any] = _value(node, as_written)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" in line {mark.line + 1}"
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "no YAML"
        raise InputFileError(f"{path}: not YAML: {problem}{where}") from None
    except (ValueError, OverflowError) as error:
        raise InputFileError(f"{path}: {str(error)[:300]}") from None
    return value


def _require_plain(text: str) -> None:
    """Raise ValueError for YAML that is deep, or has anchors, aliases or tags. It looks at the file's events alone."""
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        line = 1 + (event.start_mark.line if event.start_mark else 0)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise ValueError(f"line {line}: more than {_DEEPEST} lists or mappings within each other")
        if getattr(event, "anchor", None) is not None:
            raise ValueError(f"line {line}: no anchors and aliases (& and *) are taken; write the value itself")
        if getattr(event, "tag", None) is not None:
            raise ValueError(f"line {line}: no tags (!) are taken")


def _value(node: yaml.Node, as_written: bool) -> Any:
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, as_written) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        found: dict[str, Any] = {}
        for key, value in node.value:
            name = _value(key, as_written=False)
            line = key.start_mark.line + 1
            if not isinstance(name, str):
                raise ValueError(f"line {line}: {str(name)[:40]!r} is no key; a key is a name, such as seq-length")
            if name in found:
                raise ValueError(f"line {line}: the key {name[:40]!r} is there twice")
            found[name] = _value(value, as_written)
        return found
    if as_written and node.tag != "tag:yaml.org,2002:null":
        return node.value
    if node.tag == "tag:yaml.org,2002:int":
        return _integer(node.value) if node.value.lstrip("+-").isdigit() else _construct(node)
    return _construct(node)


def _construct(node: yaml.Node) -> Any:
    value = yaml.SafeLoader("").construct_object(node)
    return str(node.value) if not isinstance(value, bool | int | float | str | None) else value
