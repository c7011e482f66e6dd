"""Saving and resuming: a folder per checkpoint, complete or absent, and a pointer to the newest.

    SAVE/iter_0000100/model.safetensors        global parameters under global names
                      optimizer.safetensors    AdamW's moments, likewise
                      state.json               iteration, settings, placements
    SAVE/latest                                the name of the newest folder, written last

Everything else that a run needs (order of samples, dropout, learning rate) is a function of the iteration, so a
resumed run continues bit for bit. The tensors are global: nothing in them tells how many ranks wrote them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from commengine import ProcessGrid, UsageError
from tplayers import Placement, placement_of

from . import parallel_safetensors
from .optimizer import moments, prepare_moments
from .rank_zero import on_every_rank, on_rank_zero

FORMAT = 1

#: settings that must be those of the checkpoint: the model, and what decides which samples come next
FIXED_SETTINGS = (
    "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "vocab_size", "make_vocab_size_divisible_by",
    "global_batch_size", "seed", "seq_length", "split", "mock_data",
)  # fmt: skip


def save(
    folder: Path,
    iteration: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: Mapping[str, Any],
    grid: ProcessGrid,
) -> None:
    """Write the state after ``iteration`` steps. Collective over the grid's world."""
    name = f"iter_{iteration:07d}"
    beside = folder / f"{name}.tmp"
    on_rank_zero(grid.world, lambda: _make_empty(beside))
    if grid.data.rank == 0:  # one tensor group holds everything
        placements = {key: placement_of(p) for key, p in model.named_parameters()}
        weights = {key: (p.detach(), placements[key]) for key, p in model.named_parameters()}
        state = {key: (tensor, placement_of(p)) for key, (tensor, p) in moments(optimizer, model).items()}
        parallel_safetensors.write(beside / "model.safetensors", weights, grid.tensor)
        parallel_safetensors.write(beside / "optimizer.safetensors", state, grid.tensor)
    grid.world.barrier()

    def publish() -> None:
        described = {key: _describe(placement_of(p)) for key, p in model.named_parameters()}
        written = {"format": FORMAT, "iteration": iteration, "settings": dict(settings), "parameters": described}
        _write_synced(beside / "state.json", json.dumps(written, indent=1))
        final, old = folder / name, folder / f"{name}.old"
        _sync_folder(beside)
        if final.exists():  # of an earlier run into the same folder: whole until the new one is there
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
        beside.rename(final)
        shutil.rmtree(old, ignore_errors=True)
        _write_synced(folder / "latest.tmp", name + "\n")
        (folder / "latest.tmp").rename(folder / "latest")
        _sync_folder(folder)

    on_rank_zero(grid.world, publish)


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint of ``folder``, or None. Raises UsageError where the pointer leads nowhere."""
    pointer = folder / "latest"
    if not pointer.exists():
        return None
    found = folder / pointer.read_text().strip()
    aside = found.with_name(f"{found.name}.old")  # while another of the same name takes its place
    if not found.exists() and (aside / "state.json").is_file():
        return aside
    if not (found / "state.json").is_file():
        raise UsageError(f"--load {folder}: {pointer} names {found.name}, which is not a complete checkpoint")
    return found


def read_state(found: Path, settings: Mapping[str, Any]) -> int:
    """The iteration of the checkpoint. Raises UsageError where it is of another model or format."""
    try:
        state = json.loads((found / "state.json").read_text())
        iteration, saved = int(state["iteration"]), state["settings"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--load: {found / 'state.json'} is damaged: {error!r}") from error
    if state.get("format") != FORMAT:
        raise UsageError(f"--load: {found} has format {state.get('format')}, this version reads {FORMAT}")
    for name in FIXED_SETTINGS:
        theirs = saved.get(name)
        if theirs != settings[name]:
            flag = f"--{name.replace('_', '-')} {settings[name]}"
            raise UsageError(f"{flag}: the checkpoint {found} was saved with {theirs}")
    positions, theirs = (s.get("max_position_embeddings") or s.get("seq_length") for s in (settings, saved))
    if positions != theirs:
        flag = f"--max-position-embeddings {positions} (default --seq-length)"
        raise UsageError(f"{flag}: the checkpoint {found} was saved with {theirs}")
    return iteration


def load(found: Path, iteration: int, model: nn.Module, optimizer: torch.optim.Optimizer, grid: ProcessGrid) -> None:
    """Fill model and optimizer with the state saved after ``iteration`` steps. Every rank reads its own parts.

    Collective over the grid's world. Raises UsageError, on all ranks, where a file is damaged or of another model.
    """
    on_every_rank(grid.world, lambda: _read(found, iteration, model, optimizer))


def _read(found: Path, iteration: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    placements = {name: placement_of(p) for name, p in model.named_parameters()}
    weights: dict[str, Tensor] = dict(model.named_parameters())
    _read_file(found / "model.safetensors", placements, weights)
    prepare_moments(optimizer, model, iteration)
    state = moments(optimizer, model)
    targets = {name: tensor for name, (tensor, _) in state.items()}
    of_moments = {name: placement_of(p) for name, (_, p) in state.items()}
    _read_file(found / "optimizer.safetensors", of_moments, targets)


def _read_file(path: Path, placements: Mapping[str, Placement], into: Mapping[str, Tensor]) -> None:
    try:
        parallel_safetensors.read(path, placements, into)
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
    """Put renames inside ``folder`` on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
