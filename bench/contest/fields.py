"""A U-Net's training step on a field that two ranks split in space, against plain torch on the whole field.

    python -m bench.contest fields --rounds 9 --steps 1 --output fields.md --json fields.json
    python -m bench.contest fields --points 128 --width 32 --width 64 --layout channels-last

The contestants have the same weights, field, optimizer and memory layout: this project on two ranks of one thread,
torch in one process of one thread, and torch in one process of two threads. They must report the same losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench.contest.parts.base import Case, add_fields, task_of
from bench.contest.parts.programs import GivenTask, ProgramContest, saved
from bench.peers.unet import reference_state
from bench.programs.driver import Contestant
from bench.programs.field_task import LAYOUTS, FieldTask
from trainers.options import BATCH, COUNT, between

WIDTHS = (16, 32)  # narrow, where torch's kernels are short and the halos cost most; and a common width


class FieldsContest(ProgramContest):
    """A U-Net on a split field."""

    title = "U-Net on a split field"
    items = "points"
    rounds = 9
    relative = True

    def contestants(self, file: str, given: Any) -> list[Contestant]:
        """Ours and torch's."""
        return [
            Contestant.of("ours-space2", 2, "bench.programs.field_task", file, mpi=True),
            Contestant.of("torch-1-thread", 1, "bench.peers.unet", file),
            Contestant.of("torch-2-threads", 1, "bench.peers.unet", file, threads=2),
        ]

    def add_options(self, add: Callable[..., Any]) -> None:
        """The sizes of the field and of the network."""
        super().add_options(add)
        add("--layout", action="append", choices=list(LAYOUTS), help="a memory layout; may be repeated (default: both)")
        add("--width", action="append", type=int, valid=COUNT,
            help="channels of the first level; may be repeated (default: 16 and 32)")  # fmt: skip
        add_fields(add, FieldTask, points=between(8, 1 << 14), batch=BATCH, depth=between(1, 8))

    def check(self, given: Any) -> None:
        """The field can be halved."""
        super().check(given)
        if given.points % 2**given.depth or given.points < 2 ** (given.depth + 1):
            raise ValueError(f"--points {given.points}: must be a multiple of 2^depth, and at least 2^(depth + 1)")

    def tasks(self, given: Any) -> Iterator[GivenTask]:
        """Yield a task for each width and memory layout."""
        for width in given.width or WIDTHS:
            for layout in given.layout or LAYOUTS:
                task = task_of(FieldTask, given, width=width, layout=layout)
                yield GivenTask({"width": width, "memory layout": layout}, task, given.batch * given.points**2)

    def prepare(self, task: Any, folder: str) -> dict[str, Any]:
        """Write the initial weights."""
        return saved(reference_state(task), folder)

    def notes(self, given: Any, cases: Sequence[Case]) -> list[str]:
        """The task."""
        return [
            *super().notes(given, cases),
            f"- task: U-Net of depth {given.depth} with batch normalisation, field of {given.points} x {given.points} "
            f"points, {FieldTask().channels} channels, batch {given.batch}, fp32, AdamW",
        ]


CONTEST = FieldsContest()
