"""The kind of model that a checkpoint holds, from the names of its parameters."""

from __future__ import annotations

from collections.abc import Iterable

#: the first parts of the names of a GPT's parameters: those that each has, and those that some have; one that every
#: BERT has besides
OF_GPT = {"embedding", "layers", "final_norm"}
OF_SOME_GPTS = {"position_embedding", "output"}
_OF_BERT = "mlm_head"
#: those of the heads that `trainers.finetune` puts on a BERT
OF_TASKS = {"classifier", "span_head"}


def tops_of(parameters: Iterable[str]) -> set[str]:
    """The first parts of the names."""
    return {name.partition(".")[0] for name in parameters}


def kind_of(parameters: Iterable[str]) -> str | None:
    """The kind, "gpt" or "bert", from the names of a model's parameters; None for any other model."""
    tops = tops_of(parameters)
    return "bert" if _OF_BERT in tops else "gpt" if tops - OF_SOME_GPTS == OF_GPT else None
