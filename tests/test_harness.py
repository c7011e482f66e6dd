"""The test harness itself: a failure on one rank ends a run, in time, with that rank's words."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.support import mpirun
from tests.support.running import sizes

pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve().parent


@pytest.fixture
def job(tmp_path: Path):
    """Run pytest on a test file of this text under mpiexec, with this directory's conftest.

    fresh: as for `mpirun.start`; False where no rank dies.
    """
    shutil.copy(HERE / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    mpi\n")

    def job(text: str, n: int = 2, *args: str, fresh: bool = True) -> tuple[subprocess.CompletedProcess[str], float]:
        head = "import time, pytest\npytestmark = pytest.mark.mpi\n\n"
        (tmp_path / "test_it.py").write_text(head + text)
        began = time.monotonic()
        argv = ["-m", "pytest", "-m", "mpi", "--with-mpi", "--color=no", *args, str(tmp_path)]
        done = mpirun.run(n, *argv, timeout=60, env={"PYTHONPATH": str(mpirun.ROOT)}, cwd=tmp_path, fresh=fresh)
        return done, time.monotonic() - began

    return job


@pytest.mark.long
def test_passing_ranks_exit_0(job):
    done, _ = job("def test_it(mpi_world):\n    assert mpi_world.allreduce(1) == 2\n", fresh=False)
    assert done.returncode == 0, done
    assert done.stdout.count("1 passed") == 1, done.stdout  # one rank's report


def test_rank_that_fails_while_the_others_wait_ends_the_run(job):
    done, seconds = job(
        "from tests.support.running import lockstep\nlockstep.GRACE_S = 1.0\n\n"
        "def test_it(mpi_world):\n    assert mpi_world.rank != 1, 'rank one gives up'\n    mpi_world.Barrier()\n"
    )
    assert done.returncode != 0
    assert seconds < 30
    assert "[rank 1] E       AssertionError: rank one gives up" in done.stderr
    assert "test_it.py::test_it: this rank failed in call, and the others wait for it" in done.stderr


@pytest.mark.long
def test_rank_0_that_fails_while_the_others_wait_ends_the_run(job):
    done, seconds = job(
        "def test_it(mpi_world):\n    assert mpi_world.rank != 0, 'rank zero gives up'\n    mpi_world.Barrier()\n",
        3,
    )
    assert done.returncode != 0
    assert seconds < 30
    assert "[rank 0] E       AssertionError: rank zero gives up" in done.stderr


def test_failure_everywhere_is_reported_once_and_the_run_goes_on(job):
    done, _ = job(
        "def test_first(mpi_world):\n    assert mpi_world.size == 5, 'all of us'\n\n"
        "def test_second(mpi_world):\n    assert mpi_world.allreduce(1) == 2\n"
    )
    assert done.returncode != 0
    assert "1 failed, 1 passed" in done.stdout
    assert "[rank 1] failed in call, in the same way" in done.stdout
    assert done.stdout.count("E       AssertionError: all of us") == 1, done.stdout


def test_failure_of_another_rank_alone_is_in_the_report_and_the_run_goes_on(job):
    done, _ = job(
        "def test_first(mpi_world):\n    assert mpi_world.rank != 1, 'only one'\n\n"
        "def test_second(mpi_world):\n    assert mpi_world.allreduce(1) == 2\n"
    )
    assert done.returncode != 0
    assert "1 failed, 1 passed" in done.stdout
    assert "[rank 1] failed in call" in done.stdout
    assert "E       AssertionError: only one" in done.stdout


@pytest.mark.long
def test_failing_fixtures_keep_step(job):
    done, _ = job(
        "@pytest.fixture\ndef early(mpi_world):\n    assert mpi_world.rank != 1, 'setup of one'\n\n"
        "@pytest.fixture\ndef late(mpi_world):\n    yield\n    assert mpi_world.rank != 1, 'teardown'\n\n"
        "def test_first(early, mpi_world):\n    mpi_world.Barrier()\n\n"
        "def test_second(late, mpi_world):\n    mpi_world.Barrier()\n\n"
        "def test_third(mpi_world):\n    assert mpi_world.allreduce(1) == 2\n"
    )
    assert done.returncode != 0
    assert "2 passed, 2 errors" in done.stdout
    assert "setup of one" in done.stdout
    assert "AssertionError: teardown" in done.stdout


@pytest.mark.long
def test_skips_are_collective(job):
    done, _ = job("def test_it(mpi_world):\n    pytest.skip(f'all of us, here {mpi_world.rank}')\n")
    assert done.returncode == 0
    assert "1 skipped" in done.stdout
    done, _ = job("def test_it(mpi_world):\n    if mpi_world.rank == 0:\n        pytest.skip('only me')\n")
    assert done.returncode != 0
    assert "1 failed" in done.stdout
    assert "[rank 1] passed in call" in done.stdout


@pytest.mark.long
def test_hang_ends_at_the_time_limit_and_shows_where_each_rank_is(job):
    done, seconds = job(
        "def test_it(mpi_world):\n"
        "    if mpi_world.rank == 0:\n        mpi_world.Barrier()\n"
        "    else:\n        time.sleep(1000)\n",
        2,
        "--timeout=3",
    )
    assert done.returncode != 0
    assert seconds < 30
    for rank in (0, 1):
        assert f"[rank {rank}] test_it.py::test_it: more than 3.0 s in call" in done.stderr
    assert done.stderr.count("in test_it\n") == 2, done.stderr


@pytest.mark.long
def test_time_limit_holds_for_a_teardown_after_a_failure(job):
    done, seconds = job(
        "@pytest.fixture\ndef stuck(mpi_world):\n"
        "    yield\n    mpi_world.Barrier() if mpi_world.rank == 0 else time.sleep(1000)\n\n"
        "def test_it(stuck):\n    raise ValueError\n",
        2,
        "--timeout=3",
    )
    assert done.returncode != 0
    assert seconds < 30
    assert "more than 3.0 s in teardown" in done.stderr


@pytest.mark.long
def test_ranks_that_collect_different_tests_run_none(job):
    done, seconds = job(
        "from mpi4py import MPI\n"
        "@pytest.mark.parametrize('x', [MPI.COMM_WORLD.rank])\n"
        "def test_it(x):\n    MPI.COMM_WORLD.Barrier()\n"
    )
    assert done.returncode != 0
    assert seconds < 30
    assert "collected different tests: test_it.py::test_it[0], test_it.py::test_it[1]" in done.stdout


@pytest.mark.long
def test_rank_that_cannot_import_its_tests_is_shown(job):
    done, seconds = job("from mpi4py import MPI\nassert MPI.COMM_WORLD.rank != 1, 'no import'\n")
    assert done.returncode != 0
    assert seconds < 30
    assert "rank 1 could not collect its tests" in done.stdout
    assert "[rank 1] E   AssertionError: no import" in done.stderr


@pytest.mark.long
def test_rank_that_dies_ends_the_run(job):
    done, seconds = job(
        "import os, signal\ndef test_it(mpi_world):\n"
        "    if mpi_world.rank == 1:\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    mpi_world.Barrier()\n"
    )
    assert done.returncode != 0
    assert seconds < 30


@pytest.mark.parametrize(
    "n, selection, passed",
    [
        pytest.param(1, "usual", "case_of[1] drawn[0] every one_or_two", marks=pytest.mark.long),
        (2, "usual", "drawn[0] drawn[1] drawn[2] every one_or_two some[2] two_or_more usual"),
        pytest.param(
            2, "quick", "drawn[0] drawn[2] every one_or_two some[2] two_or_more usual", marks=pytest.mark.long
        ),
        pytest.param(4, "usual", "case_of[4] drawn[0] every four two_or_more", marks=pytest.mark.long),
    ],
)
def test_a_size_that_a_test_does_not_depend_on_is_left_out(job, n, selection, passed):
    text = (
        "def test_usual(mpi_world):\n    pass\n\n"
        "@pytest.mark.every_size\ndef test_every(mpi_world):\n    pass\n\n"
        "@pytest.mark.every_size\n@pytest.mark.mpi(min_size=2)\ndef test_two_or_more(mpi_world):\n    pass\n\n"
        "@pytest.mark.mpi(min_size=4)\ndef test_four(mpi_world):\n    pass\n\n"
        "@pytest.mark.sizes(1, 2)\ndef test_one_or_two(mpi_world):\n    pass\n\n"
        "@pytest.mark.every_size\n@pytest.mark.parametrize('n', [0, 1, 2, pytest.param(3, marks=pytest.mark.long)])\n"
        "def test_drawn(mpi_world, n):\n    assert n < 3\n\n"
        "@pytest.mark.some(1)\n@pytest.mark.parametrize('n', [0, 1, 2])\ndef test_some(mpi_world, n):\n    pass\n\n"
        "CASES = [pytest.param(n, id=str(n), marks=pytest.mark.sizes(n)) for n in (1, 4)]\n"
        "@pytest.mark.every_size\n@pytest.mark.parametrize('n', CASES)\ndef test_case_of(mpi_world, n):\n    pass\n"
    )
    done, _ = job(text, n, "-v", f"{sizes.OPTION}={selection}", "-m", "mpi and not long", fresh=False)
    assert done.returncode == 0, done
    assert sorted(re.findall(r"test_it.py::test_(\S+) PASSED", done.stdout)) == passed.split()
    assert "SKIPPED" not in done.stdout


@pytest.mark.long
def test_a_test_for_more_ranks_than_any_run_has_is_an_error(job):
    text = "@pytest.mark.mpi(min_size=5)\ndef test_it(mpi_world):\n    pass\n"
    done, _ = job(text, 2, f"{sizes.OPTION}=usual", fresh=False)
    assert done.returncode != 0
    assert "test_it.py::test_it needs 5 ranks" in done.stdout + done.stderr


def test_a_test_that_starts_a_command_must_be_marked_slow(job):
    text = (
        "from tests.support import mpirun\n\n"
        "def test_quick(mpi_world):\n"
        "    with pytest.raises(RuntimeError, match='test_it.py::test_quick starts a command: mark it slow'):\n"
        "        mpirun.command(['true'], timeout=10)\n\n"
        "@pytest.mark.slow\ndef test_slow(mpi_world):\n    assert not mpirun.command(['true'], timeout=10).returncode\n"
    )
    done, _ = job(text, 1, fresh=False)
    assert "2 passed" in done.stdout, done


@pytest.mark.long
def test_timeout_leaves_no_process_behind(tmp_path: Path):
    (tmp_path / "sleeper.py").write_text(
        "import os, sys, time\nfrom mpi4py import MPI\n"
        f"open(os.path.join({str(tmp_path)!r}, f'{{os.getpid()}}.pid'), 'w')\n"
        "print('here', flush=True)\nMPI.COMM_WORLD.Barrier()\ntime.sleep(1000)\n"
    )
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        mpirun.run(2, str(tmp_path / "sleeper.py"), timeout=5, fresh=True)
    assert "here" in caught.value.output
    pids = [path.stem for path in tmp_path.glob("*.pid")]
    assert len(pids) == 2
    deadline = time.monotonic() + 5
    while any(Path("/proc", pid).exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if Path("/proc", pid).exists()]


def test_environment_of_an_outer_job_is_not_passed_on(monkeypatch: pytest.MonkeyPatch):
    for name in ("PMI_RANK", "PMI_SIZE", "PMI_FD", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "HYDRA_BSTRAP_UPSTREAM_FD"):
        monkeypatch.setenv(name, "7")
    done = mpirun.run(2, "-c", "import sys; from mpi4py import MPI; sys.stdout.write(f'size {MPI.COMM_WORLD.size}\\n')")
    assert done.stdout.split("\n").count("size 2") == 2, done


@pytest.mark.long
def test_tests_run_says_what_is_wrong_with_its_words():
    argv = [sys.executable, str(HERE / "run"), "-k", "no_such_name", str(HERE / "test_imports.py")]
    for ranks, code, says in (
        ("x", 2, "RANKS=x: want numbers of ranks"),
        ("0", 1, "(no test matches: -k no_such_name"),
    ):
        done = mpirun.command(argv, timeout=60, env={"RANKS": ranks})
        assert done.returncode == code and says in done.stdout + done.stderr, done
        assert "Traceback" not in done.stderr


def test_tests_run_counts_and_times_every_test_that_it_selects(tmp_path):
    """A caller's -m narrows the selection of the run, and does not replace it."""
    (tmp_path / "test_it.py").write_text(
        "import pytest, time\n\n"
        "def test_other():\n    pass\n\n"
        "@pytest.mark.gpu\ndef test_good():\n    time.sleep(0.2)\n\n"
        "@pytest.mark.gpu\ndef test_bad():\n    assert False\n\n"
        "@pytest.mark.gpu\ndef test_skipped():\n    pytest.skip('not here')\n\n"
        "@pytest.mark.gpu\n@pytest.mark.long\ndef test_long():\n    assert False\n\n"
        "@pytest.mark.gpu\n@pytest.mark.mpi\ndef test_mpi():\n    assert False\n"
    )
    options = [
        "-m",
        "gpu",
        "-c",
        str(mpirun.ROOT / "pyproject.toml"),
        "--confcutdir",
        str(HERE),
        "-p",
        "tests.conftest",
    ]
    argv = [sys.executable, str(HERE / "run"), *options, "-n0", str(tmp_path)]
    done = mpirun.command(argv, timeout=60, env={"RANKS": "0"})
    assert done.returncode == 1, done
    *_, head, first, second, third, between, of_files, file, gap, of_failed, bad, blank, last = done.stdout.splitlines()
    assert (between, gap, blank, last) == ("", "", "", "1 passed, 1 failed, 1 skipped")
    assert of_failed == "======== failed" and re.match(r"serial tests: \S+::test_bad$", bad)
    assert of_files == "======== slowest 20 files" and re.match(r" +\d+\.\d\d s  serial tests +\S+\.py$", file)
    assert head == "======== slowest 20 tests"
    timed = [
        re.fullmatch(r" *(\d+\.\d\d) s  serial tests +\S+::(\w+)", line).groups() for line in (first, second, third)
    ]
    assert timed == sorted(timed, key=lambda one: -float(one[0]))
    seconds = {name: float(time) for time, name in timed}
    assert seconds.keys() == {"test_good", "test_bad", "test_skipped"} and seconds["test_good"] >= 0.2


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="forks need pidfd_open")
def test_tests_are_collected_once_and_each_runs_in_one_process(tmp_path):
    note = f"open({str(tmp_path / 'notes')!r}, 'a').write"
    for letter in "ab":
        (tmp_path / f"test_{letter}.py").write_text(
            f"import os, pytest, time\n{note}('imported\\n')\n\n"
            f"@pytest.mark.parametrize('n', range(3))\ndef test_it(n):\n    {note}('it\\n')\n    time.sleep(0.5)\n\n"
            f"@pytest.mark.mpi\ndef test_mpi(mpi_world):\n    {note}(f'{{mpi_world.rank}} of {{mpi_world.size}}\\n')\n"
        )
    argv = [sys.executable, str(HERE / "run"), "-c", str(mpirun.ROOT / "pyproject.toml"), "--confcutdir", str(HERE),
            "-p", "tests.conftest", str(tmp_path)]  # fmt: skip
    done = mpirun.command(argv, timeout=60, env={"RANKS": "0 2"})
    assert done.returncode == 0 and done.stdout.endswith("\n8 passed, 0 failed, 0 skipped\n"), done
    notes = Counter((tmp_path / "notes").read_text().splitlines())
    assert notes == {"imported": 2, "it": 6, "0 of 2": 2, "1 of 2": 2}
    assert "-------- serial tests, process 2\n" in done.stdout and "3 passed" in done.stdout  # each had a file


def test_tests_run_names_the_test_in_which_a_run_ended_early(tmp_path):
    (tmp_path / "test_it.py").write_text("import os\ndef test_good():\n    pass\ndef test_dies():\n    os._exit(3)\n")
    argv = [sys.executable, str(HERE / "run"), "-c", str(mpirun.ROOT / "pyproject.toml"), "--confcutdir", str(HERE),
            "-p", "tests.conftest", "-n0", str(tmp_path)]  # fmt: skip
    done = mpirun.command(argv, timeout=60, env={"RANKS": "0"})
    assert done.returncode == 1, done
    *_, of_failed, early, blank, last = done.stdout.splitlines()
    assert (of_failed, blank, last) == ("======== failed", "", "1 passed, 1 failed, 0 skipped")
    assert re.match(r"serial tests: ended early with exit status 3, unfinished: \S+::test_dies$", early)


@pytest.mark.long
def test_a_run_goes_on_where_an_earlier_one_stopped(tmp_path):
    """What failed, and what did not begin, runs again; what passed counts, until a file changes."""
    (tmp_path / "test_it.py").write_text(
        f"import os, pathlib\nnotes = pathlib.Path({str(tmp_path / 'notes')!r})\n"
        "def note(word):\n    notes.open('a').write(word)\n\n"
        "def test_good():\n    note('g')\n\n"
        "def test_bad():\n    note('b')\n    assert notes.read_text().count('b') > 1\n\n"
        "def test_dies():\n    note('d')\n    os._exit(0) if notes.read_text().count('d') == 1 else None\n"
    )
    argv = [sys.executable, str(HERE / "run"), "-c", str(mpirun.ROOT / "pyproject.toml"), "--confcutdir", str(HERE),
            "-p", "tests.conftest", "-n0", "--go-on", str(tmp_path / "kept"), str(tmp_path)]  # fmt: skip
    done = [mpirun.command(argv, timeout=60, env={"RANKS": "0"}) for _ in range(2)]
    assert [one.stdout.splitlines()[-1] for one in done] == [
        "1 passed, 2 failed, 0 skipped", "3 passed, 0 failed, 0 skipped",
    ], done  # fmt: skip
    assert (tmp_path / "notes").read_text() == "gbdbd"
    (tmp_path / "kept" / "tree").write_text("of other files")
    assert mpirun.command(argv, timeout=60, env={"RANKS": "0"}).returncode == 0
    assert (tmp_path / "notes").read_text() == "gbdbdgbd"


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.long)])
def test_tests_run_ends_its_pytest_when_it_is_killed(tmp_path, number):
    """Else the tests would go on, with nobody to read their output."""
    (tmp_path / "test_it.py").write_text(
        "import os, time\n\n"
        f"def test_it():\n    open({str(tmp_path / 'pid')!r}, 'w').write(f'{{os.getpid()}}\\n')\n    time.sleep(60)\n"
    )
    argv = [sys.executable, str(HERE / "run"), "-c", str(mpirun.ROOT / "pyproject.toml"), "--confcutdir", str(HERE),
            "-p", "tests.conftest", str(tmp_path)]  # fmt: skip
    before = signal.signal(number, signal.SIG_DFL)  # under nohup, tests/run would inherit that it is ignored
    try:
        process = mpirun.start(argv, env={"RANKS": "0"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    finally:
        signal.signal(number, before)
    try:
        written = tmp_path / "pid"
        while not (written.exists() and written.read_text().endswith("\n")):
            assert process.poll() is None
            time.sleep(0.05)
        os.kill(process.pid, number)  # not its process group
        assert process.wait(30) == 128 + number
        tests = Path("/proc", written.read_text().strip())
        for _ in range(100):  # a process that has ended may still have to be waited for
            if not tests.exists():
                break
            time.sleep(0.1)
        assert not tests.exists()
    finally:
        mpirun.stop(process)
