"""What a run evaluates, reads, writes and looks at."""

from __future__ import annotations

from dataclasses import dataclass

from commengine.options.declared import option
from commengine.options.ranges import AtLeastOne, Natural, Positive, Text

#: the words before a colon with which ``--load`` names a model of another program: ``hf:FOLDER``
OTHER_PROGRAMS = ("hf", "megatron")
#: what ``--load`` does in every training command, unless the command says something else
LOAD = (
    "continue from the newest checkpoint of this folder, or from this iter_* folder; it is an error if there is no "
    "checkpoint, unless this is also the folder of --save: then a new run starts"
)


def of_other_program(load: str | None) -> bool:
    """Whether ``--load`` names a model that another program saved, such as ``hf:FOLDER``, and no run."""
    return load is not None and load.partition(":")[0] in OTHER_PROGRAMS and ":" in load


@dataclass(frozen=True)
class SavingOptions:
    """Evaluation, checkpoints and the rows of metrics.jsonl."""

    eval_interval: AtLeastOne = option(1000, "steps between evaluations on the validation documents")
    eval_iters: Natural = option(
        100, "global batches of an evaluation, at most the whole split; 0 turns evaluation off"
    )
    save: Text | None = option(None, "folder for checkpoints, metrics.jsonl and the report")
    load: Text | None = option(None, LOAD)
    overwrite: bool = option(
        False,
        "a new run first removes the checkpoints, metrics and report that an older run left in --save; with --load "
        "SAVE/iter_N a run goes back to step N and removes what is newer",
    )
    save_interval: AtLeastOne | None = option(None, "steps between checkpoints (default: at the end only)")
    async_save: bool = option(
        False, "write checkpoints in the background: ranks copy their share in memory, and training goes on meanwhile"
    )
    save_hf: bool | None = option(
        None, "write each checkpoint for transformers, too, into its folder hf; --no-save-hf: none (default: the last "
        "one of a run)"
    )  # fmt: skip
    keep_last: AtLeastOne | None = option(
        None, "after saving, remove all but this number of the newest checkpoints (default: keep all)"
    )
    keep_every: AtLeastOne | None = option(
        None, "with --keep-last, also keep the checkpoints whose iteration is a multiple of this"
    )
    log_interval: AtLeastOne = option(100, "steps between rows of metrics.jsonl")
    log_communication_interval: Natural | None = option(
        None, "trace the collectives of the steps whose number is a multiple of this, for the report; 0: of none "
        "(default: 1 on the CPU; 100 on a GPU, or the last step of a shorter run)",
    )  # fmt: skip


@dataclass(frozen=True)
class CheckOptions:
    """Checks while a run trains, and other places for its numbers."""

    check_replicas: AtLeastOne | None = option(
        None, "after each step whose number is a multiple of this, compare checksums of all that several ranks hold"
    )
    check_for_spiky_loss: Positive | None = option(
        None, "save the batch of a step whose loss is this many standard deviations above the last ones, such as 10"
    )
    log_straggler: bool = option(
        False, "log each rank's own time, and name a rank that keeps the others waiting; traces every step"
    )
    step_file: str | None = option(
        None, "file for the number of the step under way, which trainers.supervise asks for and removes"
    )
    log_digests: bool = option(
        False,
        "write a row of metrics.jsonl after every step, with digests of the loss, of the gradient's norm and of "
        "the weights, which trainers.compare compares with those of another run",
    )
    tensorboard_dir: Text | None = option(
        None, "folder for TensorBoard (default SAVE/tensorboard if TensorBoard is installed)"
    )
