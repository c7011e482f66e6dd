"""Runs that start from a model that another program saved, or that was converted from one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from commengine import UsageError
from commengine.errors import usage_errors
from commengine.options.declared import require_ranges
from trainers import presets
from trainers.checkpoints import checkpoint
from trainers.settings.saving import of_other_program
from trainers.weights.configurations import other_dropout
from trainers.weights.opening import open_other
from trainers.weights.other_model import OtherModel

from .kinds import task_of

#: a kind of model, several of which one will do, or None for any
Kinds = str | Sequence[str] | None

#: settings with which Megatron-LM's files are read where they do not say it themselves
ASKED = ("vocab_size", "num_attention_heads")


def implied(kind: Any, value: Callable[[str], Any]) -> dict[str, Any]:
    """The settings that the words of a command line set: those of ``--load``, and then those of ``--preset``.

    kind, value: as for `settings_of_load`.
    """
    found: dict[str, Any] = {}
    if (load := value("load")) is not None:
        found |= settings_of_load(kind, load, value)
    if (preset := value("preset")) is not None:
        found |= presets.settings(preset, kind.kind)
    return found


def settings_of_load(kind: Any, load: str, value: Callable[[str], Any]) -> Mapping[str, Any]:
    """The settings that ``--load`` gives: those of another program's model, or of a run that came from one.

    kind: the class of the settings, whose ``kind`` is that of the model. value: of another option, by name; None if it
    is not given. Of any other run there are none: its flags are given again. Raises UsageError where the files cannot
    be read, or hold another kind of model.
    """
    if of_other_program(load):
        other = open_other(load, **{name: value(name) for name in ASKED})
        other.close()
        require_kind(load, other.kind, kind.kind)
        _require_one_dropout(load, other.settings.get("hf_files"), value)
        return _of_fields(kind, other.settings)
    if (found := checkpoint.find(Path(load))) is None:
        return {}
    saved = checkpoint.saved_state(found, verify=False).settings
    if checkpoint.CONVERTED_FROM not in saved and saved.get("hf_files") is None:
        return {}
    if checkpoint.CONVERTED_FROM in saved:
        _require_one_dropout(load, saved.get("hf_files"), value)
    fixed = {item.name for item in fields(kind) if item.metadata["fixed"]}
    names = fixed | {"hidden_dropout", "attention_dropout", "tokenizer_model", "hf_files"}
    return {name: one for name, one in saved.items() if name in names}


def _require_one_dropout(load: str, folder: object, value: Callable[[str], Any]) -> None:
    """Raise UsageError where the model in a folder of Hugging Face has two dropouts, and no option chooses one."""
    if not isinstance(folder, str) or value("hidden_dropout") is not None:
        return
    with usage_errors(f"--load {load}: "):
        if two := other_dropout(Path(folder)):
            raise UsageError(f"--load {load}: {two} differ, and a run has one dropout; choose it with --hidden-dropout")


def _of_fields(kind: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``settings`` that are fields, and samples of at most as many tokens as the model has positions."""
    default: dict[str, Any] = {item.name: item.default for item in fields(kind)}
    found = {name: one for name, one in settings.items() if name in default}
    length = default["seq_length"]
    return found | {"seq_length": min(length, found["max_position_embeddings"] or length)}


def kinds_of(wanted: Kinds) -> Sequence[str]:
    """The kinds ``wanted``; none for any."""
    if isinstance(wanted, str):
        return (wanted,)
    return wanted or ()


def require_kind(load: str, found: str, wanted: Kinds, hint: str = "") -> None:
    """Raise UsageError, which ends in ``hint``, unless a model of the kind ``found`` is one of those ``wanted``."""
    kinds = kinds_of(wanted)
    if kinds and found not in kinds:
        needed = " or ".join(f"a {kind.upper()}" for kind in kinds)
        raise UsageError(f"--load {load}: holds a {found.upper()}, and {needed} is needed{hint}")


def settings_of_other(kind: Any, other: OtherModel, load: str) -> Any:
    """The settings, of the class ``kind``, of the model ``other``. Raises UsageError where a value is out of range."""
    settings = kind(**_of_fields(kind, other.settings))
    with usage_errors(f"--load {load}: "):
        require_ranges(settings)
        task_of(settings).model()
    return settings
