"""bench.norm_placement: a study that is stopped goes on as if it had not been; diverged runs; settings; the table."""

import json
import re

import pytest
import torch

from bench import norm_placement
from bench.norm_placement import DeepRun
from commengine import Communicator, UsageError
from trainers.training.trainer import Trainer

TINY = [
    "--mock-data", "--vocab-size", "60", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "16",
    "--global-batch-size", "4", "--micro-batch-size", "1", "--lr-warmup-iters", "2", "--depths", "1", "3",
    "--steps", "6", "--slice", "2",
]  # fmt: skip


@pytest.fixture
def world(mpi_world):
    with Communicator(mpi_world) as world:
        yield world


@pytest.fixture
def folder(mpi_world, tmp_path_factory):
    """A folder that is the same on all ranks."""
    return mpi_world.bcast(tmp_path_factory.mktemp("study") if mpi_world.rank == 0 else None)


def study(folder):
    """The runs of the study in a folder, by depth and placement."""
    found = json.loads((folder / "losses.json").read_text())
    return {f"{run['layers']}-{run['placement']}": run for run in found["runs"]}


@pytest.mark.mpi
def test_a_study_goes_on_with_the_losses_of_one_that_was_not_stopped(world, folder):
    at_once, parts = str(folder / "once"), str(folder / "parts")
    norm_placement.main(world, [*TINY, "--save", at_once])
    norm_placement.main(world, [*TINY, "--save", parts, "--minutes", "1e-9"])
    if world.rank == 0:
        runs = study(folder / "parts")
        assert list(runs) == ["1-pre", "1-post", "3-pre", "3-post"]
        assert all(len(run["losses"]) == len(run["norms"]) == 2 for run in runs.values())
    norm_placement.main(world, [*TINY, "--save", parts, "--minutes", "1e-9"])
    norm_placement.main(world, [*TINY, "--save", parts, "--output", str(folder / "table.md")])
    if world.rank == 0:
        once, again = (study(folder / name) for name in ("once", "parts"))
        assert once == again
        assert all(len(run["losses"]) == 6 and not run["ended"] for run in once.values())
        assert once["3-pre"]["losses"] != once["3-post"]["losses"] != once["1-post"]["losses"]
        assert (folder / "parts" / "losses.png").read_bytes()[:4] == b"\x89PNG"
        assert len(list((folder / "parts" / "3-post").glob("iter_*"))) == 2  # older ones are gone
        text = (folder / "table.md").read_text()
        mean = sum(once["3-pre"]["losses"]) / 6
        assert f"| 3 | 6 | {mean:.3f} |" in text and "- hardware: " in text and "- command: " in text
    with pytest.raises(UsageError, match=r"--save .*: holds a study with other settings \(--lr 0.001\)"):
        norm_placement.main(world, [*TINY, "--save", parts, "--lr", "2e-3"])


@pytest.mark.mpi
def test_both_placements_start_from_the_same_weights_and_samples(world, folder):
    options = norm_placement.read([*TINY, "--save", str(folder)], world.size)
    config = norm_placement.BERTTrainConfig(**options["config"])
    corpus = norm_placement.open_masked_corpus(config, config.wordpieces(), config.rules())
    pre, post = (
        norm_placement.open_run(DeepRun(2, one), config, world, corpus, folder) for one in norm_placement.PLACEMENTS
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


@pytest.mark.mpi
def test_a_run_that_diverges_ends_alone_and_stays_ended(world, folder, monkeypatch):
    step = Trainer.step

    def diverging(trainer):
        if trainer.config.norm_placement == "post" and trainer.config.num_layers == 3 and trainer.iteration == 3:
            raise UsageError("step 4: the loss is nan")
        return step(trainer)

    monkeypatch.setattr(Trainer, "step", diverging)
    norm_placement.main(world, [*TINY, "--save", str(folder), "--minutes", "1e-9"])
    for _ in range(2):
        norm_placement.main(world, [*TINY, "--save", str(folder), "--output", str(folder / "table.md")])
        if world.rank == 0:
            runs = study(folder)
            assert {name: len(run["losses"]) for name, run in runs.items()} == {
                "1-pre": 6, "1-post": 6, "3-pre": 6, "3-post": 3,
            }  # fmt: skip
            assert runs["3-post"]["ended"] == "step 4: the loss is nan"
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
        (["--plot", "x.gif"], "--plot x.gif: the name ends in"),
        (["--compile"], "--compile: every depth would be compiled"),
        (["--hidden-size", "15"], "--hidden-size 15 is not a multiple"),
    ],
)
def test_bad_options_are_named(argv, message, tmp_path):
    with pytest.raises((ValueError, UsageError), match=re.escape(message)):
        norm_placement.read([*TINY, "--save", str(tmp_path), *argv], 1)


def test_the_folder_must_hold_a_study_or_nothing(tmp_path):
    (tmp_path / "losses.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"losses.json is not a study of bench.norm_placement"):
        norm_placement.read([*TINY, "--save", str(tmp_path)], 1)


def test_a_config_file_takes_the_place_of_the_small_model(tmp_path):
    (tmp_path / "mine.yaml").write_text("hidden-size: 32\nnum-attention-heads: 4\nmock-data: true\nvocab-size: 50\n")
    argv = ["--save", str(tmp_path / "study"), "--config", str(tmp_path / "mine.yaml")]
    config = norm_placement.read(argv, 1)["config"]
    assert (config["hidden_size"], config["hidden_dropout"], config["train_iters"]) == (32, 0.1, 1000)


def test_a_preset_takes_the_place_of_the_small_model(tmp_path):
    argv = ["--save", str(tmp_path / "study"), "--preset", "bert-336m", "--mock-data"]
    config = norm_placement.read(argv, 1)["config"]
    found = [config[name] for name in ("hidden_size", "num_attention_heads", "seq_length", "lr", "hidden_dropout")]
    assert found == [1024, 16, 512, 1e-4, 0.1]


def test_means_and_table_of_known_numbers():
    assert norm_placement.smoothed([4.0, 2.0, 3.0, 1.0], 2) == [4.0, 3.0, 2.5, 2.0]
    runs = [
        DeepRun(2, "pre", [5.0] * 30 + [3.0] * 20, [1.0, 9.0]), DeepRun(2, "post", [5.0] * 30 + [4.0] * 20, [2.0]),
        DeepRun(8, "pre", [3.0], [1.5]), DeepRun(8, "post", [3.0], [7.0], "step 2: nan"),
        DeepRun(9, "pre"), DeepRun(9, "post"),
    ]  # fmt: skip
    rows = norm_placement.table(runs)[2:]
    assert rows[0] == "| 2 | 50 | 3.000 | 9.0 | 4.000 | 2.0 | +1.000 |"
    assert rows[1] == "| 8 | 1 | 3.000 | 1.5 | ended at step 2 | 7.0 | - |"
    assert rows[2] == "| 9 | 0 | nan | - | nan | - | - |"
    assert norm_placement.left(runs, 50) == [49, 50, 50]
