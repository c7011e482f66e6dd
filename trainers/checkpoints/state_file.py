"""The schema of ``state.json``, and how it is read: nothing in it is taken for what it is not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from commengine import UsageError

#: bytes; the placements of 100,000 parameters are 20 MB
LARGEST = 1 << 28

#: characters of the value of one error
_SHOWN = 120

_Count = Annotated[int, Field(ge=0, lt=2**63)]


class _Saved(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True)


class SavedScaler(_Saved):
    """The state of an fp16 run's loss scaler (`LossScaler.to_json`)."""

    scale: float = Field(ge=2.0**-126, le=2.0**127)
    good_steps: _Count
    overflows: _Count


class SavedSource(_Saved):
    """What a run has read of one data set (`SourceRecord`)."""

    name: str
    identity: str
    samples: _Count
    weight: str = Field(pattern=r"^\d{1,400}(/\d{1,400})?$")
    before: _Count
    consumed: _Count


class SavedData(_Saved):
    """What a run has read of its data (`SampleStream.record`)."""

    start: _Count
    sources: list[SavedSource] = Field(min_length=1)
    vocabulary: str | None = None


class SavedPlacement(_Saved):
    """How the ranks that wrote it held a parameter (`tplayers.Placement`)."""

    shape: list[_Count]
    view: list[_Count]
    dim: _Count | None
    count: int = Field(ge=1)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if math.prod(self.view) != math.prod(self.shape):
            raise ValueError("view and shape hold different numbers of values")
        return self


class SavedState(_Saved):
    """The content of ``state.json``."""

    format: Literal[1, 2, 3, 4]
    iteration: _Count
    updates: _Count | None = None
    loss_scaler: SavedScaler | None = None
    masters: bool = False
    data: SavedData | None = None
    settings: dict[str, JsonValue]
    parameters: dict[str, SavedPlacement]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.updates is not None and self.updates > self.iteration:
            raise ValueError(f"updates ({self.updates}) must not exceed iteration ({self.iteration})")
        batch = self.settings.get("global_batch_size")
        if batch is not None and not (type(batch) is int and 0 < batch < 2**63):
            raise ValueError("settings.global_batch_size must be a number of samples")
        return self


def read(path: Path) -> SavedState:
    """The content of ``path``. Raises UsageError that names the file and the key, and OSError."""
    if (size := path.stat().st_size) > LARGEST:
        raise UsageError(f"--load: {path} is damaged: {size} bytes; such a file has at most {LARGEST}")
    try:
        return SavedState.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise UsageError(f"--load: {path} is damaged: {_told(error.errors(include_url=False))}") from None
    except RecursionError:
        raise UsageError(f"--load: {path} is damaged: it is nested too deeply") from None


def _told(errors: list[Any]) -> str:
    """The first error, that of the format if there is one: a version of another format may have other keys."""
    first = min(errors, key=lambda error: error["loc"] != ("format",))
    key = ".".join(str(part) for part in first["loc"])
    given = first["input"] if isinstance(first["input"], str | int | float | bool | None) else ""
    shown = f" (it is {_cut(repr(given))})" if first["loc"] and given != "" else ""
    more = f"; and {len(errors) - 1} more" if len(errors) > 1 else ""
    return f"{_cut(ascii(key)[1:-1]) + ': ' if key else ''}{_cut(first['msg'])}{shown}{more}"


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
