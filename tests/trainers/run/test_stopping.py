"""A run that a signal or the clock stops has a checkpoint and says so, and goes on to the same bits."""

import datetime as dt
import json
import math
import os
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest

from commengine import UsageError
from tests.support import mpirun
from tests.support.lab.hosts import is_open_mpi
from tests.support.training.runs import has_long_tests
from trainers.run.stopping import DURATION, LIMIT, StopRequests, job_end_time
from trainers.settings.commands import TrainSettings
from trainers.settings.rules import require_valid

STEPS = 6
RUN = ["--tensor-model-parallel-size", "2", "--train-iters", str(STEPS), "--eval-iters", "2", "--eval-interval", "2"]
LATER = ["--save-interval", "2", "--exit-signal", "SIGUSR1"]

#: case -> (further options, [place, iteration, rank, signal] of each signal, the iteration and the status of its end)
CASES = {
    "to one rank": ([], [["step", 3, 1, "USR1"]], 3, 75),
    "SIGTERM": ([], [["step", 3, 0, "TERM"]], 3, 75),
    "SIGINT": ([], [["step", 3, 0, "INT"], ["step", 3, 1, "INT"]], 3, 75),
    "in an evaluation": ([], [["evaluation", 4, 1, "USR1"]], 4, 75),
    "in a save": ([], [["save", 4, 0, "USR1"]], 4, 75),
    "in the last step": ([], [["step", 6, 1, "TERM"]], 6, 0),
    "in the last evaluation": ([], [["evaluation", 6, 0, "TERM"]], 6, 75),
    "duration": (["--exit-duration-in-mins", "1e-9"], [], 1, 75),
}
#: the cases that only make test-long runs
LONG = ("SIGTERM", "SIGINT", "in an evaluation", "in the last step")
NAMES = [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in CASES]
WORDS = {"duration": "--exit-duration-in-mins 1e-09", "SIGINT": "SIGINT", "SIGTERM": "SIGTERM"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, pretrain, mock, request):
    """Case -> (how the stopped run ended, how the same command ended when started again, the folder)."""
    root = tmp_path_factory.mktemp("runs")
    cases = {name: case for name, case in CASES.items() if name not in LONG or has_long_tests(request)}
    commands = [(2, [*mock, *RUN, *LATER, "--save", root / "plain"])]
    for name, (words, planned, _, _) in cases.items():
        folders = ["--save", root / name, "--load", root / name]
        commands += [(2, [*mock, *RUN, *LATER, *words, *folders], planned), (2, [*mock, *RUN, *LATER, *folders])]
    commands.append((2, [*mock, *RUN], [["step", 2, 0, "TERM"]]))
    plain, *others, unsaved = pretrain(*commands)
    assert plain.codes == [0, 0], plain.err
    ended = {name: (*others[2 * k : 2 * k + 2], root / name) for k, name in enumerate(cases)}
    return {**ended, "plain": (plain, plain, root / "plain"), "unsaved": (unsaved, unsaved, root / "none")}


def told(folder):
    """The rows without times, and the report's losses."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [{key: row[key] for key in row if key not in ("tokens_per_second", "iteration_ms")} for row in rows]
    report = json.loads((folder / "report.json").read_text())
    return kept, {key: report[key] for key in ("iteration", "train_loss", "validation_loss", "unigram_entropy")}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_stops_with_a_checkpoint_and_says_so_in_one_line(runs, name):
    stopped, _, folder = runs[name]
    _, planned, iteration, status = CASES[name]
    assert stopped.codes == [status] * 2, stopped.err
    lines = [line for line in stopped.err[0].splitlines() if "stopped by" in line]
    reason = WORDS.get(name, f"SIG{planned[0][-1]}" if planned else "")
    left = " (the evaluation and the report are left)" if iteration == STEPS else ""
    expected = f"stopped by {reason} after step {iteration} of {STEPS}{left}; the checkpoint is saved, go on with "
    assert lines == ([expected + f"--load {folder} (exit status 75)"] if status else [])
    assert (
        stopped.out[1] == ""
        and "stopped by" not in stopped.err[1]
        and "Traceback" not in stopped.err[0] + stopped.err[1]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_started_again_it_ends_as_an_uninterrupted_run(runs, name):
    _, again, folder = runs[name]
    plain = runs["plain"][2]
    assert again.codes == [0, 0], again.err
    assert told(folder) == told(plain)
    for file in ("model.safetensors", "optimizer.safetensors"):
        last = f"iter_{STEPS:07d}"
        assert (folder / last / file).read_bytes() == (plain / last / file).read_bytes()
    if CASES[name][3] == 0:  # it had its report
        assert again.out[0].startswith("nothing to train: ")
    else:
        assert f"starting from iteration {CASES[name][2]} of" in again.err[0]


@pytest.mark.slow
def test_without_save_it_says_that_nothing_is_saved(runs):
    stopped = runs["unsaved"][0]
    assert stopped.codes == [75, 75]
    line = "stopped by SIGTERM after step 2 of 6; nothing is saved, because there is no --save (exit status 75)"
    assert line in stopped.err[0].splitlines() and stopped.out[0] == ""


def wait_for(path, rows, process):
    """Wait until the run has logged this many rows. pytest's own time limit ends a wait in vain."""
    while not path.exists() or path.read_bytes().count(b"\n") < rows:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def started(*words):
    argv = [mpirun.mpiexec(), "-n", "2", os.sys.executable, "-m", "trainers.pretrain_gpt", *map(str, words)]
    return mpirun.start(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGUSR1", pytest.param("SIGTERM", marks=pytest.mark.long)])
def test_a_signal_to_the_launcher(tmp_path, mock, name):
    """The launcher's own status, and nothing but the one line."""
    if name == "SIGTERM" and is_open_mpi():
        pytest.skip("Open MPI's launcher kills the ranks within seconds when it gets SIGTERM")
    process = started(*mock, "--train-iters", "1000000", "--save", tmp_path, "--exit-signal", "USR1")
    try:
        wait_for(tmp_path / "metrics.jsonl", 3, process)
        process.send_signal(signal.Signals[name])
        out, err = process.communicate(timeout=60)
    finally:
        mpirun.stop(process)
    assert process.returncode == 75, err
    assert sum(line.startswith(f"stopped by {name} after step ") for line in err.splitlines()) == 1 and out == "", err
    assert (tmp_path / "latest").exists() and "Traceback" not in err


@pytest.mark.slow
def test_the_second_interrupt_ends_at_once(tmp_path, mock):
    """Sent to one rank, while the other waits for it in a collective."""
    code = """
import os, signal, time
from commengine import launch
from trainers import pretrain_gpt
from trainers.training.trainer import Trainer
plain = Trainer.step
def step(self):
    if self.iteration == 2 and self.grid.world.rank == 1:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)
    if self.iteration == 2:
        self.grid.world.barrier()
        self.grid.world.barrier() if self.grid.world.rank == 0 else time.sleep(60)
    return plain(self)
Trainer.step = step
launch.run(pretrain_gpt.main)
"""
    words = [*mock, "--train-iters", "9", "--save", str(tmp_path), "--save-interval", "2"]
    done = mpirun.run(2, "-c", code, *words, timeout=60)
    assert done.returncode == 130, done.stderr
    assert done.stderr.count("interrupted again (SIGINT): ended at once, the last checkpoint is as it was") == 1
    assert "Traceback" not in done.stderr and (tmp_path / "latest").read_text().startswith("iter_0000002\n")


# The clock ------------------------------------------------------------------------------------------------------------


def test_slurms_end_time():
    assert job_end_time({}) == (None, "")
    assert job_end_time({"SLURM_JOB_END_TIME": "1790000000"}) == (1790000000.0, "SLURM_JOB_END_TIME")
    assert job_end_time({"SLURM_JOB_END_TIME": "soon"}) == (None, "")


@pytest.mark.parametrize(
    "printed, expected",
    [("2026-11-22T08:00:00", dt.datetime(2026, 11, 22, 8).timestamp()), ("N/A", None), ("", None)],
)
def test_an_older_slurm_is_asked(tmp_path, printed, expected):
    """With a squeue that answers as Slurm 22.05 does; tests/lab has the real one."""
    squeue = tmp_path / "squeue"
    squeue.write_text(f'#!/bin/sh\n[ "$1 $2 $3 $4" = "--noheader --jobs 7 --format=%e" ] && echo "{printed}"\n')
    squeue.chmod(0o755)
    environ = {"SLURM_JOB_ID": "7", "PATH": str(tmp_path)}
    assert job_end_time(environ) == (expected, "squeue" if expected else "")
    squeue.write_text("#!/bin/sh\nexit 1\n")
    assert job_end_time(environ) == (None, "")


@pytest.fixture
def stopping():
    with StopRequests(SimpleNamespace(rank=0)) as stopping:
        yield stopping
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)


def test_the_limit_is_in_force_before_the_end_of_the_job(stopping, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(math.ceil(time.time()) + 1000))
    stopping.configure(TrainSettings(save="runs/x"))
    assert stopping.reason() == 0 and "the run saves and stops 120 s before it" in stopping.limit
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() - 1))
    stopping.configure(TrainSettings(save="runs/x", exit_before_limit=2000.0))
    assert stopping.reason() == LIMIT and stopping.text(LIMIT) == "--exit-before-limit 2000"
    stopping.forget()
    assert stopping.reason() == 0


def test_half_of_a_short_job_is_left_to_training(stopping, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() + 100))
    stopping.configure(TrainSettings(save="runs/x"))
    assert stopping.reason() == 0 and "the run saves and stops 50 s before it" in stopping.limit


@pytest.mark.parametrize("settings", [{"save": None}, {"save": "runs/x", "exit_before_limit": 0.0}])
def test_no_limit_where_nothing_is_saved_or_it_is_turned_off(stopping, monkeypatch, settings):
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1")
    stopping.configure(TrainSettings(**settings))
    assert stopping.reason() == 0 and stopping.limit is None


def test_the_duration_counts_from_the_start(stopping):
    stopping.configure(TrainSettings(save="runs/x", exit_duration_in_mins=60.0))
    assert stopping.reason() == 0
    stopping.configure(TrainSettings(save="runs/x", exit_duration_in_mins=1e-9))
    assert stopping.reason() == DURATION


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"exit_signal": "KILL", "save": "x"}, ["--exit-signal KILL", "USR1, USR2"]),
        ({"exit_signal": "", "save": "x"}, ["--exit-signal ''", "USR1, USR2"]),
        ({"exit_signal": "USR1"}, ["--exit-signal: needs --save"]),
        ({"exit_duration_in_mins": 0.0, "save": "x"}, ["--exit-duration-in-mins 0.0", "above 0"]),
        ({"exit_duration_in_mins": 5.0}, ["--exit-duration-in-mins: needs --save"]),
        ({"exit_before_limit": -1.0}, ["--exit-before-limit -1.0", "negative"]),
        ({"save": ""}, ["--save ''", "must not be empty"]),
        ({"save": " "}, ["--save ' '", "must not be empty"]),
        ({"load": ""}, ["--load ''", "must not be empty"]),
        ({"tensorboard_dir": ""}, ["--tensorboard-dir ''", "must not be empty"]),
    ],
)
def test_what_the_options_refuse(settings, words):
    with pytest.raises(UsageError) as caught:
        require_valid(TrainSettings(**settings), 1)
    assert all(word in str(caught.value) for word in words), caught.value
