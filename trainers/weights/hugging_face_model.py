"""HuggingFaceModel: a folder of Hugging Face, of which each rank reads its own slices."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from tplayers import BERTConfig, Placement, TransformerConfig
from trainers.checkpoints.parallel_safetensors import some
from trainers.checkpoints.part_reader import bytes_of, fill_part

from .configurations import read_configuration
from .hugging_face import (
    BEGINNINGS,
    SECOND_NAMES,
    HuggingFaceTensor,
    experts_names,
    family,
    hugging_face_tensors,
    ignored,
)
from .other_model import REAL, OtherModel
from .tensor_files import FileTensor, open_tensors
from .tokenizer_files import tokenizer_file

#: names of old releases, in place of which newer ones have others
_OLD = {".gamma": ".weight", ".beta": ".bias"}


@dataclass
class HuggingFaceModel(OtherModel):
    """A model in a folder with config.json and its weight files (`trainers.weights.other_model.OtherModel`).

    interleaved: components 2 j and 2 j + 1 of a head are a pair of the rotary positions, as in Meta's files; here and
    in Hugging Face's models these are j and j + d / 2.
    """

    folder: Path
    tokenizer_model: str | None
    interleaved: bool
    _files: contextlib.ExitStack
    _named: dict[str, FileTensor]

    @property
    def settings(self) -> dict[str, Any]:
        """See `OtherModel`."""
        return super().settings | {"tokenizer_model": self.tokenizer_model, "hf_files": str(self.folder)}

    @classmethod
    def open(cls, folder: Path, *, interleaved: bool = False) -> Self:
        """Open the folder. Not collective.

        interleaved: see `HuggingFaceModel`.

        Raises ValueError that names the file, and the key or the tensor, and OSError.
        """
        if not folder.is_dir():
            raise ValueError(f"{folder}: there is no such folder; valid: a folder with config.json and weights")
        config = read_configuration(folder, interleaved=interleaved)
        with contextlib.ExitStack() as files:
            named = _unstacked(_renamed(open_tensors(folder, files), config), config)
            if isinstance(config, BERTConfig):
                config = replace(config, binary_head="cls.seq_relationship.weight" in named)
            used = {name for tensor in hugging_face_tensors(config) for name in tensor.theirs} & named.keys()
            seconds = SECOND_NAMES.keys() & named.keys()
            if other := sorted(name for name in used | seconds if named[name].dtype not in REAL):
                one = named[other[0]]
                raise ValueError(f"{one.path}: {other[0]} is of {one.dtype}, not of real numbers of 16 to 64 bits")
            dtype = reduce(torch.promote_types, (named[name].dtype for name in used))
            return cls(config, dtype, folder, tokenizer_file(folder), interleaved, files.pop_all(), named)

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
                if one.shape != piece.placement.shape:
                    needed = list(piece.placement.shape)
                    said = f"{piece.name} is {list(one.shape)}, and by config.json it must be {needed}"
                    raise ValueError(f"{one.path}: {said}")
            seconds = [name for name, ours in SECOND_NAMES.items() if ours == tensor.ours and name not in known]
            found[tensor.ours] = partial(self._fill, pieces, [name for name in seconds if name in self._named])
        return found

    def their_names(self, name: str) -> str:
        """See `OtherModel`."""
        return ", ".join(next(one.theirs for one in hugging_face_tensors(self.config) if one.ours == name))

    def _fill(self, pieces: list[TheirPart], seconds: list[str], target: Tensor) -> None:
        """Fill our ``target`` from ``pieces``. seconds: other names of it in the files, which are compared."""
        for second in seconds:
            (piece,) = pieces
            one, other = self._named[piece.name], self._named[second]
            if one.shape != other.shape or not _equal(*(_read(each, piece, target.shape) for each in (one, other))):
                said = 'valid: the same values, or (not for BERT) "tie_word_embeddings": false in config.json'
                raise ValueError(f"{other.path}: {second} differs from {piece.name}, to which it is tied; {said}")
        for piece in pieces:
            one, part = self._named[piece.name], piece.of(target)
            if self.interleaved and (".q_proj." in piece.name or ".k_proj." in piece.name):
                whole = torch.empty(one.shape, dtype=one.dtype)
                one.source.read(bytes_of(whole.view(-1).view(torch.uint8)), 0)
                part.copy_(piece.placement.part(_half_split(whole, self.config.head_size)))
            elif part.is_contiguous() or not piece.placement.padded:
                fill_part(one.source, one.dtype, piece.placement, part.view(piece.placement.part_view))
            else:
                part.copy_(_read(one, piece, part.shape))

    def close(self) -> None:
        """Close the files."""
        self._files.close()


@dataclass(frozen=True)
class TheirPart:
    """One of Hugging Face's tensors, and this rank's part of it, which is a part of one of ours.

    name, placement: of theirs. Theirs is block ``number`` of ``count`` blocks of the rows of ours, or that transposed.
    """

    name: str
    placement: Placement
    number: int
    count: int
    transposed: bool

    def of(self, part: Tensor) -> Tensor:
        """The view of our part [local shape] that is the part of theirs [local shape]."""
        block = part.chunk(self.count)[self.number]
        return block.t() if self.transposed else block


def pieces_of(tensor: HuggingFaceTensor, placement: Placement, vocabulary: int) -> list[TheirPart]:
    """The parts of Hugging Face's tensors in this rank's part of one of ours, which ``placement`` says.

    vocabulary: the tokens without padding.
    """
    if tensor.vocabulary:
        placement = _without_padding(placement, vocabulary)
    count = len(tensor.theirs)
    block = placement if count == 1 else _block(placement, tensor)
    their = _turned(block) if tensor.transposed else block
    return [TheirPart(name, their, number, count, tensor.transposed) for number, name in enumerate(tensor.theirs)]


def _half_split(rows: Tensor, head: int) -> Tensor:
    """Rows of heads of which the components 2 j and 2 j + 1 are a pair, in the order where j and j + head / 2 are."""
    return rows.view(-1, head // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _without_padding(placement: Placement, vocabulary: int) -> Placement:
    """The placement of a tensor whose padded rows are not in the file: of the same part."""
    at = placement.view.index(placement.shape[0])
    view = (*placement.view[:at], vocabulary, *placement.view[at + 1 :])
    return replace(placement, shape=(vocabulary, *placement.shape[1:]), view=view, padded=placement.view)


def _block(placement: Placement, tensor: HuggingFaceTensor) -> Placement:
    """The placement of each of the equal blocks of rows that are Hugging Face's tensors."""
    count, rows = len(tensor.theirs), placement.shape[0]
    view, padded, dim = placement.view, placement.padded, placement.dim
    if dim is None:  # every rank holds it whole
        view = (count, rows // count, *placement.shape[1:])
    elif view[0] != count or dim == 0:
        raise ValueError(f"{tensor.ours} is not split within its blocks {', '.join(tensor.theirs)}")
    return replace(
        placement, shape=(rows // count, *placement.shape[1:]), view=view[1:], padded=padded[1:],
        dim=None if dim is None else dim - 1,
    )  # fmt: skip


def _turned(placement: Placement) -> Placement:
    """The placement of the transposed tensor; a vector has none."""
    view, padded, rows = placement.view, placement.padded, placement.shape[0]
    first = next(at for at in range(1, len(view)) if math.prod(view[:at]) == rows)  # of the columns' dimensions
    dim = None if placement.dim is None else (placement.dim - first) % len(view)
    view, padded = (sizes[first:] + sizes[:first] for sizes in (view, padded))
    return replace(placement, shape=placement.shape[::-1], view=view, padded=padded, dim=dim)


def _renamed(tensors: Mapping[str, FileTensor], config: TransformerConfig) -> dict[str, FileTensor]:
    """The tensors by today's names of a whole model's: a file of the model without heads has no beginning in them."""
    beginnings = BEGINNINGS[family(config)]
    found: dict[str, FileTensor] = {}
    given: dict[str, str] = {}
    for name, tensor in tensors.items():
        today = name
        for old, new in _OLD.items():
            today = today.removesuffix(old) + new if today.endswith(old) else today
        today = today if today.startswith(beginnings) else beginnings[0] + today
        if today in found:
            raise ValueError(
                f"{tensor.path}: {given[today]} and {name} are two names of one tensor; valid: one of them"
            )
        found[today], given[today] = tensor, name
    return found


def _unstacked(tensors: dict[str, FileTensor], config: TransformerConfig) -> dict[str, FileTensor]:
    """The tensors with one for each expert, where a file has one of all experts of a layer.

    transformers 5 holds them so: ``gate_up_proj`` [experts, 2 width, h] and ``down_proj`` [experts, h, width].
    """
    if config.experts is None:
        return tensors
    found, (block, (gate, up, down)) = dict(tensors), experts_names(config)
    parts = {"gate_up_proj": (gate, up), "down_proj": (down,)}
    for name in tensors:
        before, _, kind = name.rpartition(".mlp.experts.")
        if name.endswith(".mlp.gate.weight"):
            found[name.replace(".mlp.gate.", f".{block}.gate.")] = found.pop(name)
        if kind not in parts or len(tensors[name].shape) != 3:
            continue
        stacked = found.pop(name)
        count, rows, columns = stacked.shape
        rows //= len(parts[kind])
        for number, (expert, part) in enumerate(itertools.product(range(count), parts[kind])):
            one = stacked.rows(number * rows * columns, (rows, columns))
            found[f"{before}.{block}.experts.{expert}.{part}.weight"] = one
    return found


def _read(tensor: FileTensor, piece: TheirPart, shape: torch.Size) -> Tensor:
    """This rank's part of a tensor of the files, of a local ``shape``, in the file's dtype."""
    found = torch.empty(shape, dtype=tensor.dtype)
    fill_part(tensor.source, tensor.dtype, piece.placement, found.view(piece.placement.part_view))
    return found


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same values, also where these are not a number."""
    wide = torch.promote_types(one.dtype, other.dtype)
    return torch.equal(one.to(wide).view(torch.uint8), other.to(wide).view(torch.uint8))
