"""Results: their numbers, as text and as JSON, and the picture, also where numbers have no place in JSON."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from trainers.scoring import results
from trainers.scoring.passages import Windows
from trainers.scoring.scorer import Scores
from trainers.scoring.texts import TextCounts

MODEL = results.ModelScored("runs/main/iter_0000600", 600, "float32")


def result(nll, length=4, counts=None):
    windows = Windows([np.arange(11)], length, 2)
    losses = torch.arange(length, dtype=torch.float64)
    seen = torch.tensor([0.0] + [2.0] * (length - 1), dtype=torch.float64)
    scores = Scores(torch.tensor(nll, dtype=torch.float64), None, torch.zeros(0), losses, seen)
    return results.PerplexityResult("wikitext", scores, windows, counts or TextCounts(1, 8, 9, 11), MODEL)


def test_the_three_perplexities_stand_side_by_side_with_their_counts(tmp_path):
    one = result([1.0, 2.5, 3.5, 3.0])
    results.save_json(tmp_path / "a.json", one.to_json())
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["nll"] == 10.0 and found["targets"] == 10 and found["words"] == 8 and found["lm_eval_words"] == 9
    assert found["token_perplexity"] == pytest.approx(math.e)
    assert found["word_perplexity"] == pytest.approx(math.exp(10 / 8))
    assert found["lm_eval_word_perplexity"] == pytest.approx(math.exp(10 / 9))
    assert found["position_nll"] == [None, 0.5, 1.0, 1.5] and found["windows"] == 4
    assert found["position_targets"] == [0, 2, 2, 2]
    lines = one.text().splitlines()
    assert lines[0] == "wikitext: 4 windows of 4 tokens, stride 2" and lines[1].endswith("iter_0000600, float32")
    for name, value, count in (
        ("token perplexity", "2.7183", "10 targets"),
        ("word perplexity (paper)", "3.4903", "8 words between spaces"),
        ("word perplexity (lm-eval)", "3.0377", "9 words between white space"),
    ):
        assert any(line.startswith(name) and value in line and count in line for line in lines)


def test_more_words_than_tokens_are_explained():
    few, many = (result([1.0, 2.5, 3.5, 3.0], counts=TextCounts(1, words, 9, 11)).text() for words in (8, 12))
    assert "12 words between spaces, more than tokens: each space of an indented line makes one" in many
    assert "more than tokens" not in few


def test_sums_are_exact_in_any_order():
    values = [1e16, 1.0, -1e16, 1.0]
    assert result(values).nll == result(values[::-1]).nll == 2.0


def test_what_is_not_known_or_not_finite_is_null(tmp_path):
    one = result([math.nan, 1.0], counts=TextCounts(1, 0, 0, 11))
    results.save_json(tmp_path / "a.json", one.to_json())
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["nll"] is None and found["token_perplexity"] is None
    assert found["words"] is None and found["word_perplexity"] is None and "word perplexity" not in one.text()
    assert result([1e9]).to_json()["word_perplexity"] == math.inf


@pytest.mark.parametrize("length", [4, 100])
def test_the_picture_shows_the_loss_by_position(tmp_path, length):
    windows_of_few_and_many = result([1.0], length)
    windows_of_few_and_many.draw(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[1:4] == b"PNG"


def test_the_picture_numbers_its_axis_plainly(tmp_path, monkeypatch):
    """Also where the positions that are drawn span less than a power of ten."""
    from matplotlib.figure import Figure

    figures = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *words, **named: (figures.append(self), save(self, *words, **named))
    )
    targets = torch.tensor([1.0] * 59 + [1000.0] * 41, dtype=torch.float64)
    one = result([1.0], 100)
    scores = replace(one.scores, position_nll=targets, position_targets=targets)
    replace(one, scores=scores).draw(tmp_path / "a.png")
    (axes,) = figures[0].axes
    labels = {label.get_text() for label in axes.xaxis.get_ticklabels(which="both")} - {""}
    assert {"60", "70", "80"} <= labels and all(label.isdecimal() for label in labels)


def test_the_picture_leaves_out_positions_with_few_targets(tmp_path, monkeypatch):
    """The first window alone has targets at the first positions of windows that overlap."""
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    drawn, axes = [], []
    plot, add_subplot = Axes.plot, Figure.add_subplot
    monkeypatch.setattr(
        Axes, "plot", lambda self, *words, **named: drawn.append(words[:2]) or plot(self, *words, **named)
    )
    monkeypatch.setattr(
        Figure, "add_subplot", lambda *words, **named: axes.append(add_subplot(*words, **named)) or axes[-1]
    )
    seen = torch.tensor([1.0, 1.0, 19.0, 20.0], dtype=torch.float64)
    windows = Windows([np.arange(42)], 4, 2)
    scores = Scores(
        torch.ones(20, dtype=torch.float64), None, torch.zeros(0), torch.tensor([9.0, 8.0, 19.0, 40.0]), seen
    )
    results.PerplexityResult("wikitext", scores, windows, TextCounts(1, 8, 9, 42), MODEL).draw(tmp_path / "a.png")
    ((read, losses),) = drawn
    assert list(read) == [1, 2, 3, 4] and np.isnan(losses[:2]).all() and losses[2:] == [1.0, 2.0]
    assert axes[0].get_xlabel() == "tokens read before the target (left out: positions with fewer than 2 targets)"
    assert axes[0].get_title() == "wikitext: perplexity 1.63 per token"


def test_last_words():
    one = results.LambadaResult(8, 2, 4, 1, 1024, MODEL)
    values = one.to_json()
    assert (values["examples"], values["strict_accuracy"], values["last_token_accuracy"]) == (8, 0.25, 0.5)
    text = one.text()
    assert "8 examples, of which 1 lost their beginning to fit 1,024 tokens" in text
    assert "0.2500  2 of 8: every token of the last word" in text and "0.5000  4 of 8: the last token" in text
