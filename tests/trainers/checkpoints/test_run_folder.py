"""Runs that meet another run's folder: refused, gone on with, or replaced; and those that have nothing to do."""

import shutil
from pathlib import Path

import pytest

from commengine import UsageError
from trainers.checkpoints import pointer
from trainers.checkpoints.run_folder import require_free
from trainers.finetuning.settings import FinetuneSettings
from trainers.settings.commands import TrainSettings

pytestmark = pytest.mark.slow

OLD = ["iter_0000002", "iter_0000004", "latest", "loss.png", "metrics.jsonl", "report.json", "report.txt"]


def content(folder: Path) -> dict[str, bytes]:
    """Every file below ``folder`` but TensorBoard's."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and "tensorboard" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, pretrain, mock):
    """A run of 4 steps with a checkpoint at 2, in a folder that has a file of somebody else's."""
    folder = tmp_path_factory.mktemp("runs") / "old"
    (outcome,) = pretrain((1, [*mock, "--train-iters", "4", "--save-interval", "2", "--save", folder]))
    assert outcome.codes == [0], outcome.err
    (folder / "notes.txt").write_text("of somebody else")
    (folder / "iter_notes").mkdir()
    return folder


@pytest.fixture(scope="module")
def met(finished, pretrain, mock):
    """Case -> (its outcome, its folder): each had a copy of that folder, ``{old}``, and one of its own, ``{new}``."""
    cases = {
        "again": (1, ["--save", "{old}"]),
        "again on two ranks": (2, ["--save", "{old}"]),
        "from elsewhere": (1, ["--load", "{other}", "--save", "{old}", "--train-iters", "6"]),
        "died before a checkpoint": (1, ["--save", "{begun}"]),
        "no folder": (1, ["--load", "{new}/none"]),
        "empty folder": (2, ["--load", "{new}", "--save", "{new}/run"]),
        "pointer": (1, ["--load", "{old}/latest"]),
        "overwritten": (2, ["--save", "{old}", "--overwrite", "--train-iters", "3"]),
        "overwrite nothing": (1, ["--save", "{new}", "--overwrite"]),
        "overwrite what goes on": (1, ["--load", "{old}", "--save", "{old}", "--overwrite", "--train-iters", "6"]),
        "one checkpoint": (1, ["--load", "{old}/iter_0000002", "--save", "{new}", "--train-iters", "6"]),
        "branch": (1, ["--load", "{old}/iter_0000002", "--save", "{old}", "--train-iters", "6", "--overwrite"]),
        "branch unasked": (1, ["--load", "{old}/iter_0000002", "--save", "{old}", "--train-iters", "6"]),
        "no pointer": (2, ["--load", "{unnamed}", "--save", "{unnamed}", "--train-iters", "6"]),
        "started again": (1, ["--load", "{begun}", "--save", "{begun}"]),
        "done": (2, ["--load", "{old}", "--save", "{old}"]),
        "beyond": (1, ["--load", "{old}", "--save", "{old}", "--train-iters", "3"]),
    }
    root, commands = finished.parent, []
    for name, (n, words) in cases.items():
        places = {key: root / name / key for key in ("old", "other", "new", "begun", "unnamed")}
        for key in ("old", "other", "unnamed"):
            shutil.copytree(finished, places[key])
        (places["unnamed"] / "latest").unlink()
        for key in ("unnamed", "old")[: 2 if name == "done" else 1]:
            (places[key] / "iter_0000005.tmp").mkdir()  # which was under way
            (places[key] / "iter_0000005.tmp" / "model.safetensors").touch()
        for key in ("new", "begun"):
            places[key].mkdir()
        (places["begun"] / "metrics.jsonl").write_text('{"iteration": 1, "lm_loss": 1.0}\n')
        commands.append((n, [*mock, "--train-iters", "4", *(word.format(**places) for word in words)]))
    return {name: (outcome, root / name) for name, outcome in zip(cases, pretrain(*commands), strict=True)}


REFUSED = {
    "again": ["--save", "latest, metrics.jsonl", "--load", "--overwrite"],
    "again on two ranks": ["--save", "latest, metrics.jsonl", "--load", "--overwrite"],
    "from elsewhere": ["--save", "holds a run already", "--overwrite"],
    "died before a checkpoint": ["--save", "(metrics.jsonl)", "--overwrite"],
    "no folder": ["--load", "no such folder", "iter_*", "--save"],
    "empty folder": ["--load", "holds no checkpoint", "iter_*", "--save"],
    "pointer": ["--load", "latest", "iter_*"],
    "branch unasked": ["--load", "newer checkpoints (iter_0000004)", "--overwrite"],
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line_and_nothing_is_touched(finished, met, name):
    outcome, folder = met[name]
    assert set(outcome.codes) == {2}, outcome.err
    (line,) = [line for line in outcome.err[0].splitlines() if line.startswith("error: ")]
    assert all(words in line for words in REFUSED[name]), line
    assert content(folder / "old") == content(finished) and not list((folder / "new").iterdir())


def test_overwrite_is_a_run_from_scratch_and_leaves_what_is_not_a_runs(finished, met, rows):
    outcome, folder = met["overwritten"]
    assert outcome.codes == [0, 0], outcome.err
    left = sorted(path.name for path in (folder / "old").iterdir() if path.name != "tensorboard")
    assert left == ["iter_0000003", "iter_notes", *OLD[2:-2], "notes.txt", *OLD[-2:]]
    assert [row["iteration"] for row in rows(folder / "old")] == [1, 2, 3]
    assert rows(folder / "old")[0]["lm_loss"] == pytest.approx(rows(finished)[0]["lm_loss"], abs=1e-6)
    assert pointer.latest(folder / "old").name == "iter_0000003"
    assert met["overwrite nothing"][0].codes == [0]


def test_overwrite_removes_nothing_of_a_run_that_goes_on(met, rows):
    outcome, folder = met["overwrite what goes on"]
    assert outcome.codes == [0] and "starting from iteration 4" in outcome.err[0], outcome.err
    assert [row["iteration"] for row in rows(folder / "old")] == [1, 2, 3, 4, 5, 6]
    assert {"iter_0000002", "iter_0000004", "iter_0000006"} <= {path.name for path in (folder / "old").iterdir()}


@pytest.mark.parametrize(
    "name, into, steps", [("one checkpoint", "new", [3, 4, 5, 6]), ("branch", "old", [*range(1, 7)])]
)
def test_a_checkpoint_itself_can_be_loaded(finished, met, rows, name, into, steps):
    outcome, folder = met[name]
    assert outcome.codes == [0] and "starting from iteration 2" in outcome.err[0], outcome.err
    found = rows(folder / into)
    assert [row["iteration"] for row in found] == steps
    assert found[-4]["lm_loss"] == rows(finished)[2]["lm_loss"]  # of step 3, before the learning rates part
    assert pointer.latest(folder / into).name == "iter_0000006"


def test_a_run_that_was_killed_before_its_first_pointer_goes_on_from_the_newest_whole_checkpoint(met, rows):
    outcome, folder = met["no pointer"]
    assert outcome.codes == [0, 0] and "starting from iteration 4" in outcome.err[0], outcome.err
    assert [row["iteration"] for row in rows(folder / "unnamed")] == [1, 2, 3, 4, 5, 6]
    assert pointer.latest(folder / "unnamed").name == "iter_0000006"
    assert not list((folder / "unnamed").glob("*.*p"))  # that run's iter_0000005.tmp


def test_a_job_that_is_started_again_before_its_first_checkpoint_starts_anew(met, rows):
    outcome, folder = met["started again"]
    assert outcome.codes == [0] and "a new run: no checkpoint in" in outcome.err[0], outcome.err
    assert [row["iteration"] for row in rows(folder / "begun")] == [1, 2, 3, 4]


@pytest.mark.parametrize("name, asked", [("done", 4), ("beyond", 3)])
def test_nothing_to_train_is_said_and_leaves_the_report(finished, met, name, asked):
    outcome, folder = met[name]
    assert set(outcome.codes) == {0}, outcome.err
    (line,) = outcome.out[0].splitlines()
    assert line.startswith("nothing to train: ") and f"at iteration 4, --train-iters is {asked}" in line
    assert all(out == "" for out in outcome.out[1:]) and outcome.err[0] == ""
    assert content(folder / "old") == content(finished)  # what a failed save had left is gone


def test_a_run_that_ended_before_its_first_row_left_nothing(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    require_free(TrainSettings(save=str(tmp_path)))
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UsageError, match=r"holds a run already \(metrics.jsonl\)"):
        require_free(TrainSettings(save=str(tmp_path)))


def test_a_run_never_replaces_the_model_that_it_starts_from(tmp_path):
    """It is read before --overwrite removes what an older run left in --save."""
    model, run = tmp_path / "model", tmp_path / "run"
    for folder, name in ((model, "iter_0000007/model.pt"), (run, "iter_0000003/state.json")):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).touch()
    (tmp_path / "link").symlink_to(model)
    for overwrite in (False, True):
        for word, save in (("is", model), ("is", tmp_path / "link"), ("holds", tmp_path), ("lies in", model / "run")):
            for kind, option in ((TrainSettings, "load"), (FinetuneSettings, "pretrained_checkpoint")):
                for program in ("hf", "megatron"):
                    config = kind(**{option: f"{program}:{model}"}, save=str(save), overwrite=overwrite)
                    with pytest.raises(UsageError, match=rf"--save {save}: {word} the model {program}:.*apart from it"):
                        require_free(config)
        for origin in (run, run / "iter_0000003"):
            with pytest.raises(UsageError, match=f"--save {run}: holds the run that this one starts from; give an"):
                require_free(FinetuneSettings(pretrained_checkpoint=str(origin), save=str(run), overwrite=overwrite))
    require_free(FinetuneSettings(pretrained_checkpoint=str(run), save=str(run / "tuned")))
    require_free(TrainSettings(load=f"hf:{model}", save=str(tmp_path / "model2")))
