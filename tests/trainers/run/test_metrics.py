"""What a run writes for programs to read: JSON as everybody's parser knows it, whatever became of the loss."""

import itertools
import json
import math
import os
import signal
import sys

import pytest

from tests.support.full_disk import room_for
from trainers.checkpoints import run_folder
from trainers.run.metrics import AT_STOP, Metrics, read_rows, write_rows
from trainers.run.report import Report


def report_of(parameters, train_loss, validation_loss, unigram_entropy, **more):
    return Report(
        iteration=2, parameters=parameters, tensor_model_parallel_size=1, data_parallel_size=1, train_loss=train_loss,
        validation_loss=validation_loss, unigram_entropy=unigram_entropy, validation_tokens=8, tokens_per_second=100.0,
        communication=[], step_seconds=1.0, **more,
    )  # fmt: skip


def strictly(text):
    """The JSON value; NaN and Infinity, which Python reads and RFC 8259 does not have, are errors."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_full_disk_keeps_the_old_rows_and_nothing_else(tmp_path):
    write_rows(tmp_path / "metrics.jsonl", [{"iteration": 1}])
    with room_for(8), pytest.raises(OSError, match=r"metrics\.jsonl"):
        write_rows(tmp_path / "metrics.jsonl", [{"iteration": 1}, {"iteration": 2}])
    assert [path.read_text() for path in tmp_path.iterdir()] == ['{"iteration": 1}\n']


def test_a_loss_that_is_no_number_is_null(tmp_path):
    """An fp16 step whose forward pass overflowed is skipped, and has such a one."""
    metrics = Metrics(tmp_path, 0, 2, tensorboard=None, active=True)
    metrics.log({"iteration": 1, "lm_loss": float("nan"), "grad_norm": None})
    metrics.log({"iteration": 2, "lm_loss": 3.5, "grad_norm": float("inf")})
    metrics.close()
    rows = [strictly(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    expected = [
        {"iteration": 1, "lm_loss": None, "grad_norm": None},
        {"iteration": 2, "lm_loss": 3.5, "grad_norm": None},
    ]
    assert rows == metrics.rows == expected

    report = report_of(10, float("nan"), float("inf"), 4.0)
    report.save(tmp_path, metrics.rows, ["lm_loss"], "nats/token")  # the plot, too
    written = strictly((tmp_path / "report.json").read_text())
    assert (written["train_loss"], written["validation_loss"], written["unigram_entropy"]) == (None, None, 4.0)
    assert "training loss                  nan nats/token" in (tmp_path / "report.txt").read_text()


def test_a_report_that_is_cut_off_does_not_stand_beside_the_end_of_the_one_before(tmp_path, monkeypatch):
    report_of(10, 3.0, 3.0, 4.0).save(tmp_path, [], ["lm_loss"], "nats/token")
    monkeypatch.setattr("trainers.run.report._plot", lambda *_: 1 / 0)  # a kill in the second one
    with pytest.raises(ZeroDivisionError):
        report_of(10, 2.0, 2.0, 4.0).save(tmp_path, [], ["lm_loss"], "nats/token")
    assert run_folder.reported(tmp_path) is None


def test_a_model_that_is_worse_than_the_unigram_model_is_called_so():
    """The words come with the first loss above the unigram model's, and not with an equal one."""
    for loss, worse in ((6.25, True), (6.0, False), (5.5, False)):
        report = report_of(10, 5.0, loss, 6.0, token_loss=loss)
        text = report.text("nats/token")
        assert ("THE MODEL IS WORSE THAN THE UNIGRAM MODEL" in text) == worse
        assert f"the model is {abs(loss - 6):.4f} {'above' if worse else 'below'}" in text


def test_a_report_of_several_terms_says_so():
    report = report_of(10, 9.5, 9.25, None, token_loss=8.5)
    lines = report.text("nats/token").splitlines()
    assert "training loss               9.5000 nats (the last step, the sum of all terms)" in lines
    assert "held-out loss               9.2500 nats over 8 tokens, the sum of all terms" in lines


@pytest.mark.parametrize(
    ("parameters", "said"),
    [(832, "832"), (999, "999"), (1000, "1.0 k"), (25_440, "25.4 k"), (999_900, "999.9 k"), (999_960, "1.0 M"),
     (4_218_880, "4.2 M"), (999_960_000, "1.0 B"), (8_300_000_000, "8.3 B")],
)  # fmt: skip
def test_parameters_are_counted_in_a_unit_that_fits(parameters, said):
    report = report_of(parameters, 1.0, None, None)
    assert report.text("nats/token").startswith(f"2 steps, {said} parameters, tensor 1 x data 1\n")


DAMAGED = (
    b'{"iteration": 1, "lm_loss": 4.5}\n{"iteration": 2, "lm\xff_loss": 4.0}\n5\n{"iteration": 3, "lm_loss": 3.5}\n'
)
#: lines that are no rows, each between two that are
NO_ROWS = [
    b"\xff\xfe", b"", b"5", b"null", b"[1]", b"{}", b'"text"', b"[" * 20_000, b'{"iteration": "3"}',
    b'{"iteration": true}', b'{"iteration": -5}', b'{"iteration": 2.5}', b'{"iteration": 3, "lm_loss": "x"}',
    b'{"iteration": 3, "a": {"b": 1}}',
    b'{"iteration": 3, "lm_loss": NaN}', b'{"iteration": 3, "lm_loss": 1' + b"0" * 400 + b"}",
]  # fmt: skip


def test_damaged_rows_are_left_out_and_named(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(DAMAGED + b'{"iteration": 5, "lm_l')
    metrics = Metrics(tmp_path, 3, 9, tensorboard=None, active=True)
    metrics.log({"iteration": 4, "lm_loss": 2.5})
    metrics.close()
    assert [strictly(line) for line in path.read_text().splitlines()] == [
        {"iteration": 1, "lm_loss": 4.5}, {"iteration": 3, "lm_loss": 3.5}, {"iteration": 4, "lm_loss": 2.5},
    ]  # fmt: skip
    assert f"{path}: 2 damaged rows are left out (lines 2, 3)" in capsys.readouterr().err.replace("\n", "")
    assert metrics.has(3, "lm_loss") and not metrics.has(3, "validation_loss") and not metrics.has(2, "lm_loss")


@pytest.mark.parametrize("line", NO_ROWS, ids=lambda line: repr(line[:40]))
def test_what_is_no_row(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"iteration": 1}\n' + line + b'\n{"iteration": 2, "lm_loss": null}\n')
    assert read_rows(path) == ([{"iteration": 1}, {"iteration": 2, "lm_loss": None}], [2])


@pytest.mark.slow
def test_a_kill_while_the_rows_are_written_anew_loses_none(tmp_path):
    """The process is killed before every open, write, fsync and rename: the file has its old rows or its new ones."""
    path = tmp_path / "metrics.jsonl"
    rows = [{"iteration": number, "lm_loss": 4.5} for number in range(1, 400)]
    killed = []
    for call in range(1, 12):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        child = os.fork()
        if child == 0:
            calls = itertools.count(1)

            def die(frame, event, function, calls=calls, call=call):
                named = getattr(function, "__name__", "") in ("open", "pwrite", "fsync", "rename", "replace", "unlink")
                if event == "c_call" and named and next(calls) == call:
                    os.kill(os.getpid(), signal.SIGKILL)

            sys.setprofile(die)
            write_rows(path, rows[:200])
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert read_rows(path) in ((rows, []), (rows[:200], []))
        killed.append(os.WIFSIGNALED(status))
    assert killed == [True] * killed.index(False) + [False] * killed.count(False) and killed.index(False) >= 4


def test_a_row_that_cannot_be_written_is_a_problem_and_no_exception(tmp_path):
    metrics = Metrics(tmp_path, 0, 2, tensorboard=None, active=True)
    assert metrics.problem() is None
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    metrics.log({"iteration": 1, "lm_loss": 4.5})
    metrics.close()
    assert f"{tmp_path}/metrics.jsonl cannot be written: No space left on device" in metrics.problem()


def test_a_full_disk_under_tensorboard_ends_no_run(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    metrics = Metrics(tmp_path, 0, 100, tensorboard=tmp_path / "board", active=True)
    metrics._board._records.close()
    metrics._board._records._writer = open("/dev/full", "wb", buffering=0)  # noqa: SIM115, PTH123
    for iteration in range(1, 4):
        metrics.log({"iteration": iteration, "lm_loss": 4.5, "text": 1.0})
    metrics.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3 and metrics.problem() is None
    said = capsys.readouterr().err
    assert said.count("TensorBoard's files cannot be written; the run goes on without them") == 1


def test_the_first_of_the_largest_values_is_the_best(tmp_path):
    metrics = Metrics(None, 0, 50, tensorboard=None, active=True)
    assert metrics.best("validation_accuracy") is None
    for iteration, value in ((10, 0.5), (20, math.nan), (30, 0.8), (40, 0.8), (50, 0.9)):
        metrics.log({"iteration": iteration, "validation_accuracy": value})
    assert metrics.best("validation_accuracy") == (0.9, 50)
    assert metrics.best("validation_accuracy", before=50) == (0.8, 30)
    assert metrics.best("validation_accuracy", before=10) is None and metrics.best("loss") is None
    metrics.log({"iteration": 60, "validation_accuracy": 1.0, AT_STOP: 1})
    assert metrics.best("validation_accuracy") == (0.9, 50)
    metrics.close()
