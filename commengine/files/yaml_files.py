"""Reading a YAML file that a user names. It alone imports PyYAML, which is of the extra ``train``."""

from __future__ import annotations

import os
from typing import Any

import yaml

from .reading import SETTINGS_BYTES, InputFileError, integer, read_text

#: lists and mappings within each other
_DEEPEST = 20
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


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
        return integer(node.value) if node.value.lstrip("+-").isdigit() else _construct(node)
    return _construct(node)


def _construct(node: yaml.Node) -> Any:
    value = yaml.SafeLoader("").construct_object(node)
    return str(node.value) if not isinstance(value, bool | int | float | str | None) else value
