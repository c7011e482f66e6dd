"""The settings of trainers.evaluate."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Self

from commengine.errors import usage_errors
from commengine.files.writing import check_writable
from commengine.options.declared import given, option, require
from commengine.options.ranges import Batch, Length, Natural, NotNegative, Seed, Text, ValidRange
from trainers.tasks.transformer import TransformerTrainConfig
from trainers.trained import LoadConfig

#: the tasks, and whether each reads a file
TASKS = {"wikitext": True, "lambada": True, "perplexity": True, "jsonl": True, "held-out": False}
LAMBADA, HELD_OUT, WIKITEXT = "lambada", "held-out", "wikitext"
#: the beginning of a task of lm-evaluation-harness
LM_EVAL = "lm-eval:"
TASK = ValidRange(
    lambda task: task in TASKS or (task.startswith(LM_EVAL) and task != LM_EVAL),
    f"must be {', '.join(TASKS)}, or {LM_EVAL}NAME,NAME,...",
)
#: the stride of WikiText's windows in the paper (appendix E.1, which calls it an overlap)
WIKITEXT_STRIDE = 32


@dataclass(frozen=True)
class EvaluateConfig(LoadConfig):
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

    @property
    def names(self) -> list[str]:
        """The tasks of lm-evaluation-harness; none where the task is one of ours."""
        names = (self.task or "").partition(LM_EVAL)[2]
        return [name for name in names.split(",") if name]

    def validate(self, ranks: int) -> None:
        """Raise UsageError, naming the option and what is valid, unless this is possible on ``ranks`` ranks."""
        super().validate(ranks)
        require(self.task is not None, f"--task: needed; valid: {', '.join(TASKS)}, {LM_EVAL}NAME,NAME,...")
        if TASKS.get(str(self.task), False):
            require(self.data is not None, f"--data FILE: needed with --task {self.task}")
            require(Path(self.data or "").exists(), f"{given(self, 'data')}: no such file")
        else:
            whose = "its" if self.names else "the run's"
            own = f"--task {self.task} reads {whose} own data; leave it out"
            require(self.data is None, f"{given(self, 'data')}: {own}")
        require(not self.verify_data or self.task == HELD_OUT, f"--verify-data: needs --task {HELD_OUT}")
        lambada = self.task == LAMBADA
        for name in ("stride", "plot"):
            without = getattr(self, name) is None or not (lambada or self.names)
            require(without, f"{given(self, name)}: --task {self.task} has no windows; leave it out")
        require(self.predictions is None or lambada, f"{given(self, 'predictions')}: needs --task lambada")
        for item in fields(self):
            changed = item.metadata["help"].startswith("lm-eval") and getattr(self, item.name) != item.default
            require(bool(self.names) or not changed, f"{given(self, item.name)}: needs --task {LM_EVAL}NAME")
        folder = self.include_path is None or Path(self.include_path).is_dir()
        require(folder, f"{given(self, 'include_path')}: no such folder")
        fits = self.seq_length is None or self.stride is None or self.stride <= self.seq_length
        require(fits, f"{given(self, 'stride')}: must not exceed {given(self, 'seq_length')}")
        with usage_errors(""):
            files = {"json": self.json, "predictions": self.predictions, "samples": self.samples}
            check_writable(self.plot, read=[self.data], **files)

    def completed(self, ranks: int) -> Self:
        """These settings. Raises UsageError if the harness is needed and not installed."""
        found = not self.names or importlib.util.find_spec("lm_eval") is not None
        require(found, f"--task {LM_EVAL}: needs lm-evaluation-harness; install it with: pip install '.[lm-eval]'")
        return super().completed(ranks)

    def window(self, trained: TransformerTrainConfig) -> tuple[int, int]:
        """The length and the stride of the windows for a model of this run. Raises UsageError."""
        length, positions = self.seq_length or trained.seq_length, trained.positions
        fits = self.seq_length is None or length <= positions  # a run may have more positions than it trained
        require(fits, f"{given(self, 'seq_length')}: the model knows {positions} positions")
        stride = self.stride
        if stride is None:
            stride = min(WIKITEXT_STRIDE, length) if self.task == WIKITEXT else length
        require(stride <= length, f"{given(self, 'stride')}: must not exceed the {length} tokens that the model reads")
        return length, stride
