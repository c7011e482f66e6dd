"""HuggingFaceModel: a folder of Hugging Face, of which each rank reads its own slices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from tplayers import BERTConfig, GPTConfig, Placement, TransformerConfig
from trainers.checkpoints.parallel_safetensors import fill_part, some

from .configurations import read_configuration
from .hugging_face import BEGINNINGS, HuggingFaceTensor, family, hugging_face_tensors, ignored
from .model_settings import model_settings
from .other_model import fill_vocabulary
from .tensor_files import FileTensor, TensorFiles
from .tokenizer_files import tokenizer_file

#: names of old releases, in place of which newer ones have others
_OLD = {".gamma": ".weight", ".beta": ".bias"}


@dataclass
class HuggingFaceModel:
    """A model in a folder with config.json and its weight files (`trainers.weights.other_model.OtherModel`)."""

    folder: Path
    config: GPTConfig | BERTConfig
    dtype: torch.dtype
    tokenizer_model: str | None
    _files: TensorFiles
    _named: dict[str, FileTensor]

    @property
    def kind(self) -> str:
        """See `OtherModel`."""
        return "bert" if isinstance(self.config, BERTConfig) else "gpt"

    @property
    def settings(self) -> dict[str, Any]:
        """See `OtherModel`."""
        files = {"tokenizer_model": self.tokenizer_model, "hf_files": str(self.folder)}
        return model_settings(self.config) | files

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open the folder. Not collective.

        Raises ValueError that names the file, and the key or the tensor, and OSError.
        """
        if not folder.is_dir():
            raise ValueError(f"{folder}: there is no such folder; valid: a folder with config.json and weights")
        config = read_configuration(folder)
        files = TensorFiles.open(folder)
        try:
            named = _renamed(files.tensors, config)
            if isinstance(config, BERTConfig):
                config = replace(config, binary_head="cls.seq_relationship.weight" in named)
            used = {name for tensor in hugging_face_tensors(config) for name in tensor.theirs} & named.keys()
            if other := sorted(name for name in used if not named[name].dtype.is_floating_point):
                raise ValueError(
                    f"{named[other[0]].path}: {other[0]} is of {named[other[0]].dtype}, not of real numbers"
                )
            dtype = _widest(named[name].dtype for name in used)
            return cls(folder, config, dtype, tokenizer_file(folder), files, named)
        except BaseException:
            files.close()
            raise

    def parts(
        self, config: TransformerConfig, placements: Mapping[str, Placement]
    ) -> Mapping[str, Callable[[Tensor], None]]:
        """See `OtherModel.parts`."""
        tensors = hugging_face_tensors(config)
        known = {name for tensor in tensors for name in tensor.theirs}
        if missing := [name for name in known if name not in self._named]:
            raise ValueError(f"{self.folder}: lacks tensors that the model needs: {some(sorted(missing))}")
        if unknown := [name for name in self._named if name not in known and not ignored(name)]:
            raise ValueError(f"{self.folder}: has tensors for which the model has no place: {some(sorted(unknown))}")
        found: dict[str, Callable[[Tensor], None]] = {}
        for tensor in tensors:
            pieces = pieces_of(tensor, placements[tensor.ours], config.vocab_size)
            for piece in pieces:
                one = self._named[piece.name]
                if one.shape != piece.shape:
                    said = f"{piece.name} is {list(one.shape)}, and by config.json it must be {list(piece.shape)}"
                    raise ValueError(f"{one.path}: {said}")
            found[tensor.ours] = partial(self._fill, pieces, placements[tensor.ours])
        return found

    def _fill(self, pieces: list[TheirPart], placement: Placement, target: Tensor) -> None:
        for piece in pieces:
            one = self._named[piece.name]
            if piece.rows is not None:
                fill_vocabulary(target, placement, piece.rows, partial(_fill_rows, one))
            else:
                fill_part(one.read, one.dtype, piece.placement, piece.of(target))

    def close(self) -> None:
        """Close the files."""
        self._files.close()


@dataclass(frozen=True)
class TheirPart:
    """One of Hugging Face's tensors, and the part of it that this rank's part of one of ours has.

    name, shape: theirs. placement: of theirs, so that a rank's part of theirs is in its part of ours. of: gives the
    view of our part [local shape] that is the part of theirs, in the shape ``placement.part_view``. rows: if the rows
    are the vocabulary, their number without padding; then ``placement`` is of the padded tensor.
    """

    name: str
    shape: tuple[int, ...]
    placement: Placement
    of: Callable[[Tensor], Tensor]
    rows: int | None = None


def pieces_of(tensor: HuggingFaceTensor, placement: Placement, vocabulary: int) -> list[TheirPart]:
    """The pieces of one of our tensors, of which this rank has the part that ``placement`` says.

    vocabulary: the tokens without padding.
    """
    if tensor.vocabulary:
        (name,) = tensor.theirs
        return [TheirPart(name, (vocabulary, *placement.shape[1:]), placement, lambda part: part, vocabulary)]
    count = len(tensor.theirs)
    if count == 1:
        return [_piece(tensor.theirs[0], tensor.transposed, placement, partial(_viewed, placement.part_view))]
    blocks = placement
    if placement.view[0] != count:  # a tensor that every rank holds whole, and that is not viewed in blocks
        blocks = replace(placement, view=(count, placement.shape[0] // count, *placement.shape[1:]))
    if blocks.dim == 0:
        raise ValueError(f"{tensor.ours} is split between its blocks {', '.join(tensor.theirs)}")
    rows = placement.shape[0] // count
    block = replace(
        blocks,
        shape=(rows, *placement.shape[1:]),
        view=blocks.view[1:],
        dim=None if blocks.dim is None else blocks.dim - 1,
    )
    return [
        _piece(name, tensor.transposed, block, partial(_block, blocks.part_view, number))
        for number, name in enumerate(tensor.theirs)
    ]


def _piece(name: str, transposed: bool, placement: Placement, of: Callable[[Tensor], Tensor]) -> TheirPart:
    if not transposed:
        return TheirPart(name, placement.shape, placement, of)
    last = len(placement.view) - 1
    turned = replace(
        placement, shape=placement.shape[::-1], view=(placement.view[-1], *placement.view[:-1]),
        dim=None if placement.dim is None else (placement.dim + 1) % (last + 1),
    )  # fmt: skip
    return TheirPart(name, turned.shape, turned, lambda part: of(part).movedim(-1, 0))


def _viewed(shape: tuple[int, ...], part: Tensor) -> Tensor:
    return part.view(shape)


def _block(shape: tuple[int, ...], number: int, part: Tensor) -> Tensor:
    return part.view(shape)[number]


def _fill_rows(one: FileTensor, target: Tensor, first: int) -> None:
    size = math.prod(one.shape[1:]) * one.dtype.itemsize
    whole = Placement(tuple(target.shape))
    fill_part(lambda block, start: one.read(block, first * size + start), one.dtype, whole, target)


def _renamed(tensors: Mapping[str, FileTensor], config: GPTConfig | BERTConfig) -> dict[str, FileTensor]:
    """The tensors by today's names of a whole model's: a file of the model without heads has no beginning in them."""
    beginnings = BEGINNINGS[family(config)]
    found = {}
    for name, tensor in tensors.items():
        for old, new in _OLD.items():
            name = name.removesuffix(old) + new if name.endswith(old) else name
        found[name if name.startswith(beginnings) else beginnings[0] + name] = tensor
    return found


def _widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    found = torch.float16
    seen = set(dtypes)
    if len(seen) == 1:
        return seen.pop()
    for dtype in seen:
        found = torch.promote_types(found, dtype)
    return found
