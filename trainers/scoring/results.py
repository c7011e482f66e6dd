"""What an evaluation found: as text, as JSON, and as a picture of the loss by position in the window."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from trainers.checkpoints import disk
from trainers.run.metrics import as_json

from .passages import Windows
from .scorer import Scores
from .texts import TextCounts, perplexity

#: a position of the window is drawn if it has this part of the targets of the position with most
FEW = 0.1


@dataclass(frozen=True)
class ModelScored:
    """The model that was evaluated: the folder of its checkpoint, its steps, the dtype in which it computed."""

    checkpoint: str
    iteration: int
    dtype: str


@dataclass(frozen=True)
class PerplexityResult:
    """The log-likelihood of the texts of a task, and the perplexities that follow from it.

    scores: of ``windows``. counts: what the texts hold.
    """

    task: str
    scores: Scores
    windows: Windows
    counts: TextCounts
    model: ModelScored

    @cached_property
    def nll(self) -> float:
        """The loss of all targets together, in nats. The sum is exact before it is rounded."""
        return math.fsum(self.scores.nll.tolist())

    @property
    def by_position(self) -> list[tuple[float | None, int]]:
        """The mean loss in nats of the targets that are predicted from each position of a window, and their number.

        The loss is None where there are no targets.
        """
        pairs = zip(self.scores.position_nll.tolist(), self.scores.position_targets.tolist(), strict=True)
        return [(round(total / count, 6) if count else None, int(count)) for total, count in pairs]

    def to_json(self) -> dict[str, Any]:
        """All numbers; perplexities are null where words are not known, or a float has no room for them."""
        counts, windows, targets = self.counts, self.windows, self.windows.targets
        losses, position_targets = zip(*self.by_position, strict=True)
        return {
            "task": self.task, "nll": self.nll, "targets": targets, "words": counts.words or None,
            "token_perplexity": perplexity(self.nll, targets),
            "word_perplexity": perplexity(self.nll, counts.words),
            "lm_eval_word_perplexity": perplexity(self.nll, counts.harness_words),
            "lm_eval_words": counts.harness_words or None, "tokens": counts.tokens, "texts": counts.texts,
            "seq_length": windows.length, "stride": windows.stride, "windows": len(windows), **asdict(self.model),
            "position_nll": list(losses), "position_targets": list(position_targets),
        }  # fmt: skip

    def text(self) -> str:
        """A table for people."""
        counts, windows, targets = self.counts, self.windows, self.windows.targets
        mean = self.nll / targets
        rows = [("token perplexity", perplexity(self.nll, targets), f"{targets:,} targets, {mean:.4f} nats")]
        if counts.words:
            more = ", more than tokens: each space of an indented line makes one" if counts.words > targets else ""
            rows += [
                ("word perplexity (paper)", perplexity(self.nll, counts.words),
                 f"{counts.words:,} words between spaces{more}"),
                ("word perplexity (lm-eval)", perplexity(self.nll, counts.harness_words),
                 f"{counts.harness_words:,} words between white space, the same log-likelihood"),
            ]  # fmt: skip
        about = f"{len(windows):,} windows of {windows.length:,} tokens, stride {windows.stride:,}"
        return _table(self.task, about, self.model, [(name, f"{value:,.4f}", of) for name, value, of in rows])

    def draw(self, path: Path) -> None:
        """Draw the mean loss over the position in the window, where it is the mean of enough targets.

        With a stride below the length only the first window of a text has targets at the first positions: a few losses
        beside the means of thousands would look like an effect of the context.
        """
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogFormatter

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot(xlabel="tokens read before the target", ylabel="nats per target")
        few = max((count for _, count in self.by_position), default=0) * FEW
        losses = [math.nan if loss is None or count < few else loss for loss, count in self.by_position]
        if any(0 < count < few for _, count in self.by_position):
            axes.set_xlabel(f"{axes.get_xlabel()} (left out: positions with fewer than {math.ceil(few):,} targets)")
        axes.plot(range(1, len(losses) + 1), losses, ".", markersize=3)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(LogFormatter())  # 70, not 7 x 10^1
        axes.xaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False))
        axes.set_title(f"{self.task}: perplexity {perplexity(self.nll, self.windows.targets):,.2f} per token")
        figure.savefig(path, dpi=120)


@dataclass(frozen=True)
class LambadaResult:
    """The shares of last words that the model predicts.

    strict: of examples whose last word the model predicts whole. last_token: of those whose last token it predicts.
    cut: examples whose text was longer than the model, and lost its beginning.
    """

    examples: int
    strict: int
    last_token: int
    cut: int
    seq_length: int
    model: ModelScored

    def to_json(self) -> dict[str, Any]:
        """All numbers."""
        return {
            "task": "lambada", "examples": self.examples, "strict_accuracy": self.strict / self.examples,
            "last_token_accuracy": self.last_token / self.examples, "cut": self.cut, "seq_length": self.seq_length,
            **asdict(self.model),
        }  # fmt: skip

    def text(self) -> str:
        """A table for people."""
        rows = [
            ("strict accuracy", f"{self.strict / self.examples:.4f}",
             f"{self.strict:,} of {self.examples:,}: every token of the last word"),
            ("last-token accuracy", f"{self.last_token / self.examples:.4f}",
             f"{self.last_token:,} of {self.examples:,}: the last token of the text"),
        ]  # fmt: skip
        lost = f", of which {self.cut:,} lost their beginning to fit {self.seq_length:,} tokens" if self.cut else ""
        return _table("lambada", f"{self.examples:,} examples{lost}", self.model, rows)


def _table(task: str, about: str, model: ModelScored, rows: list[tuple[str, str, str]]) -> str:
    width, right = max(len(name) for name, _, _ in rows), max(len(value) for _, value, _ in rows)
    lines = [f"{task}: {about}", f"model: {model.checkpoint}, {model.dtype}", ""]
    return "\n".join([*lines, *(f"{name:<{width}}  {value:>{right}}  {of}" for name, value, of in rows), ""])


def save_json(path: Path, values: dict[str, Any]) -> None:
    """Write ``values``; infinities and NaN become null. Raises OSError."""
    plain = {name: as_json(value) for name, value in values.items()}
    disk.rewrite(path, (json.dumps(plain, indent=1) + "\n").encode())
