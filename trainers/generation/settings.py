"""The settings of trainers.generate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from commengine.options.declared import option
from commengine.options.ranges import AtLeastOne, Batch, Count, Length, Natural, Seed, Text, ValidRange, between
from trainers.settings.loading import LoadOptions

#: of a number by which logits are divided: as `tplayers.generation.sampling` has them, which imports torch
LEAST, MOST = 0.001, 1000.0

Temperature = Annotated[
    float, ValidRange(lambda t: t == 0 or LEAST <= t <= MOST, f"must be 0, or from {LEAST} to {MOST:g}")
]
Probability = Annotated[float, ValidRange(lambda p: 0 < p <= 1, "must be above 0, and at most 1")]


@dataclass(frozen=True)
class GenerateSettings(LoadOptions):
    """The settings of `trainers.generate`. A field is the flag of the same name, with dashes."""

    pipeline_model_parallel_size: AtLeastOne = option(
        1, "pipeline stages that the layers are cut into; a token passes them one after the other"
    )
    prompt: str | None = option(None, "a text to continue; a T5 reads it")
    prompts: Text | None = option(
        None, 'a file of texts to continue, one in each line; of .jsonl the "prompt" of the object in each line'
    )
    interactive: bool = option(
        False, "continue lines of standard input, with all that was said before; text appears as it is written",
        short="-i",
    )  # fmt: skip
    max_new_tokens: Count = option(128, "the most tokens of a text")
    temperature: Temperature = option(
        1.0, "logits are divided by it before a token is drawn; 0: the most likely token, which is greedy decoding"
    )
    top_k: Natural = option(0, "draw from this many of the most likely tokens; 0: from all")
    top_p: Probability = option(
        1.0, "draw from the most likely tokens that have this probability together; 1: from all"
    )
    repetition_penalty: Annotated[float, between(LEAST, MOST)] = option(
        1.0, "divide the positive logits of tokens that a text holds by it, and multiply the negative ones; 1: do not"
    )
    num_samples: Batch = option(1, "texts for each prompt")
    stop: str | Sequence[str] | None = option(None, "strings; a text ends before the first of them", words=True)
    seed: Seed = option(1234, "seed of what is drawn; a prompt has one text on any number of ranks")
    micro_batch_size: Batch = option(8, "prompts that go through the model together")
    window_slide: Length = option(
        1, "tokens that are forgotten together when a text gets longer than the model's positions; those that are left "
        "then go through the model again",
    )  # fmt: skip
    print_prompt: bool = option(False, "write each prompt before its text")
    json: Text | None = option(None, "file for the prompts and their texts and tokens, as JSON")
