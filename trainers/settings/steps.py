"""The steps of a run: their samples, their number, and what the optimizer does in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from commengine.options.declared import option
from commengine.options.ranges import (
    NOT_NEGATIVE,
    AtLeastOne,
    Batch,
    Natural,
    NotNegative,
    Positive,
    Seed,
    Share,
    ValidRange,
)

#: the signals that ``--exit-signal`` may name
SIGNALS = ("USR1", "USR2", "HUP", "QUIT", "ALRM", "XCPU", "TERM", "INT")

SIGNAL = ValidRange(
    lambda name: name.upper().removeprefix("SIG") in SIGNALS, f"must be one of {', '.join(SIGNALS)}, also as SIGUSR1"
)
POSITIVE = ValidRange(lambda value: value > 0, "must be positive: rows of padding have no gradient at all")
#: learning rates and weight decays: far above all that trains
Rate = Annotated[float, NOT_NEGATIVE, ValidRange(lambda rate: rate <= 1000, "must be at most 1000")]


@dataclass(frozen=True)
class StepOptions:
    """Batches, steps, and when a run stops."""

    micro_batch_size: Batch = option(1, "samples that a rank takes through the model at once")
    global_batch_size: Batch | None = option(
        None, "samples of a step (default micro-batch-size * data-parallel size)", fixed=True
    )
    train_iters: AtLeastOne = option(1000, "steps of the run")
    exit_interval: AtLeastOne | None = option(
        None, "save and stop early after a step whose number is a multiple of this"
    )
    exit_signal: Annotated[str, SIGNAL] | None = option(
        None, "save and stop after the step in which this signal comes, such as USR1; SIGTERM and SIGINT always do so"
    )
    exit_duration_in_mins: Positive | None = option(
        None, "save and stop after the step in which the run has lasted this long, start included"
    )
    exit_before_limit: NotNegative = option(
        120.0, "with --save in a Slurm job: save and stop this many seconds before the job's time limit; 0: do not"
    )
    seed: Seed = option(1234, "seed of the initial weights, the order of samples and dropout", fixed=True)


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW and its learning rate."""

    lr: Rate = option(1.5e-4, "highest learning rate")
    min_lr: Rate | None = option(None, "learning rate at the end of the decay (default 1e-5, or lr if that is less)")
    lr_decay_style: str = option("cosine", "how lr decays to min-lr", choices=("constant", "linear", "cosine"))
    lr_decay_iters: AtLeastOne | None = option(None, "step at which min-lr is reached (default train-iters)")
    lr_warmup_iters: Natural | None = option(None, "steps over which lr rises from 0 (default 0)")
    weight_decay: Rate = option(0.01, "AdamW's weight decay; biases and norms do not decay")
    adam_beta1: Share = option(0.9, "decay of AdamW's mean of gradients")
    adam_beta2: Share = option(0.999, "decay of AdamW's mean of squared gradients")
    adam_eps: Annotated[float, NOT_NEGATIVE, POSITIVE] = option(
        1e-8, "added to the root of AdamW's mean of squared gradients"
    )
    clip_grad: NotNegative = option(
        1.0, "clip the gradient to this norm, taken over the whole model; 0 turns clipping off"
    )
