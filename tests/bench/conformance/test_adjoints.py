"""Right operators are right, ten faulty ones are found, and a user's file is one more module."""

import json
import sys

import pytest

from bench.conformance.adjoints import main
from bench.conformance.adjoints_page import cell, page
from bench.conformance.checks import CHECKS
from bench.conformance.jobs import Answer
from commengine import UsageError
from tests.support import mpirun

FAULTY = "tests/jobs/faulty_operators.py"
#: by faulty operator, checks that find it
FOUND_BY = {
    "no reduce": "gradient", "factor of size": "gradient", "wrong neighbour": "gradient",
    "wrong order of uneven parts": "uneven", "in place": "gradient", "only contiguous": "strided",
    "wrong without rows": "no rows", "second is detached": "second", "right if ranks weigh equally": "gradient",
}  # fmt: skip
OWN = """
import torch
from bench.conformance.operator import Operator

class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return torch.from_numpy(sum(comm.allgather(x.detach().numpy())))

    @staticmethod
    def backward(ctx, grad):
        return Sum.apply(grad, ctx.comm), None

def operators(comm):
    return [Operator("sum", lambda x: Sum.apply(x, comm), lambda xs: [torch.stack(list(xs)).sum(0)] * len(xs))]
"""


def asked(*words, folder, ranks=2, timeout=100):
    """The exit status and the answers of a command, by operator and check; its output."""
    file = folder / "answers.json"
    command = [
        sys.executable,
        "-m",
        "bench.conformance",
        "adjoints",
        *words,
        "--ranks",
        str(ranks),
        "--json",
        str(file),
    ]
    done = mpirun.command(command, timeout)
    assert file.exists(), done.stderr
    found = [Answer(**one) for one in json.loads(file.read_text())["answers"]]
    return done.returncode, {(one.operator, one.check): one for one in found}, done.stdout


@pytest.mark.slow
def test_nine_faulty_operators_give_wrong_numbers(tmp_path):
    checks = [check for check in CHECKS if check in {"forward", *FOUND_BY.values()}]
    # On 3 ranks: on 2 the neighbours on both sides are one rank.
    status, found, text = asked(FAULTY, "--operators", *FOUND_BY, "--checks", *checks, folder=tmp_path, ranks=3)
    assert status == 1
    for operator, check in FOUND_BY.items():
        assert found[operator, check].answer == "WRONG", (operator, check)
        assert found[operator, "forward"].answer == "yes"
    for operator in ("wrong order of uneven parts", "only contiguous", "wrong without rows", "second is detached"):
        assert found[operator, "gradient"].answer == "yes", operator  # right but for its fault
    example = found["right if ranks weigh equally", "gradient"].example
    assert example["rows"] == [1, 1, 1] and example["columns"] == 1 and example["got"] != example["true"]
    assert "| no reduce | gradient | WRONG | 3 | each rank gives [1, 1]; gradient of rank " in text


@pytest.mark.long
@pytest.mark.slow
def test_an_operator_that_hangs_is_found_and_the_next_check_is_asked(tmp_path):
    checks = ["no grad", "twice"]
    status, found, _ = asked(
        FAULTY, "--operators", "hangs without requires_grad", "--checks", *checks, "--timeout", "2", folder=tmp_path
    )
    assert status == 1
    assert [found["hangs without requires_grad", check].answer for check in checks] == ["hangs", "yes"]


@pytest.mark.long
@pytest.mark.slow
def test_ours_are_right(tmp_path):
    names = ["broadcast", "all_gather", "scatter", "halo_exchange", "copy_to_tensor_parallel_region"]
    checks = [check for check in CHECKS if check != "gradcheck"]
    status, found, text = asked("tplayers", "--operators", *names, "--checks", *checks, folder=tmp_path)
    assert status == 0, text
    assert {one.answer for one in found.values()} <= {"yes", "-", "refused"}
    refused = {(one.operator, one.check) for one in found.values() if one.answer == "refused"}
    assert refused <= {("halo_exchange", "no grad")}  # it compares requires_grad, and says so


@pytest.mark.long
@pytest.mark.slow
def test_a_file_of_the_user_with_an_operator_of_its_own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    status, found, _ = asked(
        str(tmp_path / "own.py"), "--checks", "gradient", "gradcheck", "uneven", "second", folder=tmp_path
    )
    assert status == 0
    assert [found["sum", one].answer for one in ("gradient", "gradcheck", "uneven", "second")] == [
        "yes", "yes", "-", "yes",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["tplayer"], "MODULE tplayer: there is no such module; valid: tplayers, torch.distributed.nn"),
        (["no/such.py"], "MODULE no/such.py: there is no such module"),
        (["tplayers", "--checks", "guess"], "argument --checks: invalid choice: 'guess'"),
        (["tplayers", "--ranks", "0"], "--ranks 0"),
    ],
)
def test_errors_are_one_line(argv, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and message in line


@pytest.mark.long
@pytest.mark.slow
def test_an_operator_that_a_module_does_not_have_is_one_line():
    done = mpirun.command(
        [sys.executable, "-m", "bench.conformance", "adjoints", FAULTY, "--operators", "sum", "--ranks", "1"], 60
    )
    assert done.returncode == 2
    line = done.stderr.splitlines()[-1]
    assert "--operators sum: " in line and "it has no reduce, " in line


def test_the_page_names_ranks_where_answers_differ():
    answers = [Answer("m", "f", "gradient", ranks, answer) for ranks, answer in ((1, "-"), (2, "yes"), (3, "hangs"))]
    assert cell(answers) == "yes (2); hangs (3)"
    assert cell(answers[:2]) == "yes" and cell(answers[:1]) == "-"
    lines = page(answers, ["gradient"], {"mpi4torch": "not installed"})
    assert "| f | yes (2); hangs (3) |" in lines and "| f | gradient | hangs | 3 |  |" in lines
    assert lines[-3:] == ["## mpi4torch", "", "Not asked: not installed"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", 'it has no function "operators'), ("operators = 3", 'it has no function "operators'),
        ("def operators(comm): return None", "must return a list of"),
        ("def operators(comm): return [3]", "must return a list of"),
        ("def operators(comm): return []", "at least one"),
        (OWN, "--operators nosuch: .* has none of this name; it has sum"),
    ],
)  # fmt: skip
def test_a_file_without_operators_is_one_clear_error(text, message, tmp_path):
    from mpi4py import MPI

    from bench.conformance.job import found

    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UsageError, match=message):
        found({"module": str(tmp_path / "mine.py"), "operators": ["nosuch"]}, MPI.COMM_SELF)
