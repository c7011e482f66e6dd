"""Checkpoints: a folder for each, which is complete or absent, and a pointer to the newest.

    SAVE/iter_0000100/model.safetensors        global parameters under global names
                      optimizer.safetensors    AdamW's moments, and fp32 masters of half parameters, likewise
                      state.json               iteration, updates, loss scaler, data read, settings, placements
                      checksums                of every piece of these files, and of itself
    SAVE/latest                                the name of the newest folder and its checksum, written last

Everything else that a run needs (order of samples, dropout, learning rate) is a function of the iteration, so a
resumed run continues with the same bits. The tensors are global: the files are the same however many ranks wrote them,
and whether or not the optimizer was sharded. A run may go on in another precision; it then starts from the masters, if
there are any.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from commengine import Communicator, ProcessGrid, UsageError
from commengine.files import checksums
from commengine.options.declared import flag_of
from commengine.rank_zero import on_every_rank
from tplayers import Placement, placements, whole_placements
from trainers.data.stream import MOCK, record_of_one
from trainers.settings.commands import TrainSettings
from trainers.settings.rules import require_resumable
from trainers.training.optimizer import MOMENTS, Optimizer

from . import disk, parallel_safetensors, pointer
from .parallel_safetensors import read_layout
from .pointer import STATE

if TYPE_CHECKING:
    from .state_file import SavedState

#: the files of a checkpoint
MODEL, OPTIMIZER, CHECKSUMS = "model.safetensors", "optimizer.safetensors", "checksums"

#: the key of a checkpoint's settings that says from which other program's files it was converted; such a checkpoint is
#: that of a run without steps
CONVERTED_FROM = "converted_from"

#: Format 1 is older than half precision: it has no masters, no loss scaler and no skipped steps. Format 2 is older than
#: blends of data sets: it has no record of the data. Format 3 is older than checksums. All of them are read.
FORMAT = 4


@dataclass(frozen=True)
class Progress:
    """The progress of a run.

    iteration: steps done. updates: those that were not skipped. loss_scaler: its state, in an fp16 run.
    masters: whether the optimizer's state has masters. data: what was read of each data set (`SampleStream.record`);
    None if the batches are a function of their number alone.
    """

    iteration: int
    updates: int
    loss_scaler: dict[str, Any] | None = None
    masters: bool = False
    data: dict[str, Any] | None = None


def find(folder: Path) -> Path | None:
    """``folder`` itself if it is a checkpoint, else the newest complete checkpoint in it, or None."""
    return folder if (folder / STATE).is_file() else pointer.latest(folder)


def missing(folder: Path, more: str = "") -> UsageError:
    """The error where `find` gives None for the folder of ``--load``. more: what else helps."""
    problem = "holds no checkpoint" if folder.is_dir() else "no such folder"
    valid = "the --save folder of a run, or one of the iter_* folders in it"
    return UsageError(f"--load {folder}: {problem}; valid: {valid}{more}")


def named_values(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(Name, tensor) of what the model's file holds: its parameters, then its buffers that PyTorch would save."""
    yield from model.named_parameters()
    saved = model.state_dict(keep_vars=True).keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def model_placements(model: nn.Module) -> dict[str, Placement]:
    """The placements of the `named_values` of the whole model. Every rank has whole buffers."""
    placed = whole_placements(model)
    return placed | {name: Placement(tuple(one.shape)) for name, one in named_values(model) if name not in placed}


def optimizer_placements(model: nn.Module, described: Mapping[str, tuple[torch.dtype, Placement]]) -> dict[str, Any]:
    """The dtype and placement of the optimizer's state of the whole model, by names in the order of the file.

    described: those of ``model``, which may be a stage (`Optimizer.described`).
    """
    whole, mine = whole_placements(model), placements(model)
    if whole.keys() == mine.keys():
        return dict(described)
    kinds = {name.partition(".")[0]: dtype for name, (dtype, _) in described.items()}
    return {f"{kind}.{name}": (dtype, placed) for kind, dtype in kinds.items() for name, placed in whole.items()}


def read_state(found: Path, config: TrainSettings) -> Progress:
    """The progress of the checkpoint's run. Raises UsageError where it is of another run than ``config`` or damaged.

    A setting that is marked as fixed (`commengine.options.declared.option`) must be the checkpoint's. One that the
    checkpoint's version did not have has its default there. A model that was converted from another program's
    (`trainers.convert`) says only what its function is.
    """
    state = saved_state(found, verify=config.verify_checkpoints)
    saved = {item.name: item.default for item in fields(config)} | state.settings
    converted = CONVERTED_FROM in state.settings
    for item in fields(config):
        free = converted and (item.name not in state.settings or item.name == "seq_length")
        if item.metadata["fixed"] and not free:
            _require_same(found, item.name, item.metadata["default_of"], asdict(config), saved)
    require_resumable(config, state.settings)
    return Progress(
        state.iteration,
        state.iteration if state.updates is None else state.updates,
        None if state.loss_scaler is None else state.loss_scaler.model_dump(),
        state.masters,
        _data_of_one(state.settings, state.iteration) if state.data is None else state.data.model_dump(),
    )


def saved_state(found: Path, *, verify: bool) -> SavedState:
    """What ``state.json`` of the checkpoint says. Raises UsageError where it is damaged.

    verify: compare it with its checksum.
    """
    from . import state_file  # pydantic takes as long to import as a small checkpoint to load

    with named_faults(found):
        pieces = _checksums(found) if verify else None
        for piece in pieces or ():
            if piece.name == STATE:
                checksums.check(found, piece)
        state = state_file.read(found / STATE)
        if (named := pointer.iteration_of(found)) not in (None, state.iteration):
            raise ValueError(
                f"{found / STATE}: it is of iteration {state.iteration}, and its folder's name of {named}: give the "
                f"folder the name {pointer.name_of(state.iteration)}"
            )
        if state.format >= 4 and pieces is None and verify:
            raise checksums.ChecksumError(f"{found / CHECKSUMS}: no such file")
    return state


def parameters_dtype(found: Path) -> torch.dtype:
    """The dtype of the parameters in a checkpoint's file, the widest if they differ. Raises UsageError."""
    with named_faults(found), disk.opened(found / MODEL) as file:
        stored = read_layout(file, found / MODEL)
    return functools.reduce(torch.promote_types, (one.dtype for one in stored.values()))


def _checksums(found: Path) -> list[checksums.Piece] | None:
    """The checksums of a checkpoint; None for one of an older version, which has none."""
    if not (found / CHECKSUMS).exists():
        return None
    pieces = checksums.read(found / CHECKSUMS)
    if lacking := {MODEL, OPTIMIZER, STATE} - {piece.name for piece in pieces}:
        raise ValueError(f"{found / CHECKSUMS}: damaged: it lacks {', '.join(sorted(lacking))}")
    return pieces


def cannot_load(found: Path, error: Exception) -> UsageError:
    """The error of a damaged checkpoint: it names other ones in the same folder."""
    others = [path.stem for path in pointer.complete(found.parent) if path != found]
    there = f"; other checkpoints there: {', '.join(others[-3:])}" if others else ""
    hint = "" if not isinstance(error, checksums.ChecksumError) else "; to load it unchecked: --no-verify-checkpoints"
    said = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
    return UsageError(f"--load: {said}{there}{hint}")


@contextlib.contextmanager
def named_faults(found: Path) -> Iterator[None]:
    """A block in which a ValueError or OSError means that the checkpoint is damaged: it becomes `cannot_load`."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise cannot_load(found, error) from error


def _data_of_one(saved: Mapping[str, Any], iteration: int) -> dict[str, Any] | None:
    """The record of data that a version without blends left out: it read ``data_path`` alone."""
    batch = saved.get("global_batch_size")
    path = saved.get("data_path")
    name = path if isinstance(path, str) and path else MOCK
    return None if batch is None else record_of_one(name, iteration * int(batch))


def _require_same(
    found: Path, name: str, default: str | None, ours: Mapping[str, Any], saved: Mapping[str, Any]
) -> None:
    """Raise UsageError unless the setting ``name`` is that of the checkpoint; ``default`` names its default, if any."""
    one, other = ours.get(name), saved.get(name)
    if default is not None:
        one, other = one or ours.get(default), other or saved.get(default)
    if one != other:
        flag = flag_of(name) + ("" if one is None else f" {one}")
        if default is not None:
            flag += f" (default {flag_of(default)})"
        said, was = ("not given: " if one is None else "", "without it" if other is None else f"with {other}")
        raise UsageError(f"{flag}: {said}the checkpoint {found} was saved {was}")


def load(
    found: Path, progress: Progress, model: nn.Module, optimizer: Optimizer, grid: ProcessGrid, *, verify: bool = True
) -> None:
    """Fill model and optimizer with the state of the checkpoint ``found``. Every rank reads its own parts.

    progress: of this checkpoint (`read_state`). verify: first compare all files with their checksums, each rank its
    share of them. Collective over the grid's world. Raises UsageError, on all ranks, if a file is damaged or belongs to
    another model.
    """
    world = grid.world
    if verify:
        on_every_rank(world, lambda: compare(found, world.rank, world.size))
    placed = placements(model)
    trained = {name for name in placed if f"{MOMENTS[0]}.{name}" in optimizer.described()}
    # Masters are the parameters before rounding, so filling them fills the parameters, too.
    kinds = (*MOMENTS, "master") if progress.masters else MOMENTS
    every = {name: one for name, one in whole_placements(model).items() if name in trained or name not in placed}
    parts = {f"{kind}.{name}": one for kind in kinds for name, one in every.items()}
    mine = {f"{kind}.{name}" for kind in kinds for name in trained}

    def read() -> None:
        with named_faults(found):
            for name, values in read_model(found, model, leave_out=trained if progress.masters else ()):
                if name in placed:
                    optimizer.fill("master", name, values)
                else:
                    model.get_buffer(name).copy_(values)
            if not progress.updates and not progress.masters:
                return  # the moments are 0, and a converted model has none
            for key, values in parallel_safetensors.read(found / OPTIMIZER, parts, wanted=mine):
                kind, _, name = key.partition(".")
                optimizer.fill(kind, name, values)
            optimizer.set_updates(progress.updates)

    on_every_rank(world, read)


def load_model(found: Path, model: nn.Module, world: Communicator, *, verify: bool = True) -> None:
    """Fill the model alone with the state of the checkpoint ``found``. Every rank reads its own parts.

    verify: first compare the model's file with its checksums. Collective over ``world``. Raises UsageError, on all
    ranks, if the file is damaged or belongs to another model.
    """
    if verify:
        on_every_rank(world, lambda: compare(found, world.rank, world.size, file=MODEL))
    named = dict(named_values(model))
    in_host = {name: one for name, one in named.items() if one.device.type == "cpu" and one.is_contiguous()}

    def read() -> None:
        with named_faults(found), torch.no_grad():
            for name, values in read_model(found, model, into=in_host):
                if values is not in_host.get(name):
                    named[name].copy_(values)

    on_every_rank(world, read)


def compare(found: Path, part: int = 0, parts: int = 1, *, file: str | None = None) -> None:
    """Compare the files of a checkpoint with their checksums; one of an older version has none.

    part, parts: compare only every ``parts``-th piece, from number ``part`` on. file: the only file to compare. Not
    collective. Raises UsageError that names the file and the bytes.
    """
    with named_faults(found):
        pieces = [piece for piece in _checksums(found) or [] if file in (None, piece.name)]
        for _ in checksums.verify(found / CHECKSUMS, pieces, part, parts):
            pass


def read_model(
    found: Path, model: nn.Module, leave_out: Collection[str] = (), into: Mapping[str, Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(Name, this rank's values) of the model's parameters and buffers in the checkpoint, but those to leave out.

    into: as for `parallel_safetensors.read`.

    Raises ValueError, naming the file, if it is of another model, and OSError.
    """
    parts = model_placements(model)
    other = {name for name, one in named_values(model) if not one.dtype.is_floating_point}
    wanted = {name for name, _ in named_values(model)} - set(leave_out)
    if wanted:
        yield from parallel_safetensors.read(found / MODEL, parts, wanted=wanted, any_dtype=other, into=into)
