"""A run that goes back, or starts anew, leaves nothing of the history before, whenever it is killed."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.support.file_operations import FileOperations
from trainers.checkpoints import checkpoint, history, pointer, run_folder
from trainers.settings.commands import TrainSettings

STEPS = (2, 4, 6, 8)


@pytest.fixture
def old(tmp_path):
    """A folder of a run of 8 steps that a kill in its last save left, with its report."""
    folder = tmp_path / "old"
    for step in STEPS:
        (folder / pointer.name_of(step) / "hf").mkdir(parents=True)
        (folder / pointer.name_of(step) / "state.json").write_text("{}")
    (folder / "iter_0000009.tmp").mkdir()
    (folder / "iter_0000006.old").mkdir()
    (folder / "batches").mkdir()
    for step in (3, 7):
        (folder / "batches" / f"step_{step:07d}-replica_1.safetensors").touch()
    rows = [{"iteration": step, "lm_loss": 1.0} for step in range(1, 10)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "report.json").write_text('{"iteration": 8}')
    for name in ("report.txt", "loss.png", "experts.png", "metrics.jsonl.tmp", "notes.txt"):
        (folder / name).write_text("old")
    pointer.point_to(folder, "iter_0000008")
    pointer.point_to(folder, "iter_0000006", pointer.BEST)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def settled(folder: Path, load: str | None, change: int = 0) -> bool:
    """Let a process settle in ``folder`` and be killed before a change that it makes to a file. Whether it has ended.

    load: of --load; None for a new run. Both with --overwrite.
    """
    config = TrainSettings(save=str(folder), load=load, overwrite=True)
    found = run_folder.checkpoint_to_load(config)
    child = os.fork()
    if not child:
        status = 1
        try:
            with FileOperations(lambda number, _: os._exit(9) if number == change else None):
                goes_on = history.Beginning(None if found is None else str(found), found is not None)
                history.settle(config, goes_on, (found and pointer.iteration_of(found)) or 0)
            status = 0
        finally:
            os._exit(status)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert ended in (0, 9), ended
    return ended == 0


def copies(old: Path, load: str | None):
    """(a copy of ``old``, a name for it) for a kill before each change, and after the last one."""
    for change in range(1, 200, 1 if load else 3):
        folder = old.with_name(f"killed-{change}")
        shutil.copytree(old, folder)
        if settled(folder, load and load.format(folder), change):
            assert change > 30
            return
        yield folder


@pytest.mark.slow
def test_nothing_of_later_steps_stays_whenever_a_run_that_goes_back_is_killed(old):
    wanted = old.with_name("wanted")
    shutil.copytree(old, wanted)
    assert settled(wanted, f"{wanted}/iter_0000004")
    assert sorted(path.name for path in wanted.iterdir()) == [
        "batches", "iter_0000002", "iter_0000004", "latest", "metrics.jsonl", "notes.txt",
    ]  # fmt: skip
    assert [path.name[:12] for path in (wanted / "batches").iterdir()] == ["step_0000003"]
    assert [json.loads(row)["iteration"] for row in (wanted / "metrics.jsonl").open()] == [1, 2, 3, 4]
    moved = False
    for folder in copies(old, "{}/iter_0000004"):
        newest = pointer.latest(folder)
        assert newest.name == "iter_0000004" if moved else newest.name in ("iter_0000004", "iter_0000008")
        moved = newest.name == "iter_0000004"
        left = {name: text for name, text in content(folder).items() if name != "latest.tmp"}
        assert moved or left == content(old)
        if moved:
            assert pointer.best(folder) is None and pointer.history(folder)[-1] == newest
            assert settled(folder, str(folder)) and content(folder) == content(wanted)  # the usual command
    assert moved


@pytest.mark.slow
def test_a_new_run_reads_nothing_of_the_old_one_whenever_it_is_killed(old):
    cleared = False
    for folder in copies(old, None):
        found = checkpoint.find(folder)
        assert found is None or (not cleared and found.name == "iter_0000008")
        cleared = cleared or found is None
        assert not cleared or (pointer.best(folder) is None and not pointer.history(folder))
        usual = TrainSettings(save=str(folder), load=str(folder))
        if cleared:
            run_folder.require_free(usual)
            history.settle(usual, history.begin(usual), 0)
            assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    assert cleared


def test_a_report_of_before_the_checkpoint_stays_and_one_that_was_cut_off_goes(old):
    (old / "report.json").write_text('{"iteration": 4}')
    assert settled(old, f"{old}/iter_0000006") and (old / "report.txt").exists() and (old / "loss.png").exists()
    assert pointer.best(old).name == "iter_0000006"
    (old / "report.json").write_text('{"iteration": ')
    assert settled(old, str(old)) and not (old / "report.txt").exists() and not (old / "loss.png").exists()


def test_a_damaged_pointer_does_not_stop_a_run_that_goes_back(old):
    (old / "latest").write_text("nonsense")
    assert settled(old, f"{old}/iter_0000004") and pointer.latest(old).name == "iter_0000004"


def test_a_checkpoint_of_another_name_is_no_part_of_the_history(old):
    (old / "iter_0000004").rename(old / "good")
    assert not run_folder.is_in_save(TrainSettings(save=str(old)), old / "good")
    assert run_folder.is_in_save(TrainSettings(save=str(old)), old / "iter_0000002")


@pytest.mark.slow
def test_a_command_that_went_back_goes_on_when_it_is_repeated_and_goes_back_with_other_settings(
    tmp_path, pretrain, mock, rows
):
    run = [*mock, "--save", tmp_path, "--train-iters", "6", "--save-interval", "2"]
    back = [*run, "--load", tmp_path / "iter_0000002", "--overwrite", "--exit-interval", "3"]
    other = [*back, "--lr", "1e-3", "--keep-last", "1"]
    ran, *started, third = pretrain((1, run), *((1, words) for words in (back, back, other, other, back)))
    # --exit-interval ends the runs at step 3, and those that go on at 6, which is the last one
    assert [one.codes for one in (ran, *started)] == [[0], [75], [0], [75], [0]], [one.err for one in started]
    said = [one.err[0].replace("\n", " ") for one in started]
    assert [next(n for n in (2, 3) if f"starting from iteration {n} of" in text) for text in said] == [2, 3, 2, 3]
    assert f"{tmp_path} is back at iteration 2: removed iter_0000004, iter_0000006 and what else" in said[0]
    assert "so it does not go back to 2 again" in said[1] and "so it does not go back to 2 again" in said[3]
    assert [row["iteration"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5, 6]
    (line,) = [line for line in third.err[0].splitlines() if line.startswith("error: ")]
    assert third.codes == [2] and "iter_0000002: no such folder" in line  # --keep-last has removed it
