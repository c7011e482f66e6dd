"""The command ``commengine``: its list, its errors, and the start of each command as ``python -m`` starts it."""

import importlib
import json
import os
import sys
import tomllib
from pathlib import Path

import pytest

import commengine
from commengine.command.entry import list_modules, run
from commengine.command.table import COMMANDS, GROUPS
from tests.support import mpirun

TOP = Path(commengine.__file__).parent.parent
ALONE = [sys.executable, "-m", "commengine"]

#: asks each command for its help, each in a fork of this process, which has no torch
HELPS = """
import contextlib, io, json, os, sys
from commengine.command.entry import run
from commengine.command.table import COMMANDS
import commengine.options.declared, trainers.settings.commands  # what most of them need
for words in ([], ["--help"], ["train", "--help"], *([*one.split(), "--help"] for one in COMMANDS)):
    reader, writer = os.pipe()
    if not os.fork():
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            try:
                status = run(words)
            except SystemExit as ended:
                status = ended.code or 0
        heavy = sorted({"torch", "numpy", "mpi4py"} & set(sys.modules))
        with os.fdopen(writer, "w") as answer:
            json.dump([" ".join(words), status, heavy, out.getvalue()], answer)
        os._exit(0)
    os.close(writer)
    print(os.fdopen(reader).read())
    os.wait()
"""


def test_the_entry_point_of_the_project_is_this_function():
    name = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]["scripts"]["commengine"]
    module, _, function = name.partition(":")
    assert getattr(importlib.import_module(module), function) is run


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_the_list_has_all_commands_in_their_groups(words, capsys):
    assert run(words) == 0
    text = capsys.readouterr().out
    places = [text.index(f"{title}:\n") for title in GROUPS]
    assert places == sorted(places)
    assert [text.count(f"  commengine {name} ") for name in COMMANDS] == [1] * len(COMMANDS)
    assert all(len(line) <= 130 for line in text.splitlines())


def test_commands_of_two_words_are_listed_by_the_first(capsys):
    assert run(["train", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines] == [["commengine", "train", kind] for kind in ("gpt", "bert", "t5")]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("doktor", "doktor: there is no such command (is doctor meant?)"),
        ("doktor --json x", "doktor: there is no such command (is doctor meant?)"),
        ("preprocess_data", "preprocess_data: there is no such command (is preprocess-data meant?)"),
        ("pretrain_gpt", "pretrain_gpt: there is no such command (is train gpt meant?)"),
        ("gpt", "gpt: there is no such command (is train gpt meant?)"),
        ("tain gpt", "tain: there is no such command (is train meant?)"),
        ("--hepl", "--hepl: there is no such command (is --help meant?)"),
        ("train", "train: a second word is missing; valid: train gpt, train bert, train t5"),
        ("train bertt", "train bertt: there is no such command (is train bert meant?)"),
        ("train --bf16", "train: a second word is missing; valid: train gpt, train bert, train t5"),
        ("train nothing", "train nothing: there is no such command; commengine train --help lists all"),
        ("xyzzy", "xyzzy: there is no such command; commengine lists all"),
        ("a\nb", "a b: there is no such command; commengine lists all"),
    ],
)
def test_a_wrong_word_is_one_line_that_names_the_nearest(words, says, capsys):
    assert run(words.split(" ")) == 2
    captured = capsys.readouterr()
    assert captured.err == f"commengine: error: {says}\n" and captured.out == ""


@pytest.mark.parametrize("package", ["bench", "trainers"])
def test_a_package_lists_its_own(package, capsys):
    names = [one.module for one in COMMANDS.values() if one.module.startswith(f"{package}.")]
    assert list_modules(package, []) == 0
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines()] == names
    assert list_modules(package, [names[0]]) == 0
    assert capsys.readouterr().out.startswith(f"python -m {names[0]}: ")
    wrong = names[0].removeprefix(f"{package}.")[:-1]
    assert list_modules(package, [wrong]) == 2
    error = capsys.readouterr().err
    assert error == f"python -m {package}: error: {wrong}: there is no such command (is {wrong}{names[0][-1]} meant?)\n"


def test_a_command_that_is_not_installed_is_one_line(monkeypatch, capsys):
    """A wheel has no bench.contest."""
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run(["contest"]) == 2
    assert capsys.readouterr().err.startswith("commengine: error: bench.contest is not installed")


@pytest.mark.slow
def test_no_help_imports_torch_and_each_is_that_of_its_module():
    """One process asks for all of them, so that this takes seconds."""
    words = [sys.executable, "-c", HELPS]
    done = mpirun.command(words, 120, env={"COLUMNS": "100", "PMI_SIZE": "4"})  # launch.run would refuse that size
    assert (done.returncode, done.stderr) == (0, "")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [words for words, *_ in found] == ["", "--help", "train --help", *(f"{name} --help" for name in COMMANDS)]
    for words, status, heavy, text in found:
        assert (status, heavy) == (0, []), words
        listed = COMMANDS.get(words.removesuffix(" --help"))
        if listed is not None:
            name = listed.module.rpartition(".")[2]
            assert text.startswith((f"usage: python -m {listed.module} ", f"usage: {name} ")), words


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["doctor", "--help"], 0, "usage: python -m bench.doctor "),
        (["train", "bert", "--help"], 0, "usage: pretrain_bert "),
        (["rollcall", "nothing.py"], 2, "error: nothing.py"),
        (["rollcall", "PROGRAM"], 7, "argument"),
        (["supervise", "--ranks", "2"], 2, "error: "),
    ],
)
def test_a_command_ends_as_its_module_does(words, status, says, tmp_path):
    (tmp_path / "program.py").write_text("import sys; print('argument'); sys.exit(7)")
    words = [str(tmp_path / "program.py") if word == "PROGRAM" else word for word in words]
    listed = COMMANDS.get(" ".join(words[:2])) or COMMANDS[words[0]]
    rest = words[len(listed.words.split()) :]
    ways = (["-m", "commengine", *words], ["-m", listed.module, *rest])
    ours, theirs = (mpirun.command([sys.executable, *way], 60, cwd=tmp_path) for way in ways)
    assert (ours.returncode, ours.stdout, ours.stderr) == (theirs.returncode, theirs.stdout, theirs.stderr)
    assert ours.returncode == status and says in ours.stdout + ours.stderr


@pytest.mark.slow
def test_a_module_runs_under_the_console_script_as_under_python_m(tmp_path):
    """Its arguments, its name, its ``__main__`` and the modules of the working directory; and its exit status."""
    bin_, work = tmp_path / "bin", tmp_path / "work"
    bin_.mkdir()
    work.mkdir()
    (work / "mine").mkdir()
    (work / "mine" / "__init__.py").write_text("import sys; print(sys.argv[:1])\n")
    (work / "mine" / "part.py").write_text(
        "import sys, mine, beside\n"
        "main = vars(sys.modules['__main__'])\n"
        "print(sys.argv[1:], sys.argv[0] == __file__, __name__, __spec__.name, main is globals())\n"
        "sys.exit(9)\n"
    )
    (work / "beside.py").touch()
    script = bin_ / "commengine"  # as pip writes it, with one more command
    script.write_text(
        "import sys\nfrom commengine.command import entry, table\n"
        "table.COMMANDS['mine'] = table.Listed('mine', 'mine.part', '')\nsys.exit(entry.run())\n"
    )
    ways = ([str(script), "mine", "a", "--b"], ["-m", "mine.part", "a", "--b"])
    ours, theirs = (mpirun.command([sys.executable, *way], 60, cwd=work) for way in ways)
    assert ours.returncode == theirs.returncode == 9, ours
    assert ours.stdout == theirs.stdout == "['-m']\n['a', '--b'] True __main__ mine.part True\n"


@pytest.mark.slow
def test_under_a_launcher_the_first_rank_alone_speaks():
    for words, status, out, err in (
        ([], 0, 1, 0), (["doctr"], 2, 0, 1), (["doctor", "--help"], 0, 1, 0), (["train", "gpt", "--help"], 0, 1, 0),
        (["conformance", "--help"], 0, 1, 0), (["compare", "--help"], 0, 1, 0),
    ):  # fmt: skip
        done = mpirun.run(2, "-m", "commengine", *words, fresh=True)
        assert done.returncode == status, done
        marks = {"Begin here", "usage: ", "commengine: error: "}
        assert sum(done.stdout.count(mark) for mark in marks) == out, done
        assert sum(done.stderr.count(mark) for mark in marks) == err, done


@pytest.mark.slow
def test_a_command_runs_on_every_rank():
    done = mpirun.run(2, "-m", "commengine", "doctor", "--seconds", "0")
    assert done.returncode == 0, done
    assert done.stdout.startswith("# Doctor\n") and done.stdout.count("# Doctor\n") == 1
    assert "| ranks | 2 on 1 host |" in done.stdout


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    process = mpirun.start(ALONE, stdout=writer, stderr=mpirun.subprocess.PIPE)
    os.close(writer)
    assert process.communicate(timeout=60)[1] == "" and process.returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("commengine co", {"collectives", "compare", "conformance", "contest", "convert"}),
        ("commengine train ", {"gpt", "bert", "t5", "-h", "--help"}),
        ("commengine train gpt --tensor-", {"--tensor-model-parallel-size"}),
        ("commengine generate --dtype b", {"bfloat16"}),
        ("commengine collectives --operations all_r", {"all_reduce"}),
    ],
)
def test_a_shell_completes_commands_and_their_options(line, offered, tmp_path):
    pytest.importorskip("argcomplete")
    told = tmp_path / "told"
    asked = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9", "_ARGCOMPLETE": "1"}
    asked |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(told), "_ARGCOMPLETE_IFS": "\n"}
    done = mpirun.command(ALONE, 60, env=asked)
    assert done.returncode == 0, done
    assert {word.strip() for word in told.read_text().split("\n")} == offered
