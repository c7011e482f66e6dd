"""bench.study on real ranks: within its time, stopped, going on, and killed; the page has the four answers."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from bench.command.start import progress
from bench.study import __main__ as study
from bench.study import sizes
from commengine import UsageError
from tests.bench.study.test_reporting import Page, check_stands_alone
from tests.support import mpirun
from tests.support.lab.hosts import emulated_hosts, why_not

TINY = [
    "--mock-data", "--vocab-size", "100", "--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "4",
    "--seq-length", "16", "--make-vocab-size-divisible-by", "128", "--micro-batch-size", "2",
    "--tensor-model-parallel-size", "2",
]  # fmt: skip
SHORT = ["--minutes", "0.001", "--max-bytes", "16K"]
UNITS = 6 * 3  # six operations at 4 B, 256 B and 16 KB: the sizes that are measured whatever the time


@pytest.fixture
def folder(mpi_world, tmp_path_factory):
    """A folder that is the same on all ranks."""
    return mpi_world.bcast(tmp_path_factory.mktemp("runs") / "study" if mpi_world.rank == 0 else None)


@pytest.fixture
def signals_again():
    """The signals do afterwards what they did before; a study ignores them when it has ended."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def contents(path):
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("signals_again")
def test_a_study_that_failed_goes_on_and_answers_four_questions(world, folder, monkeypatch, capfd):
    words = [str(folder), *SHORT, *TINY]
    measure, calls = sizes.measure_call, []

    def interrupted(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measure(*arguments, **options)

    monkeypatch.setattr(sizes, "measure_call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        study.main(world, words)
    if world.rank == 0:
        done = contents(folder / "collectives.json")["units"]
        assert len(done) == 2 and not (folder / "step.json").exists()
    with pytest.raises(UsageError, match="other settings"):
        study.main(world, [*words, "--micro-batch-size", "1"])
    calls.clear()
    monkeypatch.setattr(
        sizes, "measure_call", lambda *words, **options: calls.append(words) or measure(*words, **options)
    )
    assert study.main(world, words) == 0
    if world.rank == 0:
        assert len(calls) == UNITS - len(done)  # none is measured twice
        rows = contents(folder / "collectives.json")
        assert rows["units"][: len(done)] == done and len(rows["units"]) == UNITS
        assert len({(row["operation"], row["bytes"], row["transport"]) for row in rows["rows"]}) == len(rows["rows"])
        assert {row["transport"] for row in rows["rows"]} == {"engine", "mpi4py", "shared"}
        record, text = contents(folder / "study.json"), (folder / "report.html").read_text()
        questions = [one["question"] for one in record["answers"]]
        assert questions == [study.answers.COST, study.answers.WAYS, study.answers.SHARE, study.answers.MORE]
        page = Page(text)
        check_stands_alone(page)
        # On a busy machine no operation may have three sizes that may be compared.
        fits = bool(contents(folder / "model.json")["series"])
        assert (
            len(page.addresses) - text.count("<li><a ") == 2 + fits
        )  # pictures: the collectives, their fits, the step
        assert [text.index(one) for one in questions] == sorted(text.index(one) for one in questions)
        assert text.index(questions[-1]) < text.index("<nav>")  # the first screen
        heads = [one[0] for one in page.tables]
        phases = next(one for one in page.tables if one[0][0] == "phase")
        assert {"forward", "backward", "optimizer"} <= {line[0] for line in phases[1:]} and "time, ms" in phases[0]
        assert any(head[0] == "part" for head in heads)
        assert questions[0] in capfd.readouterr().out and record["spent_s"] > 0
        projected = record["numbers"]["projection"]
        if world.size == 2 and projected:  # tensor 2 x data 1 here, and 4, 32 and 256 replicas there
            assert [one["ranks"] for one in projected] == [8, 64, 512]
            assert all(one["step_s"] > one["waiting_s"] > 0 for one in projected)
        else:  # on a busy machine no series of the all-reduce may be a line
            assert world.size != 2 or record["answers"][-1]["answer"].startswith("No answer: ")
        stamp = (folder / "step.json").stat().st_mtime_ns
    also = {name: folder.with_name(f"also.{name}") for name in ("output", "json")}
    more = [word for name, path in also.items() for word in (f"--{name}", str(path))]
    assert study.main(world, [*words, *more]) == 0  # nothing is left to measure; the page is written anew
    if world.rank == 0:
        assert also["json"].read_text() == (folder / "study.json").read_text()
        assert also["output"].read_text() == (folder / "study.md").read_text()
        assert contents(folder / "collectives.json")["rows"] == rows["rows"]
        assert (folder / "step.json").stat().st_mtime_ns == stamp


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("signals_again")
def test_rows_that_are_not_known_well_are_measured_again_while_there_is_time(world, folder):
    """The first call leaves rows with few calls; the second one, with more time, measures these and no others."""
    if world.rank == 0:
        folder.mkdir()
    world.mpi.Barrier()
    path = folder / "collectives.json"
    about = {"command": "a test", "date": "", "hardware": "", "versions": {}}

    def run(which, seconds, bar):
        saved = []
        budget = sizes.Budget(0.0, seconds)
        which(sizes.Sweep(world, path, about, "float32", 64, budget, lambda: saved.append(1), bar))
        return len(saved), contents(path), budget.left

    with progress(world, 100, piped=True) as bar:
        run(sizes.Sweep.measure, 0.001, bar)
        world.mpi.Barrier()
        if world.rank == 0:
            found = contents(path)
            for row in found["rows"]:  # as if one operation had run out of time, and no other
                row["converged"] = row["operation"] != "broadcast"
                row.pop("disturbed", None)
            path.write_text(json.dumps(found))
        world.mpi.Barrier()
        assert run(sizes.Sweep.measure_again, 0.001, bar)[0] == 0  # there is no time
        before = contents(path)
        world.mpi.Barrier()
        count, after, left = run(sizes.Sweep.measure_again, 3.0, bar)
    assert before["units"] == after["units"] and "broadcast" in {unit[0] for unit in after["again"]}
    assert count == (sum(tries for *_, tries in after["again"]) if world.rank == 0 else 0)
    assert after["again"][0][0] == "broadcast"
    if {unit[0] for unit in after["again"]} == {"broadcast"}:  # else the machine's state changed meanwhile
        others = [[row for row in data["rows"] if row["operation"] != "broadcast"] for data in (before, after)]
        assert others[0] == others[1]
    assert len(after["rows"]) == len(before["rows"]) and len(after["other_rows"]) >= 3
    again = [row for row in after["rows"] if row["operation"] == "broadcast"]
    assert all(row["converged"] and row["iterations"] >= 20 for row in again) or left < 1
    assert all(row["state"] is None for row in after["rows"]) and "machine" in after["states"][0]


@pytest.mark.mpi
@pytest.mark.usefixtures("signals_again")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--minutes", "0"], "--minutes 0.0: must be"),
        (["--max-bytes", "1X"], "--max-bytes: '1X' is not a size"),
        (["--between-gb-per-s", "0"], "--between-gb-per-s 0.0: must be"),
        (["--num-layers", "0"], "--num-layers 0: "),
        (["--compile"], "--compile: "),
    ],
)
def test_bad_options_are_one_error_on_every_rank(world, folder, words, message):
    if world.size == 1:
        words, message = [], "a study needs 2 ranks or more"
    with pytest.raises(UsageError) as found:
        study.main(world, [str(folder), *TINY, *words])
    assert message in str(found.value)
    assert not folder.exists()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])
def test_a_rank_that_a_signal_ends_ends_all_and_the_study_goes_on(number, tmp_path):
    place = tmp_path / "study"
    words = ["-m", "bench.study", str(place), "--minutes", "0.05", "--max-bytes", "16K", *TINY]
    job = mpirun.start([mpirun.mpiexec(), "-n", "2", sys.executable, *words])
    rows = place / "collectives.json"
    deadline = time.monotonic() + 60
    while not rows.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    kept = contents(rows)["units"]
    found = mpirun.command(["pgrep", "-f", str(place)], timeout=10).stdout.split()
    ranks = [int(pid) for pid in found if Path(f"/proc/{pid}/exe").resolve().name.startswith("python")]
    os.kill(ranks[-1], number)
    status = job.wait(timeout=60)
    assert status == os.EX_TEMPFAIL if number == signal.SIGTERM else status != 0
    done = mpirun.run(2, *words, timeout=120)
    assert done.returncode == 0, done.stderr
    assert contents(rows)["units"][: len(kept)] == kept and len(contents(place / "study.json")["answers"]) == 4


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(why_not() is not None, reason=f"no emulated hosts: {why_not()}")
def test_a_study_on_two_hosts_scales_what_it_measured_between_them(tmp_path):
    place = tmp_path / "study"
    with emulated_hosts(2, 200, 2000) as hosts:
        done = hosts.run("-m", "bench.study", str(place), *SHORT, *TINY, timeout=100)
    assert done.returncode == 0, done
    rows = contents(place / "collectives.json")
    assert rows["start"] == "clock" and {row["transport"] for row in rows["rows"]} == {"engine", "mpi4py"}
    assert [one["transport"] for one in rows["skipped"]] == ["shared"]
    least = min(row["seconds"]["p50"] for row in rows["rows"] if row["operation"] == "all_reduce")
    record = contents(place / "study.json")
    assert "collectives as measured on these nodes, scaled as a ring's" in record["answers"][-1]["answer"]
    # A ring of 8 ranks has 7 times the steps of a ring of 2, each at least as long as the wire's delay.
    assert record["numbers"]["projection"][0]["all_reduce_s"] > 3 * least > 3 * 200e-6
