"""Megatron-LM's checkpoints of GPT-2 and BERT, ``model_optim_rng.pt``: one file, or one for each tensor-parallel rank.

The files are pickles; `load_pickled` reads them and executes nothing. The rows of the fused weight and bias of queries,
keys and values, of np heads of size hn, stand in another order in each version of the format:

===================  ===============
checkpoint version   rows
===================  ===============
0 (or none)          [3, np, hn]
1                    [np, hn, 3]
2, 3                 [np, 3, hn]
===================  ===============

Each rank's file has such rows of its own heads. Ours are [3, np, hn] of all heads. The names are those of
``GPTModel`` and ``BertModel`` before Megatron-Core.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from commengine.files.reading import InputFileError, read_text
from tplayers import BERTConfig, GPTConfig, Placement, TransformerConfig
from trainers.checkpoints.parallel_safetensors import some

from .megatron_settings import TOP, MegatronContents, model_config
from .other_model import REAL, OtherModel
from .tensor_files import load_pickled

#: the names of a rank's file, in the order in which they are looked for
FILES = ("model_optim_rng.pt", "model_rng.pt")
#: our name of a table that BERTs without sentence order do not have
_TYPES = "token_type_embedding"
_LATEST = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class MegatronTensor:
    """One of our global tensors, and Megatron-LM's with the same numbers.

    theirs: the path in the file's ``model``, joined by dots, as version 0 names it. shape: of ours, where the rows of
    the vocabulary are those of the file. split: the dimension of which each file has a part; None for a tensor that
    each file holds whole. heads: the rows are queries, keys and values. vocabulary: the rows are the padded vocabulary.
    """

    ours: str
    theirs: str
    shape: tuple[int, ...]
    split: int | None = None
    heads: bool = False
    vocabulary: bool = False


def megatron_tensors(config: GPTConfig | BERTConfig, rows: int) -> list[MegatronTensor]:
    """Every tensor of the model with this shape. rows: of the vocabulary in the files, padding included."""
    h, ffn, embedding = config.hidden_size, config.ffn_size, f"{TOP}.embedding"
    positions = (config.max_position_embeddings, h)
    found = [
        MegatronTensor("embedding.weight", f"{embedding}.word_embeddings.weight", (rows, h), 0, vocabulary=True),
        MegatronTensor("position_embedding", f"{embedding}.position_embeddings.weight", positions),
    ]
    if isinstance(config, BERTConfig):
        types = (config.num_tokentypes, h)
        found.append(MegatronTensor(_TYPES, f"{embedding}.tokentype_embeddings.weight", types))
    for number in range(config.num_layers):
        ours, theirs = f"layers.{number}", f"{TOP}.transformer.layers.{number}"
        found += _both(f"{ours}.attention_norm", f"{theirs}.input_layernorm", h)
        found += _both(f"{ours}.attention.qkv", f"{theirs}.attention.query_key_value", 3 * h, h, split=0, heads=True)
        found += _both(f"{ours}.attention.projection", f"{theirs}.attention.dense", h, h, split=1)
        found += _both(f"{ours}.mlp_norm", f"{theirs}.post_attention_layernorm", h)
        found += _both(f"{ours}.mlp.up", f"{theirs}.mlp.dense_h_to_4h", ffn, h, split=0)
        found += _both(f"{ours}.mlp.down", f"{theirs}.mlp.dense_4h_to_h", h, ffn, split=1)
    found += _both("final_norm", f"{TOP}.transformer.final_layernorm", h)
    if isinstance(config, BERTConfig):
        found += _both("mlm_head.dense", "lm_head.dense", h, h)
        found += _both("mlm_head.norm", "lm_head.layernorm", h)
        found.append(MegatronTensor("mlm_head.bias", "lm_head.bias", (rows,), 0, vocabulary=True))
        if config.binary_head:
            found += _both("pooler", f"{TOP}.pooler.dense", h, h)
            found += _both("order_head", "binary_head", 2, h)
    return found


def _both(
    ours: str, theirs: str, *shape: int, split: int | None = None, heads: bool = False
) -> Iterator[MegatronTensor]:
    """Weight and bias. The bias of a weight that is split by columns is whole in each file."""
    yield MegatronTensor(f"{ours}.weight", f"{theirs}.weight", shape, split, heads)
    yield MegatronTensor(f"{ours}.bias", f"{theirs}.bias", shape[:1], split if split == 0 else None, heads)


@dataclass
class MegatronCheckpoint(OtherModel):
    """A checkpoint of Megatron-LM: the shape of the model, and its tensors under our names.

    config: of a GPT or a BERT with the same function. dtype: the widest of all tensors.
    """

    _files: Sequence[MegatronContents] = field(repr=False)
    _where: Mapping[str, MegatronTensor] = field(repr=False)

    def their_names(self, name: str) -> str:
        """Megatron-LM's name of our tensor ``name``, as `MegatronTensor.theirs`."""
        return self._where[name].theirs

    def parts(
        self, config: TransformerConfig, placements: Mapping[str, Placement]
    ) -> Mapping[str, Callable[[Tensor], None]]:
        """See `OtherModel.parts`. It reads one whole global tensor at a time."""
        if different := sorted(self._where.keys() ^ placements.keys()):
            raise ValueError(f"not the model's tensors: {some(different)}")
        rows = config.padded_vocab_size
        return {name: partial(self._fill, name, placement, rows) for name, placement in placements.items()}

    def _fill(self, name: str, placement: Placement, rows: int, target: Tensor) -> None:
        target.copy_(placement.part(self.tensor(name, rows)))

    def close(self) -> None:
        """Do nothing: a file that is mapped into memory is closed when its last tensor is gone."""

    def tensor(self, name: str, padded_vocab_size: int) -> Tensor:
        """Our global tensor ``name``, in the file's dtype. It may be a view of the file's memory: do not write into it.

        padded_vocab_size: the rows of a tensor of the vocabulary, those of the padding 0.
        Megatron-LM's BERT without sentence order has no token types: their embeddings are 0 here.
        """
        where = self._where[name]
        if where.theirs not in self._files[0].tensors:
            return torch.zeros(where.shape, dtype=self.dtype)
        pieces = [contents.tensors[where.theirs] for contents in self._files]
        if where.heads:
            heads = self.config.num_attention_heads // len(pieces)
            blocks = [_queries_keys_values(piece, heads, self._files[0].version) for piece in pieces]
            return torch.cat(blocks, dim=1).reshape(where.shape)
        whole = pieces[0] if where.split is None or len(pieces) == 1 else torch.cat(pieces, where.split)
        if not where.vocabulary:
            return whole
        real = whole[: self.config.vocab_size]
        return F.pad(real, (*(0, 0) * (real.dim() - 1), 0, padded_vocab_size - len(real)))


def _queries_keys_values(rows: Tensor, heads: int, version: int) -> Tensor:
    """A view [3, heads, size of a head, ...] of the rows of one file."""
    size, rest = rows.shape[0] // (3 * heads), rows.shape[1:]
    if version == 0:
        return rows.reshape(3, heads, size, *rest)
    if version == 1:
        return rows.reshape(heads, size, 3, *rest).movedim(2, 0)
    return rows.reshape(heads, 3, size, *rest).transpose(0, 1)


def open_megatron(
    path: Path, *, vocab_size: int | None = None, num_attention_heads: int | None = None
) -> MegatronCheckpoint:
    """The checkpoint of Megatron-LM at ``path``. Not collective: any rank may call it.

    A file of PyTorch 1.6 or later is mapped into memory, and a tensor is read when it is used. An older one is read
    whole.

    path: a ``.pt`` file, a folder of ``mp_rank_*`` folders, or the ``--save`` folder of a run (its newest checkpoint).
    vocab_size: without padding; a file always has the padded size. None for what its settings say: ``vocab_size``, or a
        well-known tokenizer. num_attention_heads: of a file without settings, as old releases are.

    Raises InputFileError, which names the file: it is damaged, lacks a rank's part, holds code or anything else that
    is not data, or is of a model that ours cannot be; or one of the arguments is needed, or does not fit. Raises
    OSError for a file that cannot be read.
    """
    contents = [MegatronContents.of(file, load_pickled(file)) for file in _files(path)]
    first, ranks = contents[0], len(contents)
    parallel = first.setting("tensor_model_parallel_size", first.setting("model_parallel_size", ranks))
    if parallel != ranks:
        raise InputFileError(
            f"{path}: tensor-model-parallel size {parallel} has a file mp_rank_* for each rank; found: {ranks}"
        )
    for number, other in enumerate(contents):
        _require_like(first, other, number)
    config = model_config(first, ranks, vocab_size, num_attention_heads)
    tensors = megatron_tensors(config, first.tensors[f"{TOP}.embedding.word_embeddings.weight"].shape[0] * ranks)
    for one in contents:
        _require_tensors(one, tensors, ranks)
    dtype = reduce(torch.promote_types, (one.dtype for one in first.tensors.values()))
    where = {tensor.ours: tensor for tensor in tensors}
    return MegatronCheckpoint(config, dtype, contents, where)


def _require_like(first: MegatronContents, other: MegatronContents, rank: int) -> None:
    """Raise InputFileError unless ``other`` is the file of rank ``rank`` beside ``first``, that of rank 0."""
    for (name, one), two in zip(first.common.items(), other.common.values(), strict=True):
        if repr(one) != repr(two):  # also where it is no number
            raise other.wrong(f"is not of the checkpoint of rank 0: {name} is {two!r} here and {one!r} in {first.file}")
    numbers = first.settings.get("rank"), other.settings.get("rank")
    if numbers[0] != numbers[1] and numbers[1] != rank:  # programs that convert checkpoints write one number into all
        raise other.wrong(f"rank={numbers[1]} in its settings (args), in the place of the file of rank {rank}")


def _require_tensors(contents: MegatronContents, tensors: Sequence[MegatronTensor], ranks: int) -> None:
    """Raise InputFileError unless the file has all of the model's tensors, or its parts of them, and no others."""
    for tensor in tensors:
        shape = list(tensor.shape)
        if tensor.split is not None:
            shape[tensor.split] //= ranks
        found = contents.tensors.get(tensor.theirs)
        if found is None and tensor.ours == _TYPES:
            continue  # of a BERT without sentence order
        if found is None:
            raise contents.wrong(f"lacks {tensor.theirs}, {shape}")
        dense = found.layout is torch.strided and found.device.type == "cpu" and found.dtype in REAL
        if list(found.shape) != shape or not dense:
            raise contents.wrong(
                f"{tensor.theirs} is {list(found.shape)} of {found.dtype}; needed: {shape}, dense, of 16 to 64 bits"
            )
    if unknown := sorted(contents.tensors.keys() - {tensor.theirs for tensor in tensors}):
        raise contents.wrong(f"the model has no place for {some(unknown)}")


def _files(path: Path) -> list[Path]:
    """The file of each tensor-parallel rank, in their order. Raises InputFileError."""
    if not path.is_dir():
        return [path]
    if (path / _LATEST).is_file():
        newest = read_text(path / _LATEST, 1 << 10).strip()
        if newest != "release" and not newest.isdecimal():
            raise InputFileError(f"{path / _LATEST}: {newest[:80]!r}; needed: a number, or release")
        path = path / (newest if newest == "release" else f"iter_{int(newest):07d}")
        if not path.is_dir():
            raise InputFileError(f"{path}: there is no such folder; {_LATEST} names it")
    if (alone := _file_in(path)) is not None:
        return [alone]
    ranks = sorted(folder for folder in path.glob("mp_rank_*") if folder.is_dir())
    if not ranks:
        raise InputFileError(f"{path}: no checkpoint of Megatron-LM; needed: {FILES[0]}, mp_rank_00 or {_LATEST}")
    files = []
    for number, folder in enumerate(ranks):
        if re.fullmatch(r"mp_rank_\d+_\d+", folder.name):
            raise InputFileError(f"{folder}: a part of a pipeline-parallel run, which is not supported")
        if folder.name != (wanted := f"mp_rank_{number:02d}"):
            raise InputFileError(f"{path}: lacks {wanted}; it has {', '.join(one.name for one in ranks)}"[:300])
        if (file := _file_in(folder)) is None:
            raise InputFileError(f"{folder}: lacks {' or '.join(FILES)}")
        files.append(file)
    return files


def _file_in(folder: Path) -> Path | None:
    return next((folder / name for name in FILES if (folder / name).is_file()), None)
