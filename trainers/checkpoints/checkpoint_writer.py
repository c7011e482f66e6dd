"""Writing one checkpoint: at once, or in the background while training goes on."""

from __future__ import annotations

import errno
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from commengine import ProcessGrid, UsageError
from commengine.files import checksums
from commengine.rank_zero import gather_json, on_every_rank, on_rank_zero
from tplayers import Placement, whole_placements
from trainers.training.holders import held_first
from trainers.training.optimizer import Optimizer
from trainers.training.optimizer_state import OptimizerState

from . import disk, parallel_safetensors, pointer
from .checkpoint import (
    CHECKSUMS,
    FORMAT,
    MODEL,
    OPTIMIZER,
    Progress,
    model_placements,
    named_values,
    optimizer_placements,
)
from .pointer import STATE

#: what `CheckpointWriter.state` says of one rank; the largest value over the ranks says it of all
DONE, WRITING, FAILED = range(3)

#: seconds between two looks at the threads of all ranks
LOOK_SECONDS = 0.05


class CheckpointWriter:
    """A checkpoint of the state after ``progress.iteration`` steps, that is being written.

    With ``background`` each rank copies what it will write (its share of the files, see `held_first`), and a
    thread of each rank writes the copy: model and optimizer may change at once. Otherwise the files are written when
    the constructor returns. In both cases the checkpoint has its name only after `finish`, and until then the older
    checkpoints are as they were.

    optimizer: None: one that has done no step. kind: of the run, for those who read the checkpoint.

    lost: asked on rank 0 before it changes anything in the folder; why the folder is another run's by now, or None.

    The threads do not communicate. Collective over the grid's world to make and to finish. Raises UsageError, on all
    ranks, if any rank cannot write: it names the file and the reason.
    """

    def __init__(
        self, folder: Path, progress: Progress, model: nn.Module, optimizer: Optimizer | OptimizerState | None,
        settings: Mapping[str, Any], grid: ProcessGrid, *, kind: str | None = None, background: bool = False,
        lost: Callable[[], str | None] = lambda: None,
    ) -> None:  # fmt: skip
        self._lost = lost
        self._folder, self._world, self._grid = folder, grid.world, grid
        self._name = pointer.name_of(progress.iteration)
        self._beside = folder / f"{self._name}.tmp"
        described = {key: _describe(placement) for key, placement in whole_placements(model).items()}
        of_run = {} if kind is None else {"kind": kind}
        self._state = {
            "format": FORMAT, **of_run, **asdict(progress), "settings": dict(settings), "parameters": described,
        }  # fmt: skip
        values, second = dict(named_values(model)), getattr(model, "second_copy", None)
        dtype = next(iter(values.values())).dtype  # of parameters that other stages have
        weights = {
            key: (values[key].dtype if key in values else dtype, one) for key, one in model_placements(model).items()
        }
        moments: dict[str, Any] = {}
        state: Iterator[tuple[str, Tensor]] = iter(())
        if optimizer is not None:
            moments = optimizer_placements(model, optimizer.described())
            state = ((key, one) for key, one in optimizer.tensors() if key.partition(".")[2] != second)
        self._sizes = {
            MODEL: parallel_safetensors.file_size(weights),
            OPTIMIZER: parallel_safetensors.file_size(moments),
        }
        self._problem: BaseException | None = None
        self._pieces: list[checksums.Piece] = []  # what this rank writes
        self._thread: threading.Thread | None = None
        self._given_up = threading.Event()
        self._on_rank_zero(self._prepare)
        if isinstance(optimizer, Optimizer):
            optimizer.wait_for_parameters()
        mine: Iterator[tuple[str, int, Any]] = iter(())
        if grid.expert_replicas.rank == 0:  # the first replica, and with expert groups all that have other experts
            first, own = grid.replicas.rank == grid.pipeline.rank == 0, held_first(model, grid, values).items()
            mine = (
                (file, start, data)
                for file, described, given in ((MODEL, weights, own), (OPTIMIZER, moments, state))
                for start, data in parallel_safetensors.ranges(described, given, grid.tensor, header=first)
            )
        else:
            for _ in state:  # this rank's shards go to the first rank that holds the same parameters
                pass
        if background:
            copies = deque((file, start, bytes(data)) for file, start, data in mine)
            self._thread = threading.Thread(target=self._write_copies, args=(copies,), name="checkpoint", daemon=True)
            self._thread.start()
        else:
            self._write(mine)

    @property
    def state(self) -> int:
        """DONE, WRITING or FAILED: how far this rank is. Not collective."""
        if self._problem is not None:
            return FAILED
        return WRITING if self._thread is not None and self._thread.is_alive() else DONE

    def finish(self) -> None:
        """Wait until all ranks have written their shares, and give the checkpoint its name. Collective.

        A failure of any rank is an error on all; then the others do not wait until theirs are written.
        """
        try:
            self._wait()
            on_every_rank(self._world, lambda: self._told(self._raise_problem))
            of_stage = [one for some in gather_json(self._grid.tensor, self._pieces) for one in some]
            of_stage = [one for some in gather_json(self._grid.expert, of_stage) for one in some]
            pieces = [checksums.Piece(*one) for some in gather_json(self._grid.pipeline, of_stage) for one in some]
            self._on_rank_zero(lambda: self._publish(pieces))
        except UsageError:  # on all ranks
            self._world.barrier()  # no rank writes any more, see `_wait`
            if self._world.rank == 0 and self._lost() is None:  # another run's checkpoint may have this name
                disk.remove_if_possible(self._beside)
            raise

    def _wait(self) -> None:
        """Wait for the threads of all ranks, in collectives of which none takes long: a disk may be slow. Collective.

        If one of them has failed, the others write nothing more.
        """
        while (state := self._largest_state()) == WRITING:
            time.sleep(LOOK_SECONDS)
        if state == FAILED:
            self._given_up.set()
        if self._thread is not None:
            self._thread.join()

    def _largest_state(self) -> int:
        largest = torch.tensor([self.state])
        self._world.all_reduce(largest, "max")
        return int(largest)

    # This rank's share ----------------------------------------------------------------------------------------

    def _write_copies(self, copies: deque[tuple[str, int, Any]]) -> None:
        """Write the copies, each of which is freed when it is written. On the thread."""
        try:
            self._write(copies.popleft() for _ in range(len(copies)))
        except BaseException as error:  # `finish` raises it on the caller's thread
            self._problem = error

    def _write(self, ranges: Iterator[tuple[str, int, Any]]) -> None:
        """Write ``ranges`` to the disk. The iterator is exhausted whatever happens: it communicates."""
        with ExitStack() as files:
            writers: dict[str, disk.RangeWriter] = {}
            for file, start, data in ranges:
                if self._given_up.is_set():
                    break
                if file not in writers:
                    writers[file] = files.enter_context(disk.RangeWriter(self._beside / file))
                writers[file].write(start, data)
                self._pieces.append(checksums.Piece(file, start, start + len(data), checksums.digest(data)))
        for writer in writers.values():
            self._problem = self._problem or writer.problem

    # Rank 0 ---------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        pointer.make_room(self._folder)
        disk.make_empty(self._beside)

    def _publish(self, pieces: list[checksums.Piece]) -> None:
        """Write what is left, and give the checkpoint its name: from then on it is the newest one."""
        for file, size in self._sizes.items():
            if (found := disk.size(self._beside / file)) != size:
                raise OSError(errno.EIO, f"has {found} bytes after writing {size}", str(self._beside / file))
        state = json.dumps(self._state, indent=1).encode()
        disk.write(self._beside / STATE, state)
        pieces.append(checksums.Piece(STATE, 0, len(state), checksums.digest(state)))
        disk.write(self._beside / CHECKSUMS, checksums.text(sorted(pieces)).encode())
        disk.sync_folder(self._beside)
        final, old = self._folder / self._name, self._folder / f"{self._name}.old"
        if final.exists():  # a checkpoint of an earlier run: it stays whole until the new one is complete
            disk.remove(old)
            disk.replace(final, old)
        disk.replace(self._beside, final)
        pointer.point_to(self._folder, self._name)
        disk.remove_if_possible(old)

    # Errors ---------------------------------------------------------------------------------------------------

    def _on_rank_zero(self, work: Callable[[], None]) -> None:
        def allowed() -> None:
            if (problem := self._lost()) is not None:
                raise UsageError(problem)
            self._told(work)

        on_rank_zero(self._world, allowed)

    def _raise_problem(self) -> None:
        if self._problem is not None:
            raise self._problem

    def _told(self, work: Callable[[], None]) -> None:
        """Run ``work``, and turn its OSError into a UsageError that says what a user can do."""
        try:
            work()
        except OSError as error:
            if (problem := self._lost()) is not None:  # which is why it failed
                raise UsageError(problem) from error
            folder, beside = self._folder, self._beside
            file = str(error.filename or beside).replace(str(beside), str(beside.with_suffix("")))
            said = f"--save {folder}: writing {file} failed: {error.strerror or error}"
            if error.errno in disk.NO_ROOM:
                said += f" (a checkpoint of this run takes {sum(self._sizes.values()) / 1e6:,.1f} MB)"
            whole = pointer.names(folder)
            kept = f"as they were: {whole}" if whole else "there is no older checkpoint"
            raise UsageError(f"{said}; {kept}; the same command with --load {folder} goes on from there") from error


def _describe(placement: Placement) -> dict[str, Any]:
    return {"shape": placement.shape, "view": placement.view, "dim": placement.dim, "count": placement.count}
