"""Seconds per training step of this project, DTensor, DistributedDataParallel and plain PyTorch.

    python -m bench.contest step --output step_contest.md --json step_contest.json
    python -m bench.contest step --model bert
    python -m bench.contest step --only ddp --only dtensor        # some contestants

All contestants train the same GPT or BERT on the same tokens from the same weights (bench/programs/step_task.py), with
two processes of one thread, unless their name says otherwise. They must report the same losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench.contest.parts.base import Case, add_fields, task_of
from bench.contest.parts.programs import GivenTask, ProgramContest, saved
from bench.peers.models import reference_state
from bench.programs.driver import Contestant
from bench.programs.step_task import MODELS, StepTask
from commengine.options.ranges import BATCH, HEADS, LAYERS, LENGTH, NOT_NEGATIVE, VOCABULARY, WIDTH

#: tokens of the shortest sample of BERT that has a masked token
SHORTEST_BERT = 8
#: by StepTask.masked_positions_only: where BERT's head of masked tokens runs
POSITIONS = {False: "the head of masked tokens runs at all positions", True: "it runs at the masked positions only"}


class StepContest(ProgramContest):
    """The training step of GPT or BERT."""

    title = "Training step"

    def contestants(self, file: str, given: Any) -> list[Contestant]:
        """All contestants."""
        return [
            Contestant.of("ours-tp2", 2, "bench.programs.training_step", file, "2", mpi=True),
            Contestant.of("ours-dp2", 2, "bench.programs.training_step", file, "1", mpi=True),
            Contestant.of("dtensor", 2, "bench.peers.dtensor", file),
            Contestant.of("dtensor-loss-parallel", 2, "bench.peers.dtensor", file, "loss-parallel"),
            Contestant.of("ddp", 2, "bench.peers.ddp", file),
            Contestant.of("torch-1-thread", 1, "bench.peers.plain", file),
            Contestant.of("torch-2-threads", 1, "bench.peers.plain", file, threads=2),
        ]

    def add_options(self, add: Callable[..., Any]) -> None:
        """The sizes of the task."""
        super().add_options(add)
        add("--model", choices=MODELS, default="gpt", help="(default: %(default)s)")
        add("--masked-positions-only", action="store_true", help="BERT's head runs at the masked positions, not at all")
        add_fields(
            add, StepTask, vocab_size=VOCABULARY, hidden_size=WIDTH, num_layers=LAYERS, num_attention_heads=HEADS,
            seq_length=LENGTH, global_batch_size=BATCH, lr=NOT_NEGATIVE,
            weight_decay=NOT_NEGATIVE, clip_grad=NOT_NEGATIVE,
        )  # fmt: skip

    def check(self, given: Any) -> None:
        """Sizes that fit each other."""
        super().check(given)
        if given.masked_positions_only and given.model != "bert":
            raise ValueError("--masked-positions-only: needs --model bert")
        hidden, heads = given.hidden_size, given.num_attention_heads
        if hidden % heads:
            raise ValueError(f"--hidden-size {hidden}: must be a multiple of --num-attention-heads {heads}")
        if given.model == "bert" and given.seq_length < SHORTEST_BERT:
            raise ValueError(f"--seq-length {given.seq_length}: must be at least {SHORTEST_BERT} with --model bert")

    def tasks(self, given: Any) -> Iterator[GivenTask]:
        """Yield the one task."""
        yield GivenTask({}, task_of(StepTask, given), given.global_batch_size * given.seq_length)

    def prepare(self, task: Any, folder: str) -> dict[str, Any]:
        """Write the initial weights."""
        return saved(reference_state(task), folder)

    def notes(self, given: Any, cases: Sequence[Case]) -> list[str]:
        """The task."""
        return [
            *super().notes(given, cases),
            f"- task: {given.model.upper()}, {given.num_layers} layers, hidden {given.hidden_size}, "
            f"{given.num_attention_heads} heads, vocabulary {given.vocab_size}, sequence {given.seq_length}, global "
            f"batch {given.global_batch_size}, fp32, AdamW, gradient clipping {given.clip_grad or 'off'}"
            + (f"; {POSITIONS[given.masked_positions_only]}" if given.model == "bert" else ""),
        ]


CONTEST = StepContest()
