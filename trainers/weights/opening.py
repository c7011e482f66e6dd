"""Opening the files of another program that an option names, and filling a model from them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from commengine import Communicator
from commengine.errors import usage_errors
from commengine.rank_zero import gather_json, on_every_rank
from tplayers import TransformerConfig, whole_placements
from trainers.checkpoints.parallel_safetensors import some

from .hugging_face_model import HuggingFaceModel
from .megatron import open_megatron
from .other_model import OtherModel


def open_other(
    load: str, *, vocab_size: int | None = None, num_attention_heads: int | None = None,
    rotary_interleaved: bool = False,
) -> OtherModel:  # fmt: skip
    """The model that ``load``, such as ``hf:FOLDER``, names. Not collective. Raises UsageError that names the file.

    vocab_size, num_attention_heads: for files of Megatron-LM that do not say them (`open_megatron`).
    rotary_interleaved: for a folder of Hugging Face, as in `HuggingFaceModel`.
    """
    word, _, folder = load.partition(":")
    with usage_errors(f"--load {load}: "):
        if word == "hf":
            return HuggingFaceModel.open(Path(folder), interleaved=rotary_interleaved)
        return open_megatron(Path(folder), vocab_size=vocab_size, num_attention_heads=num_attention_heads)


def fill_model(
    load: str, other: OtherModel, model: nn.Module, config: TransformerConfig, world: Communicator,
    fill: Callable[[str, Tensor], None] | None = None,
) -> None:  # fmt: skip
    """Fill the parameters of a model with those of ``other``, each rank its parts. Collective over ``world``.

    load: names ``other``, for errors. config: of ``model``. fill: called with each name and this rank's values in fp32,
    instead of filling the parameters.

    Rank 0 says on its standard error which tensors have values that are NaN or infinite. They are taken as they are.
    The check costs a pass over the values, about a tenth of the time of loading.
    Raises UsageError, on all ranks, where the tensors do not fit or a file is damaged.
    """
    placed = whole_placements(model)
    wrong: list[str] = []

    def read() -> None:
        with usage_errors(f"--load {load}: "):
            parts = other.parts(config, placed)
            for name, parameter in model.named_parameters():
                direct = fill is None and parameter.device.type == "cpu" and parameter.is_contiguous()
                dtype = parameter.dtype if fill is None else torch.float32
                values = parameter.detach() if direct else torch.empty(parameter.shape, dtype=dtype)
                parts[name](values)
                if not _finite(values):
                    wrong.append(other.their_names(name))
                if fill is not None:
                    fill(name, values)
                elif not direct:
                    parameter.detach().copy_(values)

    on_every_rank(world, read)
    names = list(dict.fromkeys(name for rank in gather_json(world, wrong) for name in rank))
    if world.rank == 0 and names:
        said = f"values that are NaN or infinite, which are taken as they are, in {some(names)}"
        print(f"warning: {load}: {said}", file=sys.stderr, flush=True)


def _finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite. Where all are finite, as nearly always, it takes one pass and no memory."""
    return bool(values.sum().isfinite() or values.isfinite().all())
