"""The settings of trainers.convert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commengine.options.declared import option
from commengine.options.ranges import AtLeastOne, Heads, Text, Vocabulary
from trainers.settings.job import JobOptions
from trainers.settings.loading import DTYPES
from trainers.settings.saving import OTHER_PROGRAMS


@dataclass(frozen=True)
class ConvertSettings(JobOptions):
    """The settings of `trainers.convert`. A field is the flag of the same name, with dashes."""

    from_: str | Sequence[str] | None = option(
        None, f"{' or '.join(OTHER_PROGRAMS)}, and the folder or file of the model, for --save", words=True
    )
    save: Text | None = option(None, "the new run, from which others start with --load")
    load: Text | None = option(None, "the --save folder of a run, or one of the iter_* folders in it, for --to")
    to: str | Sequence[str] | None = option(None, "hf, and a new folder for the model of --load", words=True)
    ckpt_step: AtLeastOne | None = option(
        None, "with --load: take the checkpoint after this step (default: the newest)"
    )
    dtype: str | None = option(
        None, "dtype of the parameters that are written (default: the one that they have)", choices=DTYPES
    )
    vocab_size: Vocabulary | None = option(
        None, "tokens of the vocabulary of a Megatron-LM model whose files do not say it"
    )
    num_attention_heads: Heads | None = option(None, "attention heads of a Megatron-LM model whose files do not say it")
    rotary_interleaved: bool = option(
        False, "with --from hf: components 2 j and 2 j + 1 of a head are a pair, as in Meta's own files; queries and "
        "keys are permuted"
    )  # fmt: skip
    overwrite: bool = option(False, "replace the run in --save, or the folder of --to")
