"""The short form of ``python -m tests.faults``, and its driver: what it counts as a failure, and how it goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.__main__ import Turn
from tests.support import mpirun
from tests.support.faults import parts
from tests.support.faults.results import BEGIN, END, Results, write_table

PARTS = {name: parts.Part(name) for name in parts.names()}
#: `make test` runs the cheap parts. Other tests of it do the same as the cases of some others:
#: tests/trainers/checkpoints/test_checkpoint.py kills a rank in a save, test_history.py a run that goes back,
#: test_checkpoint_writer_failures.py beside them fills disks, tests/trainers/run/test_stopping.py sends signals,
#: tests/trainers/test_supervise.py starts runs again, and tests/commengine/shared_memory/test_files.py has small disks
#: for shared memory.
MARKS = {
    "slurm": pytest.mark.slurm,
    **dict.fromkeys(
        ("saves", "kills", "going_back", "full_disks", "signals", "small_shm", "flips", "links", "supervised"),
        pytest.mark.long,
    ),
}
CASES = [
    pytest.param(name, number, id=f"{name}-{number}", marks=MARKS.get(name, ()))
    for name, part in PARTS.items()
    for number in part.short
]

#: a part whose cases end in all the ways in which a case can end
EXAMPLE = """
import os, signal, subprocess, sys, time
TITLE, DEMAND, CASES, SHORT, LIMIT_S, LEFT_S = "an example", "all pass", 7, [0], 3, 1

def run(case):
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    if case.number == 1:
        raise AssertionError(f"drew {case.random.random()}")
    if case.number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if case.number == 3:
        time.sleep(60)
    if case.number == 4:
        subprocess.Popen(sleeper, start_new_session=True)
    if case.number == 5:
        (case.shared / "made").touch()
    if case.number == 6:
        assert (case.shared / "made").exists() and not list(case.folder.iterdir())
        child = subprocess.Popen(sleeper, start_new_session=True)
        assert case.processes("python") == [child.pid]
        child.kill(); child.wait()
    return "even" if case.number % 2 == 0 else "odd"
"""


@pytest.mark.slow
@pytest.mark.parametrize("name, number", CASES)
def test_short_form(name: str, number: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    part = PARTS[name]
    if reason := part.why_not():
        pytest.skip(reason)
    outcome = part.attempt(number, tmp_path / "case", tmp_path_factory.getbasetemp() / "shared")  # by all parts
    assert outcome.passed, outcome.details


def test_a_part_numbers_its_short_cases_among_all() -> None:
    for part in PARTS.values():
        assert part.short and max(part.short) < part.cases, part.name


@pytest.mark.slow
def test_a_process_in_its_exec_is_found(tmp_path: Path) -> None:
    case = parts.Case("none", 0, tmp_path, tmp_path)
    with case.marked():
        for _ in range(400):  # without a second look, about 6 of them were not found
            child = subprocess.Popen(["sleep", "60"])
            found = case.processes("sleep")
            child.kill()
            child.wait()
            assert found == [child.pid]


def drive(*arguments: str, timeout: float = 100) -> "subprocess.CompletedProcess[str]":
    return mpirun.command([sys.executable, "-m", "tests.faults", *arguments], timeout=timeout)


@pytest.fixture
def example():
    """The name of a new part of seven cases."""
    path = parts.FOLDER / f"example_{os.getpid()}.py"
    path.write_text(EXAMPLE)
    yield path.stem
    path.unlink()


@pytest.mark.long
@pytest.mark.slow
def test_driver_counts_failures_and_goes_on_where_it_stopped(example: str, tmp_path: Path) -> None:
    results, document = tmp_path / "results.jsonl", tmp_path / "page.md"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    words = [example, "--results", str(results), "--table", str(document), "--folder", str(tmp_path / "work")]
    done = drive(*words)
    assert done.returncode == 1, done
    rows = {row["case"]: row for row in map(json.loads, results.read_text().splitlines()) if "case" in row}
    assert [rows[number]["passed"] for number in range(7)] == [True, False, False, False, False, True, True]
    assert rows[1]["outcome"].startswith("AssertionError: drew 0.") and "raise AssertionError" in rows[1]["details"]
    assert "died" in rows[2]["outcome"] and "TimeoutError" in rows[3]["outcome"] and "outlive" in rows[4]["outcome"]
    assert rows[5]["outcome"] == "odd" and rows[6]["outcome"] == "even"
    page = document.read_text()
    assert page.startswith(f"before\n{BEGIN}\n| part") and page.endswith(f"{END}\nafter\n") and "old" not in page
    (line,) = (line for line in page.splitlines() if example in line)
    assert "| an example | all pass | 7 | 7 | 3 | 4 |" in line and "2 even" in line and "1 odd" in line

    with results.open("a") as file:
        file.write('{"part": "cut by a cra')
    text = (parts.FOLDER / f"{example}.py").read_text()
    (parts.FOLDER / f"{example}.py").write_text(text.replace("case.number == 1:", "case.number == 7:"))
    done = drive(*words, "--minutes", "1e-9")
    assert f"{example} 1: passed" in done.stdout and f"{example} 0:" not in done.stdout
    assert "cases are left" in done.stdout, done.stdout
    assert Results(results).rows[example, 1]["passed"]


@pytest.mark.slow
def test_a_worker_that_is_killed_between_cases_is_started_again(example: str, tmp_path: Path) -> None:
    turn = Turn(example, tmp_path)
    turn.left = [0]
    os.kill(turn.worker.pid, signal.SIGKILL)
    while turn.worker.alive:
        time.sleep(0.01)
    assert turn.worker.run(0) is None
    assert turn.run()["passed"]
    turn.worker.close()


@pytest.mark.slow
def test_driver_refuses_what_it_does_not_know() -> None:
    done = drive("nonsense")
    assert done.returncode == 2 and "there is no part nonsense; the parts are" in done.stderr


def test_a_document_without_marks_stays_as_it_is(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("no marks\n")
    with pytest.raises(ValueError, match="it has no lines"):
        write_table(page, "table")
    assert page.read_text() == "no marks\n"


@pytest.mark.slow
def test_processes_of_a_case_are_found_by_name(tmp_path: Path) -> None:
    case = parts.Case("none", 0, tmp_path, tmp_path)
    with case.marked():
        child = subprocess.Popen(["sleep", "60"], start_new_session=True)
        deadline = time.monotonic() + 10
        while not case.processes("sleep") and time.monotonic() < deadline:
            time.sleep(0.01)
        assert case.processes("sleep") == [child.pid] and case.processes("hydra") == []
        child.kill()
        child.wait()
