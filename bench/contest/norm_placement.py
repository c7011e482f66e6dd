"""Figure 7 of the paper at a small size: BERT with its norms before and after the sums, at growing depth.

    mpiexec -n 2 python -m bench.contest norm_placement --data-path PREFIX_text_sentence --save runs/figure7

The data set is one that pretrain_bert can read. For every depth two BERTs that differ in --norm-placement alone start
from the same weights and see the same samples: pre-LN (Figure 7 b) and post-LN (Figure 7 a, the first BERT's). All runs
take turns, --slice steps at a time. Each is a run of pretrain_bert with a folder of its own in SAVE, as SAVE/2-pre.
After --minutes, or when every run has --steps steps, the command draws the losses in SAVE/losses.png, and prints a
table; "largest gradient" is the largest norm of a gradient before it is clipped. The same command line continues where
it stopped, with the same losses as without the stop.

All other options are pretrain_bert's; those of evaluation and logging have no effect. Without --config or --preset the
model is small: hidden size 64, 4 heads, sequence 64, batch 32, fp32, no dropout, a rate of 1e-3 after 50 steps of
warm-up.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.contest.parts.base import Case, Contest
from commengine import Communicator, UsageError
from commengine.rank_zero import on_rank_zero
from trainers.options import COUNT, LAYERS, SECONDS, between
from trainers.run.loop import train
from trainers.run.metrics import read_rows
from trainers.run.startup import read_config, watched
from trainers.run.stopping import StopRequests
from trainers.tasks.bert import BERTTask, BERTTrainConfig

PLACEMENTS = {"pre": "pre-LN (Figure 7 b)", "post": "post-LN (Figure 7 a)"}
#: pretrain_bert's options without --config and --preset: a model that trains in minutes on two cores
SMALL = (
    "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "64", "--global-batch-size", "32",
    "--micro-batch-size", "16", "--hidden-dropout", "0", "--attention-dropout", "0", "--lr", "1e-3", "--min-lr", "1e-4",
    "--lr-warmup-iters", "50", "--make-vocab-size-divisible-by", "128",
)  # fmt: skip
OWN = ("--num-layers", "--norm-placement", "--train-iters", "--load", "--exit-interval")
WINDOW = 20  # steps of which the picture and the table show the mean


@dataclass(frozen=True)
class DeepRun:
    """One BERT: its depth, its norms, and the folder of its run, of which rank 0 alone reads the files."""

    layers: int
    placement: str
    folder: Path

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of its steps so far."""
        path = self.folder / "metrics.jsonl"
        return read_rows(path)[0] if path.exists() else []

    @property
    def losses(self) -> list[float]:
        """The loss of each step so far."""
        return [row["mlm_loss"] for row in self.rows]

    @property
    def ended(self) -> str:
        """The message of the error that ended it, such as a loss that is not finite; "" while it trains."""
        path = self.folder / "ended.txt"
        return path.read_text() if path.exists() else ""

    def goes_on(self, steps: int) -> bool:
        """Whether it has steps to do."""
        return not self.ended and len(self.rows) < steps

    def turn(self, config: BERTTrainConfig, comm: Communicator, stopping: StopRequests, steps: int) -> None:
        """Do its next ``steps`` steps; an error of a step, which every rank has, ends the run. Collective."""
        place = str(self.folder)
        own = replace(
            config, num_layers=self.layers, norm_placement=self.placement, save=place, load=place, keep_last=1,
            exit_interval=steps, log_interval=1,
        )  # fmt: skip
        try:
            with contextlib.redirect_stdout(sys.stderr):
                train(own, comm, BERTTask, stopping)
        except UsageError as error:
            if not str(error).startswith("step "):
                raise
            message = str(error)
            on_rank_zero(comm, lambda: (self.folder / "ended.txt").write_text(message))


def smoothed(losses: Sequence[float], window: int = WINDOW) -> list[float]:
    """For each step the mean of its loss and of up to ``window - 1`` losses before it."""
    return [statistics.fmean(losses[max(0, n + 1 - window) : n + 1]) for n in range(len(losses))]


def draw(path: Path, runs: Sequence[DeepRun]) -> None:
    """Draw the losses: one panel for each depth, as the paper's figure has one for each size."""
    from matplotlib.figure import Figure  # here: it takes a second to load

    depths = list(dict.fromkeys(run.layers for run in runs))
    figure = Figure(figsize=(4.2 * len(depths), 3.6), layout="constrained")
    panels = figure.subplots(1, len(depths), sharey=True, squeeze=False)[0]
    for axes, depth in zip(panels, depths, strict=True):
        for run in (run for run in runs if run.layers == depth):
            axes.plot(smoothed(run.losses), label=PLACEMENTS[run.placement] + (", diverged" if run.ended else ""))
        axes.set(title=f"{depth} layers", xlabel="step")
        axes.grid(alpha=0.3)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False)  # below: it covers no line
    panels[0].set_ylabel(f"training loss of masked tokens (mean of {WINDOW})")
    figure.savefig(path, dpi=110)


class NormPlacementContest(Contest):
    """BERT with its norms before and after the sums, at growing depth."""

    title = "Norm placement at growing depth (Figure 7 of the paper)"
    rounds = 0
    on_ranks = True
    passes_on = True

    def add_options(self, add: Callable[..., Any]) -> None:
        """The options that are not pretrain_bert's."""
        add("--depths", type=int, valid=LAYERS, nargs="+", default=[2, 8, 24], metavar="L",
            help="layers of the models (default: 2 8 24)")  # fmt: skip
        add("--steps", type=int, valid=between(1, 10**9), default=1000, help="of each run")
        add("--minutes", type=float, valid=SECONDS, default=20.0, help="stop after so many")
        add("--slice", type=int, valid=COUNT, default=50, help="steps of a run before the next one's turn")
        add("--save", metavar="DIR", required=True, help="the folder of the study, which a further call continues")

    def check(self, given: Any) -> None:
        """Read pretrain_bert's settings."""
        if len(set(given.depths)) < len(given.depths):
            raise ValueError(f"--depths {' '.join(map(str, given.depths))}: must be different numbers")
        named = {word.split("=")[0] for word in given.rest}
        if own := [option for option in OWN if option in named]:
            raise ValueError(f"{own[0]}: is the study's own; give --depths, --steps or --slice")
        small = () if named & {"--config", "--preset"} else SMALL
        words = [*small, *given.rest, "--train-iters", str(given.steps), "--eval-iters", "0"]
        config = read_config(BERTTrainConfig, words, "python -m bench.contest norm_placement", given.world_size)
        if config.compile:
            raise ValueError("--compile: every depth would be compiled; leave it out")
        given.bert = config.to_json()

    def measure(self, given: Any, world: Communicator) -> Sequence[Case]:
        """Train until the minutes are over or the steps done. Collective over ``world``."""
        config, end = BERTTrainConfig(**given.bert), time.monotonic() + 60 * given.minutes
        runs, steps = _runs(given), given.steps
        with StopRequests(world) as stopping, watched(config, world) as comm:
            more = True
            while more:
                for run in runs:
                    if on_rank_zero(comm, partial(run.goes_on, steps)):
                        run.turn(config, comm, stopping, given.slice)
                more = on_rank_zero(comm, lambda: time.monotonic() < end and any(run.goes_on(steps) for run in runs))
        return [compared(runs, depth) for depth in given.depths] if world.rank == 0 else []

    def notes(self, given: Any, cases: Sequence[Case]) -> list[str]:
        """The model."""
        told = given.bert
        return [
            f"- BERT of hidden size {told['hidden_size']}, {told['num_attention_heads']} heads, sequence "
            f"{told['seq_length']}, batch {told['global_batch_size']}, vocabulary {told['vocab_size']}; rate "
            f"{told['lr']:g} after {told['lr_warmup_iters']} steps of warm-up, {told['lr_decay_style']} decay over "
            f"{given.steps} steps; dropout {told['hidden_dropout']:g}; seed {told['seed']}",
            f"- losses: of masked tokens, in training, in nats; means of {WINDOW} steps",
        ]

    def files(self, given: Any, cases: Sequence[Case]) -> None:
        """Draw the picture."""
        draw(Path(given.save) / "losses.png", _runs(given))


def compared(runs: Sequence[DeepRun], depth: int) -> Case:
    """The case of a depth, pre-LN and post-LN."""
    case, first = Case({"layers": depth}), math.nan
    for run in (run for run in runs if run.layers == depth):
        losses, norms = run.losses, [row["grad_norm"] for row in run.rows if row["grad_norm"] is not None]
        last = math.nan if run.ended or not losses else statistics.fmean(losses[-WINDOW:])
        first = last if run.placement == "pre" else first
        case.facts[f"{run.placement}-LN"] = {
            "steps": len(losses),
            "loss": f"ended at step {len(losses) + 1}" if run.ended else f"{last:.3f}",
            "loss over pre-LN's": "-" if math.isnan(last - first) else f"{last - first:+.3f}",
            "largest gradient": f"{max(norms):.1f}" if norms else "-",
        }
        case.numbers[run.placement] = {"losses": losses, "norms": norms, "ended": run.ended}
    return case


def _runs(given: Any) -> list[DeepRun]:
    return [DeepRun(n, one, Path(given.save, f"{n}-{one}")) for n in given.depths for one in PLACEMENTS]


CONTEST = NormPlacementContest()
