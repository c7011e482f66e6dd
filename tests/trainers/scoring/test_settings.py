"""Settings that do not fit each other, and the windows that follow from them."""

import pytest

from commengine import UsageError
from trainers.scoring.settings import COMMAND, EvaluateSettings, completed, names_of, window
from trainers.settings.commands import GPTSettings


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "text").write_text("a text")
    return lambda **given: EvaluateSettings(
        **({"load": "run", "task": "wikitext", "data": str(tmp_path / "text")} | given)
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"load": None}, "--load DIR: needed"),
        ({"task": None}, "--task: needed; valid: wikitext, lambada, perplexity, jsonl, held-out"),
        ({"data": None}, "--data FILE: needed with --task wikitext"),
        ({"data": "nowhere"}, "--data nowhere: no such file"),
        ({"task": "held-out"}, "--data .*: --task held-out reads the run's own data"),
        ({"task": "lambada", "stride": 8}, "--stride 8: --task lambada has no windows"),
        ({"task": "lambada", "plot": "a.png"}, "--plot a.png: --task lambada has no windows"),
        ({"predictions": "a.jsonl"}, "--predictions a.jsonl: needs --task lambada"),
        ({"num_fewshot": 2}, "--num-fewshot 2: needs --task lm-eval:NAME"),
        ({"task": "lm-eval:"}, "--task lm-eval:: must be wikitext, lambada, .* or lm-eval:NAME"),
        ({"task": "lm-eval:arc"}, "--data .*: --task lm-eval:arc reads its own data"),
        ({"task": "lm-eval:arc", "data": None, "stride": 8}, "--stride 8: --task lm-eval:arc has no windows"),
        ({"task": "lm-eval:arc", "data": None, "include_path": "no"}, "--include-path no: no such folder"),
        ({"stride": 9, "seq_length": 8}, "--stride 9: must not exceed --seq-length 8"),
        ({"stride": 0}, "--stride 0: must be at least 1"),
        ({"micro_batch_size": 0}, "--micro-batch-size 0: must be at least 1"),
        ({"plot": "a.txt"}, "--plot a.txt: the name ends in .png"),
        ({"json": "nowhere/a.json"}, "--json nowhere/a.json: there is no folder nowhere"),
        (
            {"tensor_model_parallel_size": 3},
            r"-size 3: does not divide the 4 ranks; \[1, 2, 4\]",
        ),
    ],
)
def test_what_does_not_fit_is_named(settings, given, said):
    def checked(config):
        COMMAND.require_valid(config, 4)
        completed(config, 4)

    with pytest.raises(UsageError, match=said):
        checked(settings(**given))


def test_the_tasks_of_the_harness(settings):
    assert names_of(settings()) == []
    config = settings(task="lm-eval:arc_easy,wikitext", data=None, limit=0.5)
    COMMAND.require_valid(config, 4)
    assert names_of(config) == ["arc_easy", "wikitext"]


def test_the_defaults_of_the_windows_are_the_papers_for_wikitext(settings):
    def run(length, positions=None):
        return GPTSettings(seq_length=length, max_position_embeddings=positions)

    COMMAND.require_valid(settings(), 4)
    assert window(settings(), run(1024)) == (1024, 32) and window(settings(), run(16)) == (16, 16)
    assert window(settings(task="perplexity"), run(1024)) == (1024, 1024)
    assert window(settings(task="perplexity"), run(512, 1024)) == (512, 512)  # the other positions were never trained
    assert window(settings(seq_length=1024, stride=1), run(512, 1024)) == (1024, 1)
    with pytest.raises(UsageError, match="--seq-length 2048: the model knows 1024 positions"):
        window(settings(seq_length=2048), run(512, 1024))
    with pytest.raises(UsageError, match="--stride 64: must not exceed the 32 tokens"):
        window(settings(stride=64), run(32))
