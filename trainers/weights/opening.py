"""Opening the files of another program that an option names, and filling a model from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from commengine import Communicator, UsageError
from commengine.rank_zero import on_every_rank
from tplayers import TransformerConfig, placements

from .hugging_face_model import HuggingFaceModel
from .megatron import open_megatron
from .other_model import OtherModel

#: the words with which an option names files of another program, as in ``hf:FOLDER``, and the readers of such files
READERS: dict[str, Callable[..., OtherModel]] = {"hf": HuggingFaceModel.open, "megatron": open_megatron}


def open_other(load: str, *, vocab_size: int | None = None, num_attention_heads: int | None = None) -> OtherModel:
    """The model that ``load``, such as ``hf:FOLDER``, names. Not collective. Raises UsageError that names the file.

    vocab_size, num_attention_heads: for files of Megatron-LM that do not say them (`open_megatron`).
    """
    word, _, folder = load.partition(":")
    asked = {"vocab_size": vocab_size, "num_attention_heads": num_attention_heads} if word == "megatron" else {}
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
    fill: Callable[[str, Tensor], None] | None = None,
) -> None:  # fmt: skip
    """Fill the parameters of a model with those of ``other``, each rank its parts. Collective over ``world``.

    load: names ``other``, for errors. config: of ``model``. fill: called with each name and this rank's values in fp32,
    instead of filling the parameters.

    Raises UsageError, on all ranks, where the tensors do not fit or a file is damaged.
    """

    def read() -> None:
        try:
            parts = other.parts(config, placements(model))
            for name, parameter in model.named_parameters():
                direct = fill is None and parameter.device.type == "cpu" and parameter.is_contiguous()
                dtype = parameter.dtype if fill is None else torch.float32
                values = parameter.detach() if direct else torch.empty(parameter.shape, dtype=dtype)
                parts[name](values)
                if fill is not None:
                    fill(name, values)
                elif not direct:
                    parameter.detach().copy_(values)
        except (ValueError, OSError) as error:
            raise cannot_read(load, error) from error

    on_every_rank(world, read)
