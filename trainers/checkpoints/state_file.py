"""The schema of ``state.json``, and how it is read: nothing in it is taken for what it is not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from commengine.files.schema import ReadPart, read_as

#: bytes; the placements of 100,000 parameters are 20 MB
LARGEST = 1 << 28
#: the first parts of the names of a GPT's parameters: those that each has, and those that some have; one that every
#: BERT has besides
OF_GPT, OF_SOME_GPTS, OF_BERT = {"embedding", "layers", "final_norm"}, {"position_embedding", "output"}, "mlm_head"

_Count = Annotated[int, Field(ge=0, lt=2**63)]


class SavedScaler(ReadPart):
    """The state of an fp16 run's loss scaler (`LossScaler.to_json`)."""

    scale: float = Field(ge=2.0**-126, le=2.0**127)
    good_steps: _Count
    overflows: _Count


class SavedSource(ReadPart):
    """What a run has read of one data set (`SourceRecord`)."""

    name: str
    identity: str
    samples: _Count
    weight: str = Field(pattern=r"^\d{1,400}(/[1-9]\d{0,399})?$")
    before: _Count
    consumed: _Count
    checksums: str = ""
    written: int = 0


class SavedData(ReadPart):
    """What a run has read of its data (`SampleStream.record`)."""

    start: _Count
    sources: list[SavedSource] = Field(min_length=1)
    vocabulary: str | None = None
    order: _Count = 1


class SavedPlacement(ReadPart):
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


class SavedState(ReadPart):
    """The content of ``state.json``."""

    format: Literal[1, 2, 3, 4]
    kind: str | None = None
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


def kind_of(state: SavedState) -> str | None:
    """The kind of the checkpoint's run: "gpt", "bert" or "finetune". None: of none of them.

    A checkpoint of an older version does not say it; its settings and the names of its parameters do.
    """
    if state.kind is not None:
        return state.kind
    if {"task", "doc_stride"} <= set(state.settings):
        return "finetune"
    tops = {name.partition(".")[0] for name in state.parameters}
    return "bert" if OF_BERT in tops else "gpt" if tops - OF_SOME_GPTS == OF_GPT else None


def read(path: Path) -> SavedState:
    """The content of ``path``. Raises ValueError that names the file and the first key at fault, and OSError."""
    return read_as(path, SavedState, LARGEST, " is damaged:")
