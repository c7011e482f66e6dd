"""The table of all commands. The packages that they are in stand above this one, which only their names reach."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Listed(NamedTuple):
    """A command. words: they follow ``commengine``. module: ``python -m`` runs it. line: it says what the command does.

    The help and the errors of a command name the module, so they are the same in both ways.
    """

    words: str
    module: str
    line: str


#: all commands, by what they are for
GROUPS: dict[str, tuple[Listed, ...]] = {
    "Begin here: look at the machine": (
        Listed("doctor", "bench.doctor", "say on one page what a job has to run on, and what does not fit"),
        Listed("study", "bench.study",
            "study the machine at hand: its collectives, a training step, and what more ranks would do"),
    ),
    "Prepare text": (
        Listed("preprocess-data", "trainers.preprocess_data",
            "turn text into an indexed data set, and train a tokenizer"),
        Listed("prepare-corpus", "trainers.prepare_corpus",
            "make a training corpus: filters, near-duplicates, held-out text"),
    ),
    "Train": (
        Listed("train gpt", "trainers.pretrain_gpt", "train a GPT or a Llama on text"),
        Listed("train bert", "trainers.pretrain_bert", "train a BERT on sentences"),
        Listed("train t5", "trainers.pretrain_t5", "train a T5 on text with masked spans"),
        Listed("finetune", "trainers.finetune", "fine-tune a BERT on MNLI, QQP, SQuAD or RACE"),
        Listed("supervise", "trainers.supervise", "bring a run to its end over crashes"),
        Listed("compare", "trainers.compare", "compare two runs bit by bit"),
    ),
    "Use a trained model": (
        Listed("generate", "trainers.generate", "text that continues prompts"),
        Listed("evaluate", "trainers.evaluate",
            "the worth of a model on text: WikiText, LAMBADA, held-out documents, lm-evaluation-harness"),
        Listed("convert", "trainers.convert", "models of other programs, both ways: Hugging Face and Megatron-LM"),
    ),
    "Measure and predict": (
        Listed("collectives", "bench.collectives",
            "time every collective by every transport; what the engine adds to MPI; where it leaves MPI"),
        Listed("step", "bench.step",
            "trace training steps: what each collective moved and took, beside the formulas"),
        Listed("replay", "bench.replay", "run the collectives of a recorded step again, without its compute"),
        Listed("predict", "bench.predict",
            "predict a training step on a machine that a file describes, such as this one"),
        Listed("gpu", "bench.gpu", "what a GPU does: speed, the cost of all-reduces, overlap, a profile, losses"),
    ),
    "Look for the cause": (
        Listed("rollcall", "commengine.rollcall", "run an MPI program, and say which rank waits where when it hangs"),
        Listed("conformance", "bench.conformance",
            "ask libraries what the bits of a sum depend on, and operators whether their gradients are right"),
        Listed("contest", "bench.contest",
            "prove this project's own figures against other libraries (in the repository only)"),
    ),
}  # fmt: skip
COMMANDS = {one.words: one for group in GROUPS.values() for one in group}


def command_of(words: Sequence[str]) -> Listed | None:
    """The command that the first of the words, or the first two, name."""
    return COMMANDS.get(" ".join(words[:2])) or COMMANDS.get(" ".join(words[:1]))


def of_package(package: str) -> list[Listed]:
    """The commands that are modules of ``package``."""
    return [one for one in COMMANDS.values() if one.module.startswith(f"{package}.")]
