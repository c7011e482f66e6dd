"""Opening the files of another program that an option names, and filling a model from them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from commengine import Communicator, UsageError
from commengine.rank_zero import gather_json, on_every_rank
from tplayers import BERTConfig, Placement, TransformerConfig, placements

from .hugging_face_model import HuggingFaceModel
from .megatron import MegatronCheckpoint, open_megatron
from .model_settings import model_settings
from .other_model import OtherModel

#: the words with which an option names files of another program, as in ``hf:FOLDER``, and the readers of such files
READERS: dict[str, Callable[..., OtherModel]] = {
    "hf": HuggingFaceModel.open,
    "megatron": lambda path, **asked: _Megatron(open_megatron(path, **asked)),
}

#: tensors that a warning names
_NAMED = 4


def open_other(
    load: str, *, vocab_size: int | None = None, num_attention_heads: int | None = None,
    rotary_interleaved: bool = False,
) -> OtherModel:  # fmt: skip
    """The model that ``load``, such as ``hf:FOLDER``, names. Not collective. Raises UsageError that names the file.

    vocab_size, num_attention_heads: for files of Megatron-LM that do not say them (`open_megatron`).
    rotary_interleaved: for a folder of Hugging Face, as in `HuggingFaceModel`.
    """
    word, _, folder = load.partition(":")
    asked: dict[str, Any] = {"vocab_size": vocab_size, "num_attention_heads": num_attention_heads}
    if word == "hf":
        asked = {"interleaved": rotary_interleaved}
    try:
        return READERS[word](Path(folder), **asked)
    except (ValueError, OSError) as error:
        raise cannot_read(load, error) from error


def cannot_read(load: str, error: Exception) -> UsageError:
    """The error of ``--load hf:FOLDER``."""
    said = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
    return UsageError(f"--load {load}: {said}")


def fill_model(
    load: str, other: OtherModel, model: nn.Module, config: TransformerConfig, world: Communicator,
    fill: Callable[[str, Tensor], None] | None = None, *, tell_not_finite: bool,
) -> None:  # fmt: skip
    """Fill the parameters of a model with those of ``other``, each rank its parts. Collective over ``world``.

    load: names ``other``, for errors. config: of ``model``. fill: called with each name and this rank's values in fp32,
    instead of filling the parameters.

    tell_not_finite: rank 0 says on its standard error which tensors have values that are NaN or infinite. They are
    taken as they are. It costs a pass over the values, about a tenth of the time of loading.
    Raises UsageError, on all ranks, where the tensors do not fit or a file is damaged.
    """
    placed = placements(model)
    wrong: dict[str, int] = {}

    def read() -> None:
        try:
            parts = other.parts(config, placed)
            for name, parameter in model.named_parameters():
                direct = fill is None and parameter.device.type == "cpu" and parameter.is_contiguous()
                dtype = parameter.dtype if fill is None else torch.float32
                values = parameter.detach() if direct else torch.empty(parameter.shape, dtype=dtype)
                parts[name](values)
                if tell_not_finite and (count := _not_finite(values)):
                    wrong[name] = count
                if fill is not None:
                    fill(name, values)
                elif not direct:
                    parameter.detach().copy_(values)
        except (ValueError, OSError) as error:
            raise cannot_read(load, error) from error

    on_every_rank(world, read)
    if tell_not_finite:
        _tell(load, other, {name: (placed[name], count) for name, count in wrong.items()}, world)


def _not_finite(values: Tensor) -> int:
    """How many values are NaN or infinite. Where there is none, as nearly always, it takes one pass and no memory."""
    return 0 if values.sum().isfinite() else int(values.numel() - values.isfinite().sum())


def _tell(load: str, other: OtherModel, wrong: Mapping[str, tuple[Placement, int]], world: Communicator) -> None:
    """Let rank 0 say which tensors have values that are not finite. Collective over ``world``.

    wrong: of this rank: our names of such tensors, with the number of such values in its part.
    """
    some = torch.tensor([len(wrong)])
    world.all_reduce(some, "max")
    if not int(some):
        return
    mine = [[name, placement.index if placement.sharded else 0, count] for name, (placement, count) in wrong.items()]
    counts: dict[str, dict[int, int]] = {}
    for name, index, count in (one for rank in gather_json(world, mine) for one in rank):
        counts.setdefault(name, {})[index] = count  # several ranks may hold the same part
    if world.rank == 0:
        said = [f"{sum(parts.values())} in {other.their_names(name)}" for name, parts in counts.items()]
        more = f" and {len(said) - _NAMED} more tensors" if len(said) > _NAMED else ""
        print(
            f"warning: {load}: values that are NaN or infinite, which are taken as they are: "
            f"{', '.join(said[:_NAMED])}{more}",
            file=sys.stderr, flush=True,
        )  # fmt: skip


@dataclass(frozen=True)
class _Megatron:
    """A checkpoint of Megatron-LM as an `OtherModel`: it gives one whole global tensor at a time."""

    found: MegatronCheckpoint

    @property
    def kind(self) -> str:
        return "bert" if isinstance(self.found.config, BERTConfig) else "gpt"

    @property
    def settings(self) -> dict[str, Any]:
        return model_settings(self.found.config)

    @property
    def dtype(self) -> torch.dtype:
        return self.found.dtype

    def parts(
        self, config: TransformerConfig, placements: Mapping[str, Placement]
    ) -> Mapping[str, Callable[[Tensor], None]]:
        if different := sorted(set(self.found.names) ^ placements.keys()):
            raise ValueError(f"not the model's tensors: {', '.join(different[:4])}")
        rows = config.padded_vocab_size
        return {name: partial(self._fill, name, placement, rows) for name, placement in placements.items()}

    def their_names(self, name: str) -> str:
        return self.found.their_name(name)

    def _fill(self, name: str, placement: Placement, rows: int, target: Tensor) -> None:
        target.copy_(placement.part(self.found.tensor(name, rows)))

    def close(self) -> None:
        """Do nothing: a file that is mapped into memory is closed when its last tensor is gone."""
