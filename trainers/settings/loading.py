"""The settings of the commands that use what a run has trained."""

from __future__ import annotations

from dataclasses import dataclass

from commengine.options.declared import option
from commengine.options.ranges import AtLeastOne, Text

from .job import JobOptions
from .rules import Rule

#: the names of `trainers.trained.DTYPES`
DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class LoadOptions(JobOptions):
    """The settings of every command that uses what a run has trained. A field is the flag of the same name."""

    load: Text | None = option(
        None,
        "the --save folder of a run, or one of the iter_* folders in it: the model; or hf:FOLDER, a model of Hugging "
        "Face, or megatron:FOLDER, one of Megatron-LM",
    )  # fmt: skip
    ckpt_step: AtLeastOne | None = option(None, "take the checkpoint after this step (default: the newest)")
    tokenizer_model: Text | None = option(
        None, "a tokenizer.json or BERT's vocab.txt (default: the one that the run was trained with)"
    )
    dtype: str | None = option(
        None, "dtype of parameters and activations (default: the one that the run was trained in)",
        choices=DTYPES,
    )  # fmt: skip


#: what a command with a trained model must have
NEEDS_LOAD = Rule("load ckpt_step", lambda s, _: (s.load is None, "--load DIR: needed: the --save folder of a run"))
