"""The command: one line for a wrong one and for a launcher that is not there; its status. Real runs: tests/faults."""

import sys

import pytest

from trainers import supervise

GOOD = [
    "--ranks", "2", "--", "{program}", "-n", "{ranks}", "python", "-m", "trainers.pretrain_gpt", "--mock-data",
    "--vocab-size", "100", "--save", "{dir}", "--load", "{dir}", "--save-interval", "5",
]  # fmt: skip


def words(program, folder):
    return [word.replace("{program}", program).replace("{dir}", str(folder)) for word in GOOD]


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--ranks", "2"], "no command: give it after --"),
        (["--ranks", "2", "--"], "no command: give it after --"),
        (["--rank", "2", "--", "true"], "--rank"),
        (["--ranks", "two", "--", "true"], "--ranks two: must be numbers"),
        (["--", "true"], "must start python -m trainers.pretrain_gpt"),
    ],
)
def test_wrong_commands_are_one_line(argv, says, capsys):
    assert supervise.main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and says in line


def test_a_launcher_that_is_not_there_is_one_line(tmp_path, capsys):
    assert supervise.main(words("no-such-launcher", tmp_path)) == 2
    assert "error: the command after -- cannot be started" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("status, own", [(0, 0), (75, 75), (2, 2), (1, 1)])
def test_its_own_status(tmp_path, capfd, status, own):
    """The program in place of the launcher ends at once; a status of 1 is tried `--repeats` times."""
    program = tmp_path / "launcher"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nprint('started', sys.argv[1:3], flush=True)\nsys.exit({status})\n"
    )
    program.chmod(0o755)
    options = ["--repeats", "2", "--back-off", "0.01"]
    assert supervise.main([*options, *words(str(program), tmp_path)]) == own
    out, err = capfd.readouterr()
    assert out.splitlines() == ["started ['-n', '2']"] * (2 if status == 1 else 1)
    if status == 1:
        assert "the run crashed (status 1) before its first step; the newest checkpoint is of step 0" in err
        assert "2 times in a row: a restart does not help" in err


def launcher(folder, code):
    """A program of the shell in place of the launcher."""
    program = folder / "launcher"
    program.write_text(f"#!/bin/sh\n{code}\n")
    program.chmod(0o755)
    return str(program)


@pytest.mark.slow
def test_a_start_that_begins_no_step_counts_as_a_crash(tmp_path, capfd):
    """The program answers SIGTERM as ranks before their first step do."""
    program = launcher(tmp_path, "trap 'exit 75' TERM\necho started\nwhile :; do sleep 0.05; done")
    options = ["--repeats", "2", "--back-off", "0.01", "--start-minutes", "0.02"]
    assert supervise.main([*options, *words(program, tmp_path)]) == 1
    out, err = capfd.readouterr()
    assert out.splitlines() == ["started"] * 2
    assert "the run took too long to begin a step (--start-minutes) before its first step, 2 times in a row" in err


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [True, False])
def test_with_hosts_only_their_answers_make_it_smaller(tmp_path, capfd, hosts):
    program = launcher(tmp_path, 'echo "started $2"\nexit 1')
    options = ["--repeats", "2", "--back-off", "0.01"]
    command = [*words(program, tmp_path), "--global-batch-size", "4"]
    command[1] = "2,1"
    if hosts:
        options += ["--hosts", "a:1,b:1", "--probe", "true {host}"]
        command[command.index("python")] = "env HOSTS={hosts} python"
    assert supervise.main([*options, *command]) == 1
    assert capfd.readouterr().out.splitlines() == ["started 2"] * 2 + ([] if hosts else ["started 1"] * 2)


@pytest.mark.slow
def test_a_signal_while_the_hosts_are_asked_starts_nothing(tmp_path, capfd):
    program = launcher(tmp_path, "echo started")
    options = ["--hosts", "a:1,b:1", "--probe", "sh -c 'kill -TERM $PPID; sleep 0.2; test {host} != none'"]
    command = [*words(program, tmp_path), "--global-batch-size", "4"]
    command[1] = "2,1"
    command[command.index("python")] = "env HOSTS={hosts} python"
    assert supervise.main([*options, "--repeats", "1", *command]) == 75
    out, err = capfd.readouterr()
    assert out == "" and "SIGTERM came between two starts; started again, the run goes on" in err
