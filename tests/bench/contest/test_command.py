"""The one command of all contests: names, options, errors in one line, files and the exit status."""

import json

import pytest

from bench.contest import CONTESTS
from bench.contest import __main__ as command
from bench.contest.step import StepContest
from tests.bench.contest.stand_ins import program

SMALL = ["--vocab-size=8", "--hidden-size=8", "--num-layers=1", "--num-attention-heads=1", "--seq-length=4"]
#: options of each contest, and the error that they make
FAULTS = [
    ("step", ["--only", "horovod"], "--only horovod: there is no such name; valid: ours-tp2, ours-dp2, dtensor"),
    ("step", ["--masked-positions-only"], "--masked-positions-only: needs --model bert"),
    ("step", ["--model", "t5"], "argument --model: invalid choice: 't5' (choose from"),
    ("step", ["--steps", "0"], "--steps 0: must be at least 1"),
    ("step", ["--rounds", "0"], "--rounds 0: must be at least 1"),
    ("step", ["--json", "/no/where.json"], "--json /no/where.json: there is no folder /no"),
    ("generation", ["--num-attention-heads", "5"], "--num-attention-heads 5: must be even and divide --hidden-size"),
    ("generation", ["--lengths", "1", "9"], "--lengths 1: must be at least 2"),
    ("generation", ["--family", "llama", "--vllm", "/no/python"], "--vllm /no/python: must be an executable Python"),
    ("rivals", ["--output", "none/x.md"], "--output none/x.md: there is no folder none"),
    ("rivals", ["--operations", "sort"], "argument --operations: invalid choice: 'sort'"),
    ("rivals", ["--install", "nccl"], "argument --install: invalid choice: 'nccl'"),
    ("emulator", ["--seed", "-1"], "--seed -1"),
]
FAULTS_ON_RANKS = [
    ("mechanisms", ["--mechanisms", "pool"], "argument --mechanisms: invalid choice: 'pool'"),
    ("mechanisms", ["--rate", "0"], "--rate 0"),
    ("same_bits", ["--runs", "9"], "--runs 9: must be "),
]


@pytest.mark.parametrize(("name", "argv", "message"), FAULTS)
def test_errors_are_one_line(name, argv, message, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main([name, *argv])
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert ended.value.code == 2 and captured.out == ""
    assert line.startswith(f"python -m bench.contest {name}: error: ") and message in line


@pytest.mark.parametrize(("name", "argv", "message"), FAULTS_ON_RANKS)
def test_errors_of_contests_on_ranks(name, argv, message):
    with pytest.raises(ValueError) as raised:
        command.read(name, argv)
    assert message in str(raised.value)


def test_without_a_name_the_contests_are_listed(capsys):
    with pytest.raises(SystemExit):
        command.main(["--help"])
    told = capsys.readouterr().out
    assert all(f"  {name} " in told and line in told for name, line in CONTESTS.items())
    with pytest.raises(SystemExit) as ended:
        command.main(["step_contest"])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and "invalid choice: 'step_contest'" in line and line.startswith("python -m bench")


@pytest.mark.parametrize("name", CONTESTS)
def test_every_contest_has_its_help(name):
    text = command.parser(name).format_help()
    assert text.startswith(f"usage: python -m bench.contest {name} [-h]") and "--output FILE" in text
    assert f"bench.contest {name}" in command.import_module(f"bench.contest.{name}").__doc__


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("good", "error: losses of the first 4 steps differ by 5.00e-01 > 0.0001"),
        ("dies", "error: other: rank 1: connection closed"),
    ],
)
def test_the_status_is_1_where_losses_differ_or_a_program_fails(mode, message, monkeypatch, capsys, tmp_path):
    programs = [program("one"), program("other", 2, mode)]
    monkeypatch.setattr(StepContest, "contestants", lambda *_: programs)
    files = [f"--json={tmp_path / 'r.json'}", f"--output={tmp_path / 'r.md'}"]
    assert command.main(["step", *SMALL, "--rounds=1", "--steps=1", *files]) == 1
    captured = capsys.readouterr()
    assert message in captured.err and "one: warming up (good)" in captured.err
    assert ("| other | " in captured.out) == (tmp_path / "r.json").exists() == (mode == "good")
    if mode == "good":
        assert (tmp_path / "r.md").read_text() == captured.out and "- command: `python -m bench.contest step --v" in (
            captured.out
        )
        (case,) = json.loads((tmp_path / "r.json").read_text())["cases"]
        assert [row["name"] for row in case["rows"]] == ["one", "other"] and case["errors"]
