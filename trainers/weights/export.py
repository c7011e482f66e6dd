"""A model written as a folder that ``from_pretrained`` of transformers reads, by all ranks at once.

The folder has config.json, model.safetensors and the tokenizer's files. Its bytes do not depend on the ranks that
wrote it. It is written in a folder beside its own, and gets its name last: it is complete or absent.
"""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from commengine import Communicator, ProcessGrid, UsageError
from commengine.rank_zero import on_every_rank, on_rank_zero
from tplayers import BERTConfig, T5Config, Transformer, TransformerConfig, whole_placements
from trainers.checkpoints import disk, folder_lock, parallel_safetensors, run_folder
from trainers.training.holders import held_first

from .configurations import CONFIG, TaskHead, read_keys, written_configuration
from .hugging_face import hugging_face_tensors
from .hugging_face_model import TheirPart, pieces_of
from .tensor_files import SAFETENSORS
from .tokenizer_files import COPIED, GENERATION, end_of_text, written_tokenizer

#: the names, in a `working_folder`, of the new export and of the one that it replaces
NEW, OLD = "new", "old"
#: how transformers knows that the tensors are PyTorch's
METADATA = {"format": "pt"}


def require_replaceable(option: str, folder: Path, *, overwrite: bool) -> None:
    """Raise UsageError unless an export may be written to ``folder``. On one rank; it changes no file.

    A folder with files is replaced with ``overwrite`` alone, and only if an export wrote all of them: a run's folder,
    a checkpoint and a user's other files are never removed. option: the one that names ``folder``.
    """
    place, another = folder.resolve(), f"give {option} a new folder"
    if place == Path.cwd():
        raise UsageError(f"{option} {folder}: is the working directory, which cannot be replaced; {another}")
    if run_folder.is_of_run(place):
        raise UsageError(f"{option} {folder}: has the name of a part of the run in {place.parent}; {another}")
    if not place.exists():
        return
    if not place.is_dir():
        raise UsageError(f"{option} {folder}: is there already, and is no folder; {another}")
    there = {path.name: path.is_file() and not path.is_symlink() for path in place.iterdir()}
    if not there:
        return
    if foreign := sorted(
        name for name, file in there.items() if not file or name not in (CONFIG, SAFETENSORS, *COPIED)
    ):
        names = ", ".join(foreign[:3])
        raise UsageError(f"{option} {folder}: is there already, with files that no export writes ({names}); {another}")
    if missing := [name for name in (CONFIG, SAFETENSORS) if name not in there]:
        raise UsageError(f"{option} {folder}: is there already, and is no export (without {missing[0]}); {another}")
    if not overwrite:
        raise UsageError(f"{option} {folder}: is there already; {another}, or --overwrite")


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed job has left beside ``folder``, which no other job writes now. On one rank.

    An export that was about to be replaced gets its name back. Raises OSError.
    """
    _give_back(folder)
    disk.remove_if_possible(_beside(folder))


def _give_back(folder: Path) -> None:
    """Give an export its name back, which it lost to a new one that never came. Raises OSError."""
    old = _beside(folder) / OLD
    if old.exists() and not folder.exists():
        disk.replace(old, folder)


def _beside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.commengine-tmp")  # no user gives a folder this name


@contextlib.contextmanager
def working_folder(world: Communicator, folder: Path, told: Callable[[Callable[[], Any]], None]) -> Iterator[Path]:
    """A folder beside ``folder`` that one job at a time has, with an empty folder `NEW` in it, for a ``with`` block.

    `NEW` and `OLD` in it are removed at the end, also those that a killed job left, but `OLD` gets the name ``folder``
    if nothing has it. told: calls its argument, and raises UsageError in place of OSError. Collective over ``world``.
    Raises UsageError, on all ranks.
    """
    own = _beside(folder)
    on_rank_zero(world, lambda: told(lambda: own.mkdir(parents=True, exist_ok=True)))
    lock: folder_lock.FolderLock | None = None

    def leave() -> None:
        if lock is not None:
            disk.remove_if_possible(own / NEW)  # first, because it may be what fills the disk
            with contextlib.suppress(OSError):
                _give_back(folder)
                disk.remove(own / OLD)
            lock.release()
        with contextlib.suppress(OSError):  # another job has it now
            own.rmdir()

    def clear() -> None:
        _give_back(folder)
        disk.remove(own / OLD)
        disk.make_empty(own / NEW)

    try:
        lock = folder_lock.hold(world, own, option="--to hf")
        on_rank_zero(world, lambda: told(clear))
        yield own
    except BaseException:
        if world.rank == 0:  # the other ranks may not come any more
            leave()
        raise
    on_rank_zero(world, leave)


@dataclass(frozen=True)
class SmallFiles:
    """The files of an export besides the weights: those of the folder that the model came from, or new ones.

    origin: a folder of Hugging Face, whose tokenizer and config.json are repeated; None for none.
    tokenizer_model: of a run, if there is no ``origin`` with a tokenizer; None for none. sentinels: that a T5 adds.
    """

    origin: str | None = None
    tokenizer_model: str | None = None
    sentinels: int = 0

    def write(self, folder: Path, config: TransformerConfig, dtype: torch.dtype, head: TaskHead | None = None) -> None:
        """Write them into ``folder``. On one rank. Raises ValueError and OSError that name the file."""
        origin = None if self.origin is None else Path(self.origin)
        there = origin is not None and (origin / CONFIG).is_file()
        keys = read_keys(origin / CONFIG) if origin is not None and there else {}
        written = written_configuration(config, dtype, keys, head)
        if not there and not isinstance(config, BERTConfig):
            # Without these keys transformers has those of its class: a Llama would end texts at token 2.
            ends = dict.fromkeys(("bos_token_id", "eos_token_id"), end_of_text(self.tokenizer_model))
            if isinstance(config, T5Config):
                start = config.decoder_start_token_id
                ends |= {"bos_token_id": None, "decoder_start_token_id": start, "pad_token_id": start}
            written |= ends
            disk.write(folder / GENERATION, _json(ends))
        disk.write(folder / CONFIG, _json(written))
        copied = [] if origin is None else _copied(origin, folder, COPIED)
        if self.tokenizer_model is not None and not any("token" in name or "vocab" in name for name in copied):
            for name, content in written_tokenizer(self.tokenizer_model, self.sentinels, config.vocab_size).items():
                disk.write(folder / name, content)


def _json(keys: Mapping[str, Any]) -> bytes:
    return json.dumps(keys, indent=2, sort_keys=True).encode() + b"\n"


def require_exportable(config: TransformerConfig) -> None:
    """Raise ValueError, naming the field, if no class of transformers is a model of this shape."""
    written_configuration(config, torch.float32)


def export(
    model: Transformer, grid: ProcessGrid, folder: Path, small: SmallFiles, head: TaskHead | None = None,
    may_replace: Callable[[], None] | None = None,
) -> None:  # fmt: skip
    """Write ``model`` into ``folder``, in place of all that is there. Collective over the grid's world.

    head: of a fine-tuned BERT. may_replace: called on rank 0 before ``folder`` gets its new content; it raises
    UsageError if the present one must stay. None: ``folder`` is the caller's own.

    The ranks that are the first to hold a parameter (`held_first`) write. Raises UsageError, on all ranks, if the model
    is of no shape that transformers has, or if any rank cannot write.
    """
    world, config = grid.world, model.config
    on_every_rank(world, lambda: _told(folder, lambda: require_exportable(config)))
    with working_folder(world, folder, lambda work: _told(folder, work)) as own:
        beside, named = own / NEW, dict(model.named_parameters())
        values, dtype = held_first(model, grid, named), next(iter(named.values())).dtype
        pieces = list(_pieces(model, None if head is None else head.ours))
        described = {piece.name: (dtype, piece.placement) for piece, _ in pieces}
        problem: OSError | None = None
        if grid.expert_replicas.rank == 0:
            here = ((piece, values[ours].detach()) for piece, ours in pieces if ours in values)
            parts = ((piece.name, piece.of(one).contiguous()) for piece, one in here)
            first = grid.replicas.rank == grid.pipeline.rank == 0
            with disk.RangeWriter(beside / SAFETENSORS) as file:
                for start, data in parallel_safetensors.ranges(
                    described, parts, grid.tensor, metadata=METADATA, header=first
                ):
                    file.write(start, data)
            problem = file.problem

        def written() -> None:
            if problem is not None:
                raise problem

        on_every_rank(world, lambda: _told(folder, written))

        def publish() -> None:
            size, needed = disk.size(beside / SAFETENSORS), parallel_safetensors.file_size(described, METADATA)
            if size != needed:
                raise OSError(errno.EIO, f"has {size} bytes after writing {needed}", str(beside / SAFETENSORS))
            small.write(beside, config, dtype, head)
            disk.sync_folder(beside)
            if may_replace is not None:
                may_replace()
            if folder.is_symlink() or folder.is_file():
                disk.remove(folder)
            elif folder.is_dir() and any(folder.iterdir()):
                disk.replace(folder, own / OLD)  # removing it takes longer, and a kill meanwhile would leave half of it
            disk.replace(beside, folder)

        on_rank_zero(world, lambda: _told(folder, publish))


def _told(folder: Path, work: Any) -> None:
    try:
        work()
    except OSError as error:
        raise UsageError(f"writing {error.filename or folder} failed: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"{folder}: cannot be written for Hugging Face: {error}") from error


def _pieces(model: Transformer, head: str | None) -> Iterator[tuple[TheirPart, str]]:
    """Each of Hugging Face's tensors with the name of our parameter that has it, in the order of the file."""
    placed = whole_placements(model)
    for tensor in hugging_face_tensors(model.config, head):
        for piece in pieces_of(tensor, placed[tensor.ours], model.config.vocab_size):
            yield piece, tensor.ours


def copy_small_files(origin: Path, folder: Path) -> None:
    """Copy config.json and the tokenizer's files of ``origin`` into a new ``folder``.

    On one rank. Raises OSError.
    """
    disk.make_empty(folder)
    _copied(origin, folder, (CONFIG, *COPIED))


def _copied(origin: Path, folder: Path, names: Sequence[str]) -> list[str]:
    """Copy those of the files that are there. Returns their names."""
    there = [name for name in names if (origin / name).is_file()]
    for name in there:
        disk.write(folder / name, (origin / name).read_bytes())
    return there
