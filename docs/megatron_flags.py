"""The page of Megatron-LM's flags, made from the table of the training commands: ``python docs/megatron_flags.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainers.megatron_flags.answers import COMMANDS, Verdict
from trainers.megatron_flags.defaults import DIFFERENCES
from trainers.megatron_flags.table import TABLE

PAGE = Path(__file__).with_name("megatron-flags.md")

HEAD = """# Megatron-LM's flags

`pretrain_gpt`, `pretrain_bert` and `finetune` take the command lines of Megatron-LM's users. Flags that `--help` lists
mean the same as there. This page, which `python docs/megatron_flags.py` writes, has an answer to each other flag of
Megatron-LM from 2019 to August 2026, also in a file of `--config`.

- *taken*: the flag changes no number of a run here. The run says so at its start, once, with the reason.
- *is*: the flag stands for others. The run says for which.
- *refused*: the run does not start. It names the flag, and what to write in its place if there is something. Such a
  flag is taken where it has Megatron-LM's default, or a value that its row names.

(GPT), (BERT) and (finetune) name the command that a row holds for. Three things have no flag: the warm-up of the
learning rate is one step ahead of Megatron-LM's, whose first step has the rate 0; the loss is the mean over all tokens
of the global batch, as it is there with `--calculate-per-token-loss`; and `--check-for-spiky-loss` takes a number. The
`--vocab-size` of `--mock-data` counts all tokens; before core 0.18 Megatron-LM added one for the end of a document.

## Defaults that differ

A run that does not give these flags says so at its start. Sizes and rates that must be given there, such as
`--num-layers` and `--lr`, have defaults here.
"""

#: what a row says of its kind
KINDS = {"no effect": "taken", "same": "is", "set": "is", "instead": "refused: use", "not here": "refused"}
NAMES = {"gpt": "GPT", "bert": "BERT", "finetune": "finetune"}


def _only(commands: tuple[str, ...]) -> str:
    return "" if commands == COMMANDS else f" ({', '.join(NAMES[one] for one in commands)})"


def _escaped(text: str) -> str:
    return text.replace("|", r"\|").replace("<", "&lt;").replace("*", r"\*")


def _row(answer: Verdict) -> str:
    flags = ", ".join(f"`{flag.name}`" for flag in answer.flags)
    text = _escaped(answer.text)
    kind = KINDS[answer.kind]
    values = [*answer.valid, *sorted({flag.default for flag in answer.flags if flag.default})]
    if answer.kind == "not here" and len(answer.flags) == 1 and values:
        text += f"; valid: {', '.join(dict.fromkeys(values))}"
    said = f"{kind} {text}" if kind in ("is", "refused: use") else f"{kind}: {text}"
    if answer.kind == "set" and text.startswith("taken"):
        said = text
    return f"- {flags}: {said}{answer.how and f', {answer.how}'}{_only(answer.commands)}"


def page() -> Iterator[str]:
    """Yield the lines of the page."""
    yield HEAD
    yield "| flag | default here | there |"
    yield "|---|---|---|"
    for one in DIFFERENCES:
        yield f"| `{one.flag}` | {_escaped(one.here)}{_only(one.commands)} | {_escaped(one.there)} |"
    for title, answers in TABLE.items():
        yield f"\n## {title}\n"
        yield from map(_row, answers)


if __name__ == "__main__":
    PAGE.write_text("\n".join(page()) + "\n", encoding="utf-8")
