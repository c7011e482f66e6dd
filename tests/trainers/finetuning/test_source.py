"""The runs that a fine-tuning starts from or uses: which of their checkpoints, and what is refused."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from commengine import UsageError
from trainers.checkpoints import pointer
from trainers.finetuning.completing import of_model, of_run, shape
from trainers.finetuning.settings import FinetuneSettings
from trainers.finetuning.source import best_checkpoint, fine_tuned, pretrained
from trainers.settings.commands import BERTSettings, GPTSettings

SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 60, "seq_length": 16}
TUNED = SHAPE | {
    "task": "race", "max_position_embeddings": 16, "make_vocab_size_divisible_by": 64, "norm_placement": "pre",
    "gelu": "erf",
}  # fmt: skip


def saved(folder: Path, iteration: int, settings: dict, *parameters: str) -> Path:
    """A checkpoint that has its settings and the names of its parameters alone."""
    found = folder / pointer.name_of(iteration)
    found.mkdir(parents=True)
    state = {"format": 4, "iteration": iteration, "settings": settings}
    state["parameters"] = {name: {"shape": [1], "view": [1], "dim": None, "count": 1} for name in parameters}
    (found / "state.json").write_text(json.dumps(state))
    pointer.point_to(folder, found.name)
    return found


def tuned(folder: Path, iteration: int = 1, **changes: object) -> Path:
    settings = json.loads(json.dumps(asdict(FinetuneSettings(**TUNED))))
    return saved(folder, iteration, settings | changes)


def test_the_settings_of_a_pretrained_run(tmp_path):
    saved(tmp_path / "bert", 3, asdict(BERTSettings(**SHAPE)), "mlm_head.bias")
    settings, words = pretrained(str(tmp_path / "bert"), verify=False)
    assert words == f"--load {tmp_path / 'bert'}" and settings["hidden_size"] == 32
    found = of_model(FinetuneSettings(load="x"), settings, words)
    assert (found.num_layers, found.max_position_embeddings, found.norm_placement) == (2, 16, "pre")
    assert found.norm_epsilon == 1e-5
    older = {name: value for name, value in settings.items() if name != "norm_epsilon"}
    assert of_model(FinetuneSettings(load="x"), older, words).norm_epsilon == 1e-5
    converted = FinetuneSettings(load="x", task="race")
    found = of_model(converted, settings | {"norm_epsilon": 1e-12}, words)
    assert shape(found, 1).norm_epsilon == 1e-12
    with pytest.raises(UsageError, match=r"--hidden-size 64: the model of --load .*bert has 32"):
        of_model(FinetuneSettings(load="x", hidden_size=64), settings, words)


def test_runs_that_are_no_berts_are_refused(tmp_path):
    gpt = ("embedding.weight", "layers.0.norm.weight", "final_norm.weight")
    saved(tmp_path / "gpt", 1, asdict(GPTSettings(**SHAPE)), *gpt)
    saved(tmp_path / "module", 1, {"optimizer": {}, "extra": {}}, "weight")
    saved(tmp_path / "tuned", 1, asdict(FinetuneSettings(**TUNED)), "embedding.weight", "classifier.weight")
    for name, says in (("gpt", "holds a GPT, and a BERT"), ("module", "holds no GPT, BERT or T5"),
                       ("tuned", "holds a model of trainers.finetune .*save folder of trainers.pretrain_bert"),
                       ("none", "no such folder"),
                       (None, "--pretrained-checkpoint: needed")):  # fmt: skip
        with pytest.raises(UsageError, match=says):
            pretrained(name and str(tmp_path / name), verify=False)


def test_the_best_checkpoint_or_the_newest(tmp_path):
    run = tmp_path / "run"
    first, second = tuned(run, 1), tuned(run, 2)
    assert best_checkpoint(str(run), "--load") == second
    pointer.point_to(run, first.name, pointer.BEST)
    assert best_checkpoint(str(run), "--load") == first
    assert best_checkpoint(str(second), "--load") == second  # the one that is named
    several = tmp_path / "several"
    run.rename(several.mkdir() or several / "seed_7")
    (several / "seeds.json").write_text('{"median_run": "seed_7"}')
    assert best_checkpoint(str(several), "--load") == several / "seed_7" / first.name
    with pytest.raises(UsageError, match=r"--ensemble .*none: no such folder; valid: .* of a run of finetune"):
        best_checkpoint(str(tmp_path / "none"), "--ensemble")


def test_the_settings_of_a_fine_tuned_run(tmp_path):
    """To use the model nothing must be repeated; what is given must be the run's."""
    settings = fine_tuned(tuned(tmp_path / "run", bf16=True, max_qa_length=9), "--load run", verify=False)
    found = of_run(FinetuneSettings(load="x", predict="dev"), settings, "--load run")
    assert (found.task, found.seq_length, found.max_qa_length, found.bf16) == ("race", 16, 9, True)
    for name, value in (("task", "mnli"), ("seq_length", 8), ("max_qa_length", 10)):
        with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} {value}: the run of --load run has"):
            of_run(FinetuneSettings(load="x", predict="dev", **{name: value}), settings, "--load run")
    trained_on = of_run(FinetuneSettings(load="x", save="x"), settings, "--load run")
    assert (trained_on.seq_length, trained_on.max_qa_length, trained_on.bf16) == (16, 128, False)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"num_layers": "two"}, "settings.num_layers"),
        ({"hidden_size": -3}, "--hidden-size -3: must be at least 1"),
        ({"norm_placement": None}, "settings: norm_placement is missing"),
        ({"vocab_size": None}, "settings: vocab_size is missing"),
    ],
)
def test_damaged_settings_are_refused_by_name(tmp_path, changes, says):
    found = tuned(tmp_path / "run", **changes)
    with pytest.raises(UsageError, match=says):
        fine_tuned(found, "--load run", verify=False)


def test_a_pretrained_model_has_learnt_no_task(tmp_path):
    found = saved(tmp_path / "bert", 1, asdict(BERTSettings(**SHAPE)))
    with pytest.raises(UsageError, match="--load x: is no run of finetune, so it has learnt no task"):
        fine_tuned(found, "--load x", verify=False)
