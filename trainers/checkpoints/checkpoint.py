"""Checkpoints: a folder for each, which is complete or absent, and a pointer to the newest.

    SAVE/iter_0000100/model.safetensors        global parameters under global names
                      optimizer.safetensors    AdamW's moments, and fp32 masters of half parameters, likewise
                      state.json               iteration, updates, loss scaler, data read, settings, placements
    SAVE/latest                                the name of the newest folder, written last

Everything else that a run needs (order of samples, dropout, learning rate) is a function of the iteration, so a
resumed run continues with the same bits. The tensors are global: the files are the same however many ranks wrote them,
and whether or not the optimizer was sharded. A run may go on in another precision; it then starts from the masters, if
there are any.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from commengine import ProcessGrid, UsageError
from commengine.rank_zero import on_every_rank, on_rank_zero
from tplayers import Placement, placements
from trainers.config import TrainConfig
from trainers.data.stream import MOCK, record_of_one
from trainers.training.optimizer import Optimizer
from trainers.training.parameters import MOMENTS

from . import parallel_safetensors

FORMAT = 3

#: Format 1 is older than half precision: it has no masters, no loss scaler and no skipped steps. Format 2 is older than
#: blends of data sets: it has no record of the data.
READABLE = (1, 2, 3)


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


def save(
    folder: Path,
    progress: Progress,
    model: nn.Module,
    optimizer: Optimizer,
    settings: Mapping[str, Any],
    grid: ProcessGrid,
) -> None:
    """Write the state after ``progress.iteration`` steps. Collective over the grid's world."""
    name = f"iter_{progress.iteration:07d}"
    beside = folder / f"{name}.tmp"
    on_rank_zero(grid.world, lambda: _make_empty(beside))
    optimizer.wait_for_parameters()
    placed = placements(model)
    if grid.data.rank == 0:  # this tensor group holds everything that is not sharded over the data group
        weights = {key: (p.dtype, placed[key]) for key, p in model.named_parameters()}
        parallel_safetensors.write(beside / "model.safetensors", weights, model.named_parameters(), grid.tensor)
        state = optimizer.described()
        parallel_safetensors.write(beside / "optimizer.safetensors", state, optimizer.tensors(), grid.tensor)
    else:
        for _ in optimizer.tensors():  # this rank's shards go to rank 0 of the data group
            pass
    grid.world.barrier()

    def publish() -> None:
        described = {key: _describe(placement) for key, placement in placed.items()}
        written = {"format": FORMAT, **asdict(progress), "settings": dict(settings), "parameters": described}
        _write_synced(beside / "state.json", json.dumps(written, indent=1))
        final, old = folder / name, folder / f"{name}.old"
        _sync_folder(beside)
        if final.exists():  # a checkpoint of an earlier run: it stays whole until the new one is complete
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
        beside.rename(final)
        shutil.rmtree(old, ignore_errors=True)
        _write_synced(folder / "latest.tmp", name + "\n")
        (folder / "latest.tmp").rename(folder / "latest")
        _sync_folder(folder)

    on_rank_zero(grid.world, publish)


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint of ``folder``, or None. Raises UsageError if the pointer names none."""
    pointer = folder / "latest"
    if not pointer.exists():
        if whole := sorted(path.parent.name for path in folder.glob("iter_*/state.json")):
            raise UsageError(
                f"--load {folder}: there is no {pointer}, which names the newest checkpoint, but there are "
                f"{', '.join(whole[-3:])}; give one of them to --load"
            )
        return None
    found = folder / pointer.read_text().strip()
    aside = found.with_name(f"{found.name}.old")  # its name while a new checkpoint takes its place
    if not found.exists() and (aside / "state.json").is_file():
        return aside
    if not (found / "state.json").is_file():
        raise UsageError(f"--load {folder}: {pointer} names {found.name}, which is not a complete checkpoint")
    return found


def find(folder: Path) -> Path | None:
    """``folder`` itself if it is a checkpoint, else the newest complete checkpoint in it, or None."""
    return folder if (folder / "state.json").is_file() else latest(folder)


def read_state(found: Path, config: TrainConfig) -> Progress:
    """The progress of the checkpoint's run. Raises UsageError where it is of another run than ``config`` or damaged.

    A setting that is marked as fixed (`trainers.options.option`) must be the checkpoint's.
    """
    try:
        state = json.loads((found / "state.json").read_text())
        iteration, saved = int(state["iteration"]), state["settings"]
        progress = Progress(
            iteration, int(state.get("updates", iteration)), state.get("loss_scaler"), bool(state.get("masters")),
            state.get("data") or _data_of_one(saved, iteration),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--load: {found / 'state.json'} is damaged: {error!r}") from error
    if state.get("format") not in READABLE:
        raise UsageError(f"--load: {found} has format {state.get('format')}, this version reads {READABLE}")
    for item in fields(config):
        if item.metadata["fixed"]:
            _require_same(found, item.name, item.metadata["default_of"], config.to_json(), saved)
    return progress


def _data_of_one(saved: Mapping[str, Any], iteration: int) -> dict[str, Any] | None:
    """The record of data that a version without blends left out: it read ``data_path`` alone."""
    batch = saved.get("global_batch_size")
    return None if batch is None else record_of_one(saved.get("data_path") or MOCK, iteration * int(batch))


def _require_same(
    found: Path, name: str, default: str | None, ours: Mapping[str, Any], saved: Mapping[str, Any]
) -> None:
    """Raise UsageError unless the setting ``name`` is that of the checkpoint; ``default`` names its default, if any."""
    one, other = ours.get(name), saved.get(name)
    if default is not None:
        one, other = one or ours.get(default), other or saved.get(default)
    if one != other:
        flag = f"--{name.replace('_', '-')} {one}"
        if default is not None:
            flag += f" (default --{default.replace('_', '-')})"
        raise UsageError(f"{flag}: the checkpoint {found} was saved with {other}")


def load(found: Path, progress: Progress, model: nn.Module, optimizer: Optimizer, grid: ProcessGrid) -> None:
    """Fill model and optimizer with the state of the checkpoint ``found``. Every rank reads its own parts.

    progress: of this checkpoint (`read_state`). Collective over the grid's world. Raises UsageError, on all ranks, if a
    file is damaged or belongs to another model.
    """
    on_every_rank(grid.world, lambda: _read(found, progress, model, optimizer))


def _read(found: Path, progress: Progress, model: nn.Module, optimizer: Optimizer) -> None:
    placed = placements(model)
    # Masters are the parameters before rounding, so filling them fills the parameters, too.
    kinds = (*MOMENTS, "master") if progress.masters else MOMENTS
    if not progress.masters:
        _fill(optimizer, found / "model.safetensors", {("master", name): name for name in placed}, placed)
    state = {(kind, name): f"{kind}.{name}" for kind in kinds for name in placed}
    _fill(optimizer, found / "optimizer.safetensors", state, placed)
    optimizer.set_updates(progress.updates)


def _fill(
    optimizer: Optimizer, path: Path, names: Mapping[tuple[str, str], str], placed: Mapping[str, Placement]
) -> None:
    """Fill each (kind of state, parameter) of ``names`` from the tensor of that name in the file."""
    targets = {key: target for target, key in names.items()}
    parts = {key: placed[name] for key, (_, name) in targets.items()}
    try:
        for key, values in parallel_safetensors.read(path, parts):
            optimizer.fill(*targets[key], values)
    except (SafetensorError, ValueError, OSError) as error:
        raise UsageError(f"--load: {path} cannot be read: {error}") from error


def _describe(placement: Placement) -> dict[str, Any]:
    return {"shape": placement.shape, "view": placement.view, "dim": placement.dim, "count": placement.count}


def _make_empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make sure that renames inside ``folder`` are on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
