"""The settings of trainers.evaluate."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from commengine.errors import usage_errors
from commengine.files.writing import check_writable
from commengine.options.declared import given, option, require
from commengine.options.ranges import Batch, Length, Natural, NotNegative, Seed, Text, ValidRange
from trainers.settings import derived
from trainers.settings.command import Command
from trainers.settings.commands import TransformerSettings
from trainers.settings.loading import NEEDS_LOAD, LoadOptions
from trainers.settings.rules import Faults, Rule, first

#: the tasks, and whether each reads a file
TASKS = {"wikitext": True, "lambada": True, "perplexity": True, "jsonl": True, "held-out": False}
LAMBADA, HELD_OUT, WIKITEXT = "lambada", "held-out", "wikitext"
#: the beginning of a task of lm-evaluation-harness
LM_EVAL = "lm-eval:"
TASK = ValidRange(
    lambda task: task in TASKS or (task.startswith(LM_EVAL) and task != LM_EVAL),
    f"must be {', '.join(TASKS)}, or {LM_EVAL}NAME,NAME,...",
)
#: the data of a task of ours without a file
WHOSE = "the run's"
#: the stride of WikiText's windows in the paper (appendix E.1, which calls it an overlap)
WIKITEXT_STRIDE = 32


@dataclass(frozen=True)
class EvaluateSettings(LoadOptions):
    """The settings of `trainers.evaluate`. A field is the flag of the same name, with dashes."""

    task: Annotated[str, TASK] | None = option(
        None,
        "wikitext: WikiText's raw text, detokenized; lambada: last words of passages; perplexity: a file as it is; "
        "jsonl: a text in each line; held-out: the run's own validation documents; lm-eval:NAME,NAME,...: tasks, "
        "groups or tags of lm-evaluation-harness",
    )  # fmt: skip
    data: Text | None = option(None, "the task's file")
    verify_data: bool = option(False, "held-out: first compare all files of the run's data sets with their checksums")
    json_key: Text = option("text", "key of the text in a line of a .jsonl or .json file")
    seq_length: Length | None = option(
        None, "most tokens that the model reads at once (default: the --seq-length of its training)"
    )
    stride: Length | None = option(
        None, "targets of every window but the first (default: 32 for wikitext, as in the paper; else --seq-length)"
    )
    micro_batch_size: Batch = option(8, "windows, examples or requests that a rank takes through the model at once")
    json: Text | None = option(None, "write all numbers to this file")
    plot: Text | None = option(None, "draw the loss by position in the window: a file .png, .svg or .pdf")
    predictions: Text | None = option(None, "of lambada: write what the model predicts for each example, as JSON lines")
    # lm-evaluation-harness
    include_path: Text | None = option(None, "lm-eval: a folder with task files (YAML) of your own")
    num_fewshot: Natural | None = option(
        None, "lm-eval: examples before each question (default: the task's own number)"
    )
    limit: NotNegative | None = option(
        None, "lm-eval: only this number of documents of each task, or this share below 1; for trials"
    )
    max_gen_toks: Length = option(256, "lm-eval: new tokens of a text, where the task has no number of its own")
    offline: bool = option(False, "lm-eval: never look for data sets on the network")
    seed: Seed = option(1234, "lm-eval: seed of few-shot examples and of text that is drawn")
    samples: Text | None = option(None, "lm-eval: write every request and answer to this file, as JSON lines")


def names_of(config: EvaluateSettings) -> list[str]:
    """The tasks of lm-evaluation-harness; none where the task is one of ours."""
    names = (config.task or "").partition(LM_EVAL)[2]
    return [name for name in names.split(",") if name]


def _faults(s: EvaluateSettings, _: int) -> Faults:
    names = names_of(s)
    yield s.task is None, f"--task: needed; valid: {', '.join(TASKS)}, {LM_EVAL}NAME,NAME,..."
    if TASKS.get(str(s.task), False):
        yield s.data is None, f"--data FILE: needed with --task {s.task}"
        yield not Path(s.data or "").exists(), f"{given(s, 'data')}: no such file"
    else:
        own = f"--task {s.task} reads {'its' if names else WHOSE} own data; leave it out"
        yield s.data is not None, f"{given(s, 'data')}: {own}"
    yield s.verify_data and s.task != HELD_OUT, f"--verify-data: needs --task {HELD_OUT}"
    lambada = s.task == LAMBADA
    for name in ("stride", "plot"):
        given_here = getattr(s, name) is not None and (lambada or names)
        yield given_here, f"{given(s, name)}: --task {s.task} has no windows; leave it out"
    yield s.predictions is not None and not lambada, f"{given(s, 'predictions')}: needs --task lambada"
    for item in fields(s):
        changed = item.metadata["help"].startswith("lm-eval") and getattr(s, item.name) != item.default
        yield changed and not names, f"{given(s, item.name)}: needs --task {LM_EVAL}NAME"
    folder = s.include_path is None or Path(s.include_path).is_dir()
    yield not folder, f"{given(s, 'include_path')}: no such folder"
    longer = s.seq_length is not None and s.stride is not None and s.stride > s.seq_length
    yield longer, f"{given(s, 'stride')}: must not exceed {given(s, 'seq_length')}"


def completed(config: EvaluateSettings, ranks: int) -> EvaluateSettings:
    """The settings. Raises UsageError if a file cannot be written, or if the harness is needed and not installed."""
    del ranks
    with usage_errors(""):
        files = {"json": config.json, "predictions": config.predictions, "samples": config.samples}
        check_writable(config.plot, read=[config.data], **files)
    found = not names_of(config) or importlib.util.find_spec("lm_eval") is not None
    require(found, f"--task {LM_EVAL}: needs lm-evaluation-harness; install it with: pip install '.[lm-eval]'")
    return config


def window(config: EvaluateSettings, trained: TransformerSettings) -> tuple[int, int]:
    """The length and the stride of the windows for a model of the run ``trained``. Raises UsageError."""
    length, positions = config.seq_length or trained.seq_length, derived.positions(trained)
    fits = config.seq_length is None or length <= positions  # a run may have more positions than it trained
    require(fits, f"{given(config, 'seq_length')}: the model knows {positions} positions")
    stride = config.stride
    if stride is None:
        stride = min(WIKITEXT_STRIDE, length) if config.task == WIKITEXT else length
    require(stride <= length, f"{given(config, 'stride')}: must not exceed the {length} tokens that the model reads")
    return length, stride


COMMAND = Command("evaluate", EvaluateSettings, rules=[NEEDS_LOAD, Rule("task", first(_faults))], complete=completed)
