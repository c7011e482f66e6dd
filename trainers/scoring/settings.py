"""The settings of trainers.evaluate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from commengine import UsageError
from trainers.files.writing import check_writable
from trainers.options import BATCH, LENGTH, NOT_EMPTY, given, option, require
from trainers.tasks.transformer import TransformerTrainConfig
from trainers.trained import LoadConfig

#: the tasks, and whether each reads a file
TASKS = {"wikitext": True, "lambada": True, "perplexity": True, "jsonl": True, "held-out": False}
LAMBADA, HELD_OUT, WIKITEXT = "lambada", "held-out", "wikitext"
#: the stride of WikiText's windows in the paper (appendix E.1, which calls it an overlap)
WIKITEXT_STRIDE = 32


@dataclass(frozen=True)
class EvaluateConfig(LoadConfig):
    """The settings of `trainers.evaluate`. A field is the flag of the same name, with dashes."""

    task: str | None = option(
        None,
        "wikitext: WikiText's raw text, detokenized; lambada: last words of passages; perplexity: a file as it is; "
        "jsonl: a text in each line; held-out: the run's own validation documents",
        choices=tuple(TASKS),
    )
    data: str | None = option(None, "the task's file", valid=NOT_EMPTY)
    json_key: str = option("text", "key of the text in a line of a .jsonl or .json file", valid=NOT_EMPTY)
    seq_length: int | None = option(
        None, "most tokens that the model reads at once (default: the --seq-length of its training)", valid=LENGTH
    )
    stride: int | None = option(
        None, "targets of every window but the first (default: 32 for wikitext, as in the paper; else --seq-length)",
        valid=LENGTH,
    )  # fmt: skip
    micro_batch_size: int = option(8, "windows or examples that a rank takes through the model at once", valid=BATCH)
    json: str | None = option(None, "write all numbers to this file", valid=NOT_EMPTY)
    plot: str | None = option(
        None, "draw the loss by position in the window: a file .png, .svg or .pdf", valid=NOT_EMPTY
    )
    predictions: str | None = option(
        None, "of lambada: write what the model predicts for each example, as JSON lines", valid=NOT_EMPTY
    )

    def validate(self, ranks: int) -> None:
        """Raise UsageError, naming the option and what is valid, unless this is possible on ``ranks`` ranks."""
        super().validate(ranks)
        require(self.task is not None, f"--task: needed; valid: {', '.join(TASKS)}")
        assert self.task is not None
        if TASKS[self.task]:
            require(self.data is not None, f"--data FILE: needed with --task {self.task}")
            require(Path(self.data or "").exists(), f"{given(self, 'data')}: no such file")
        else:
            own = f"--task {self.task} reads the run's own data; leave it out"
            require(self.data is None, f"{given(self, 'data')}: {own}")
        lambada = self.task == LAMBADA
        for name in ("stride", "plot"):
            without = getattr(self, name) is None or not lambada
            require(without, f"{given(self, name)}: --task lambada has no windows; leave it out")
        require(self.predictions is None or lambada, f"{given(self, 'predictions')}: needs --task lambada")
        fits = self.seq_length is None or self.stride is None or self.stride <= self.seq_length
        require(fits, f"{given(self, 'stride')}: must not exceed {given(self, 'seq_length')}")
        try:
            check_writable(json=self.json, plot=self.plot, predictions=self.predictions)
        except ValueError as error:
            raise UsageError(str(error)) from error

    def window(self, trained: TransformerTrainConfig) -> tuple[int, int]:
        """The length and the stride of the windows for a model of this run. Raises UsageError."""
        length = window_length(self, self.seq_length, trained)
        stride = self.stride
        if stride is None:
            stride = min(WIKITEXT_STRIDE, length) if self.task == WIKITEXT else length
        require(stride <= length, f"{given(self, 'stride')}: must not exceed the {length} tokens that the model reads")
        return length, stride


def window_length(config: LoadConfig, asked: int | None, trained: TransformerTrainConfig) -> int:
    """The most tokens that the model of a run reads at once: ``asked``, or what it was trained on. Raises UsageError.

    config: has ``asked`` as its ``seq_length``. A run may have more positions than it trained.
    """
    positions = trained.positions
    require(
        asked is None or asked <= positions, f"{given(config, 'seq_length')}: the model knows {positions} positions"
    )
    return trained.seq_length if asked is None else asked
