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

import errno
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn

from commengine import ProcessGrid, UsageError
from commengine.rank_zero import on_every_rank, on_rank_zero
from tplayers import Placement, placements
from trainers.config import TrainConfig
from trainers.data.stream import MOCK, record_of_one
from trainers.training.optimizer import Optimizer
from trainers.training.parameters import MOMENTS

from . import disk, parallel_safetensors

#: the files of a checkpoint
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"

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
    """Write the state after ``progress.iteration`` steps. Collective over the grid's world.

    Raises UsageError, on all ranks, if any rank cannot write: it names the file and the reason. The checkpoints that
    were there before are as they were.
    """
    name = f"iter_{progress.iteration:07d}"
    beside = folder / f"{name}.tmp"
    placed = placements(model)
    weights = {key: (p.dtype, placed[key]) for key, p in model.named_parameters()}
    state = optimizer.described()
    sizes = {MODEL: parallel_safetensors.file_size(weights), OPTIMIZER: parallel_safetensors.file_size(state)}
    try:
        on_rank_zero(grid.world, lambda: _told(folder, beside, sizes, lambda: disk.make_empty(beside)))
        optimizer.wait_for_parameters()
        problems = []
        if grid.data.rank == 0:  # this tensor group holds everything that is not sharded over the data group
            for file, described, tensors in (
                (MODEL, weights, model.named_parameters()),
                (OPTIMIZER, state, optimizer.tensors()),
            ):
                with disk.RangeWriter(beside / file) as writer:
                    for start, data in parallel_safetensors.ranges(described, tensors, grid.tensor):
                        writer.write(start, data)
                if writer.problem is not None:
                    problems.append(disk.named(writer.problem, writer.path))
        else:
            for _ in optimizer.tensors():  # this rank's shards go to rank 0 of the data group
                pass
        on_every_rank(grid.world, lambda: _told(folder, beside, sizes, lambda: _raise_first(problems)))

        def publish() -> None:
            described = {key: _describe(placement) for key, placement in placed.items()}
            written = {"format": FORMAT, **asdict(progress), "settings": dict(settings), "parameters": described}
            for file, size in sizes.items():
                if (found := (beside / file).stat().st_size) != size:
                    raise OSError(errno.EIO, f"has {found} bytes after writing {size}", str(beside / file))
            disk.write(beside / STATE, json.dumps(written, indent=1).encode())
            disk.sync_folder(beside)
            final, old = folder / name, folder / f"{name}.old"
            if final.exists():  # a checkpoint of an earlier run: it stays whole until the new one is complete
                disk.remove(old)
                disk.replace(final, old)
            disk.replace(beside, final)
            disk.write(folder / "latest.tmp", f"{name}\n".encode())
            disk.replace(folder / "latest.tmp", folder / "latest")
            disk.remove(old)

        on_rank_zero(grid.world, lambda: _told(folder, beside, sizes, publish))
    except UsageError:
        if grid.world.rank == 0:
            disk.remove_if_possible(beside)
        raise


def _told(folder: Path, beside: Path, sizes: Mapping[str, int], work: Callable[[], None]) -> None:
    """Run ``work``, and turn its OSError into a UsageError that says what a user can do."""
    try:
        work()
    except OSError as error:
        file = str(error.filename or beside).replace(str(beside), str(beside.with_suffix("")))
        said = f"--save {folder}: writing {file} failed: {error.strerror or error}"
        if error.errno in disk.NO_ROOM:
            said += f" (a checkpoint of this run takes {sum(sizes.values()) / 1e6:,.1f} MB)"
        whole = latest(folder)
        kept = f"the last checkpoint, {whole.name}, is as it was" if whole else "there is no older checkpoint"
        raise UsageError(f"{said}; {kept}. The same command with --load {folder} goes on") from error


def _raise_first(problems: Sequence[OSError]) -> None:
    if problems:
        raise problems[0]


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
    except (ValueError, OSError) as error:
        raise UsageError(f"--load: {path} cannot be read: {error}") from error


def _describe(placement: Placement) -> dict[str, Any]:
    return {"shape": placement.shape, "view": placement.view, "dim": placement.dim, "count": placement.count}
