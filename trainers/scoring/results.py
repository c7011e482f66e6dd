"""What an evaluation found: as text, as JSON, and as a picture of the loss by position in the window."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from trainers.checkpoints import disk
from trainers.run.metrics import as_json

from .passages import Windows
from .scorer import Scores
from .texts import TextCounts
from .words import perplexity

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
    """The log-likelihood of texts, and the perplexities that follow from it.

    nll: of all targets together, in nats. words, harness_words: 0 where they are not known (`TextCounts`).
    position_nll: the mean loss of the targets that are predicted from each position of a window, in nats; None where
    there are none. position_targets: how many these are.
    """

    task: str
    nll: float
    targets: int
    texts: int
    words: int
    harness_words: int
    tokens: int
    seq_length: int
    stride: int
    windows: int
    model: ModelScored
    position_nll: list[float | None] = field(repr=False)
    position_targets: list[int] = field(repr=False)

    @classmethod
    def of(
        cls, task: str, scores: Scores, windows: Windows, counts: TextCounts, model: ModelScored
    ) -> PerplexityResult:
        """The result of the scores of ``windows``. The sum of their log-likelihoods is exact before it is rounded."""
        by_position = [
            round(float(total / count), 6) if count else None
            for total, count in zip(scores.position_nll, scores.position_targets, strict=True)
        ]
        return cls(
            task, math.fsum(scores.nll.tolist()), windows.targets, counts.texts, counts.words, counts.harness_words,
            counts.tokens, windows.length, windows.stride, len(windows), model, by_position,
            [int(count) for count in scores.position_targets],
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """All numbers; perplexities are null where words are not known, or a float has no room for them."""
        values: dict[str, Any] = {
            "task": self.task, "nll": self.nll, "targets": self.targets, "words": self.words or None,
            "token_perplexity": perplexity(self.nll, self.targets),
            "word_perplexity": perplexity(self.nll, self.words),
            "lm_eval_word_perplexity": perplexity(self.nll, self.harness_words),
            "lm_eval_words": self.harness_words or None, "tokens": self.tokens, "texts": self.texts,
            "seq_length": self.seq_length, "stride": self.stride, "windows": self.windows, **asdict(self.model),
            "position_nll": self.position_nll, "position_targets": self.position_targets,
        }  # fmt: skip
        return values

    def text(self) -> str:
        """A table for people."""
        mean = self.nll / self.targets
        rows = [("token perplexity", perplexity(self.nll, self.targets), f"{self.targets:,} targets, {mean:.4f} nats")]
        if self.words:
            more = ", more than tokens: each space of an indented line makes one" if self.words > self.targets else ""
            rows += [
                ("word perplexity (paper)", perplexity(self.nll, self.words),
                 f"{self.words:,} words between spaces{more}"),
                ("word perplexity (lm-eval)", perplexity(self.nll, self.harness_words),
                 f"{self.harness_words:,} words between white space, the same log-likelihood"),
            ]  # fmt: skip
        about = f"{self.windows:,} windows of {self.seq_length:,} tokens, stride {self.stride:,}"
        return _table(self.task, about, self.model, [(name, f"{value:,.4f}", of) for name, value, of in rows])

    def draw(self, path: Path) -> None:
        """Draw the mean loss over the position in the window, where it is the mean of enough targets.

        With a stride below the length only the first window of a text has targets at the first positions: a few losses
        beside the means of thousands would look like an effect of the context.
        """
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogFormatter

        figure = Figure(figsize=(7, 4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot(xlabel="tokens read before the target", ylabel="nats per target")
        few = max(self.position_targets, default=0) * FEW
        shown = zip(self.position_nll, self.position_targets, strict=True)
        losses = np.array([math.nan if loss is None or count < few else loss for loss, count in shown])
        read = np.arange(1, len(losses) + 1)
        if any(0 < count < few for count in self.position_targets):
            axes.set_xlabel(f"{axes.get_xlabel()} (left out: positions with fewer than {math.ceil(few):,} targets)")
        if len(losses) <= 64:
            axes.plot(read, losses, "o-", markersize=3, linewidth=1)
        else:
            axes.plot(read, losses, ".", markersize=2, alpha=0.4)
            edges = np.unique(np.geomspace(1, len(losses) + 1, 25).astype(int))
            middles, means = [], []
            for low, high in pairwise(edges.tolist()):
                known = losses[low - 1 : high - 1]
                if not np.isnan(known).all():
                    middles.append(math.sqrt(low * (high - 1)))
                    means.append(float(np.nanmean(known)))
            axes.plot(middles, means, "-", linewidth=2, label="mean")
            figure.legend(loc="outside lower right", frameon=False)  # below: it covers no point
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(LogFormatter())  # 70, not 7 x 10^1
            axes.xaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False))
        axes.set_title(f"{self.task}: perplexity {perplexity(self.nll, self.targets):,.2f} per token")
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
