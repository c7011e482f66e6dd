"""The contest of norms: a study that is stopped goes on as if it had not been; diverged runs; settings; the table."""

import json
import re
from dataclasses import replace

import pytest
import torch

from bench.contest import __main__ as command
from bench.contest import norm_placement
from bench.contest.norm_placement import DeepRun
from commengine import UsageError
from tests.bench.contest.stand_ins import rows_of
from trainers.data.sentences.samples import open_masked_corpus
from trainers.tasks.training import transformer_trainer
from trainers.training.trainer import Trainer

TINY = [
    "--mock-data", "--vocab-size", "60", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "16",
    "--global-batch-size", "4", "--micro-batch-size", "1", "--lr-warmup-iters", "2", "--depths", "1", "3",
    "--steps", "6", "--slice", "2",
]  # fmt: skip


@pytest.fixture
def folder(mpi_world, tmp_path_factory):
    """A folder that is the same on all ranks."""
    return mpi_world.bcast(tmp_path_factory.mktemp("study") if mpi_world.rank == 0 else None)


def read(argv, ranks=1):
    """The options as the contest has them."""
    return command.read("norm_placement", argv, ranks)


def steps(folder):
    """The loss and the norm of each step of the runs of the study in a folder."""
    runs = [DeepRun(layers, one, folder / f"{layers}-{one}") for layers in (1, 3) for one in norm_placement.PLACEMENTS]
    return {run.folder.name: [(row["mlm_loss"], row["grad_norm"]) for row in run.rows] for run in runs}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.mpi
def test_a_study_goes_on_with_the_losses_of_one_that_was_not_stopped(world, folder):
    at_once, parts = str(folder / "once"), str(folder / "parts")
    command.run("norm_placement", [*TINY, "--save", at_once], world)
    command.run("norm_placement", [*TINY, "--save", parts, "--minutes", "1e-9"], world)
    if world.rank == 0:
        runs = steps(folder / "parts")
        assert list(runs) == ["1-pre", "1-post", "3-pre", "3-post"]
        assert all(len(found) == 2 for found in runs.values())
    command.run("norm_placement", [*TINY, "--save", parts, "--minutes", "1e-9"], world)
    command.run("norm_placement", [*TINY, "--save", parts, "--output", str(folder / "table.md")], world)
    if world.rank == 0:
        once, again = (steps(folder / name) for name in ("once", "parts"))
        assert once == again
        assert all(len(found) == 6 for found in once.values())
        assert once["3-pre"] != once["3-post"] != once["1-post"]
        assert (folder / "parts" / "losses.png").read_bytes()[:4] == b"\x89PNG"
        assert len(list((folder / "parts" / "3-post").glob("iter_*"))) == 1  # older ones are gone
        text = (folder / "table.md").read_text()
        mean = sum(loss for loss, _ in once["3-pre"]) / 6
        assert f"| 3 | pre-LN | 6 | {mean:.3f} |" in text and "- hardware: " in text and "- command: " in text
    with pytest.raises(UsageError, match=r"hidden.size"):
        command.run("norm_placement", [*TINY, "--steps", "8", "--save", parts, "--hidden-size", "32"], world)


@pytest.mark.mpi
def test_both_placements_start_from_the_same_weights_and_samples(world, folder):
    config = norm_placement.BERTTrainConfig(**read([*TINY, "--save", str(folder)], world.size).bert)
    corpus = open_masked_corpus(config, config.wordpieces(), config.rules())
    pre, post = (
        transformer_trainer(replace(config, num_layers=2, norm_placement=one), world, corpus)
        for one in norm_placement.PLACEMENTS
    )
    values = dict(pre.model.named_parameters())
    shared = [(name, value) for name, value in post.model.named_parameters() if name in values]
    assert len(shared) > 30 and set(values) - {name for name, _ in shared} == {"final_norm.weight", "final_norm.bias"}
    for name, value in shared:
        assert torch.equal(value, values[name]), name
    for one, other in zip(pre.batches(0), post.batches(0), strict=True):
        assert torch.equal(one.tokens, other.tokens) and torch.equal(one.labels, other.labels)
    pre.close()
    post.close()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.mpi
def test_a_run_that_diverges_ends_alone_and_stays_ended(world, folder, monkeypatch):
    step = Trainer.step

    def diverging(trainer):
        if trainer.config.norm_placement == "post" and trainer.config.num_layers == 3 and trainer.iteration == 3:
            raise UsageError("step 4: the loss is nan")
        return step(trainer)

    monkeypatch.setattr(Trainer, "step", diverging)
    command.run("norm_placement", [*TINY, "--save", str(folder), "--minutes", "1e-9"], world)
    for _ in range(2):
        command.run("norm_placement", [*TINY, "--save", str(folder), "--output", str(folder / "table.md")], world)
        if world.rank == 0:
            counts = {name: len(found) for name, found in steps(folder).items()}
            assert counts == {"1-pre": 6, "1-post": 6, "3-pre": 6, "3-post": 3}
            assert (folder / "3-post" / "ended.txt").read_text() == "step 4: the loss is nan"
            assert "| ended at step 4 |" in (folder / "table.md").read_text()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--depths", "2", "2"], "--depths 2 2: must be different numbers"),
        (["--depths", "0"], "--depths 0: must be at least 1"),
        (["--minutes", "0"], "--minutes 0"),
        (["--slice", "0"], "--slice 0"),
        (["--num-layers", "3"], "--num-layers: is the study's own; give --depths"),
        (["--norm-placement=post"], "--norm-placement: is the study's own"),
        (["--compile"], "--compile: every depth would be compiled"),
        (["--hidden-size", "15"], "--hidden-size 15 is not a multiple"),
    ],
)
def test_bad_options_are_named(argv, message, tmp_path):
    with pytest.raises((ValueError, UsageError), match=re.escape(message)):
        read([*TINY, "--save", str(tmp_path), *argv])


def test_a_config_file_takes_the_place_of_the_small_model(tmp_path):
    (tmp_path / "mine.yaml").write_text("hidden-size: 32\nnum-attention-heads: 4\nmock-data: true\nvocab-size: 50\n")
    argv = ["--save", str(tmp_path / "study"), "--config", str(tmp_path / "mine.yaml")]
    config = read(argv).bert
    assert (config["hidden_size"], config["hidden_dropout"], config["train_iters"]) == (32, 0.1, 1000)


def test_a_preset_takes_the_place_of_the_small_model(tmp_path):
    argv = ["--save", str(tmp_path / "study"), "--preset", "bert-336m", "--mock-data"]
    config = read(argv).bert
    found = [config[name] for name in ("hidden_size", "num_attention_heads", "seq_length", "lr", "hidden_dropout")]
    assert found == [1024, 16, 512, 1e-4, 0.1]


def test_means_and_table_of_known_numbers(tmp_path):
    assert norm_placement.smoothed([4.0, 2.0, 3.0, 1.0], 2) == [4.0, 3.0, 2.5, 2.0]

    def run(layers, placement, losses, norms, ended=""):
        made = DeepRun(layers, placement, tmp_path / f"{layers}-{placement}")
        made.folder.mkdir()
        rows = [{"iteration": n, "mlm_loss": loss, "grad_norm": norms[0]} for n, loss in enumerate(losses, 1)]
        rows[-1:] = [row | {"grad_norm": norms[-1]} for row in rows[-1:]]
        (made.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if ended:
            (made.folder / "ended.txt").write_text(ended)
        return made

    runs = [
        run(2, "pre", [5.0] * 30 + [3.0] * 20, [1.0, 9.0]), run(2, "post", [5.0] * 30 + [4.0] * 20, [2.0]),
        run(8, "pre", [3.0], [1.5]), run(8, "post", [3.0], [7.0], "step 2: nan"),
        DeepRun(9, "pre", tmp_path / "none"), DeepRun(9, "post", tmp_path / "none"),
    ]  # fmt: skip
    rows = rows_of(*(norm_placement.compared(runs, depth) for depth in (2, 8, 9)))[2:]
    assert rows[:-1] == [
        "| 2 | pre-LN | 50 | 3.000 | +0.000 | 9.0 |", "| 2 | post-LN | 50 | 4.000 | +1.000 | 2.0 |",
        "| 8 | pre-LN | 1 | 3.000 | +0.000 | 1.5 |", "| 8 | post-LN | 1 | ended at step 2 | - | 7.0 |",
        "| 9 | pre-LN | 0 | nan | - | - |", "| 9 | post-LN | 0 | nan | - | - |",
    ]  # fmt: skip
    assert [run.goes_on(50) for run in runs] == [False, False, True, False, True, True]
