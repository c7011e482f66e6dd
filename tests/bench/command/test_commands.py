"""Every command of bench: its help, what it needs to answer it, and its errors in one line."""

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import bench
from commengine.command.table import of_package

TOP = Path(bench.__file__).parent
#: the file of each command: a module at the top, or the __main__.py of a folder
FILES = {path.stem: path for path in TOP.glob("[!_]*.py")} | {
    path.parent.name: path for path in TOP.glob("*/__main__.py")
}
COMMANDS = sorted(FILES)
#: commands that need several ranks, and an error of each that is found before anything is measured
ON_RANKS = {
    "collectives": ["--warmup", "0"],
}
ALONE = {
    "predict": ["--model", "1.2b", "--gpus", "0"],
}
#: makes any import of torch.distributed by this process's modules an error; torch's own are there already
WITHOUT_DISTRIBUTED = """
import runpy, sys, torch
class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("torch.distributed", "cupy")) and name not in sys.modules:
            frame = sys._getframe(1)
            while frame and "importlib" in frame.f_code.co_filename:
                frame = frame.f_back
            if "/torch/" not in frame.f_code.co_filename:
                raise ImportError(f"{name} is imported by {frame.f_code.co_filename}")
sys.meta_path.insert(0, Forbidden())
for command in sys.argv[1:]:
    print("=====", command)
    sys.argv = [command, "--help"]
    try:
        runpy.run_module(f"bench.{command}", run_name="__main__")
    except SystemExit as ended:
        assert not ended.code, (command, ended.code)
    mpi = sys.modules.get("mpi4py.MPI")
    assert mpi is None or not mpi.Is_initialized(), command
"""


def name_of(command):
    return f"bench.{command}.__main__" if FILES[command].stem == "__main__" else f"bench.{command}"


#: the one command that runs others, in its own process and on its own ranks
RUNS_OTHERS = {"study": ("replay", "step")}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_parser_and_imports_no_other_command(command):
    tree = ast.parse(FILES[command].read_text(encoding="utf-8"))
    assigned = [node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)]
    values = {node.targets[0].id: node.value.value for node in assigned}
    assert values["COMMAND"] == f"bench.{command}"
    assert {"parser", "main"} <= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert isinstance(tree.body[-1], ast.If) and ast.unparse(tree.body[-1].test) == "__name__ == '__main__'"
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = {f"{node.module}.{alias.name}" for node in imported for alias in node.names}
    names |= {str(node.module) for node in imported}
    others = names & {f"bench.{other}" for other in COMMANDS if other != command}
    assert others == {f"bench.{other}" for other in RUNS_OTHERS.get(command, ())}


@pytest.mark.slow
def test_help_needs_no_mpi_no_gpu_and_no_torch_distributed():
    """One process asks all commands in turn, because each start of a process imports torch again."""
    wrong_launcher = {"PMI_SIZE": "4"}  # launch.run would refuse it
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_DISTRIBUTED, *COMMANDS], env={**os.environ, **wrong_launcher},
        capture_output=True, text=True, check=False, cwd=Path(bench.__file__).parents[1],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers = dict(part.split("\n", 1) for part in done.stdout.split("===== ")[1:])
    assert list(answers) == COMMANDS
    for command, text in answers.items():
        assert text.startswith(f"usage: python -m bench.{command} "), command
        assert command in ("gpu", "contest", "conformance") or "--output FILE" in text, command


@pytest.mark.parametrize("command", ALONE)
def test_errors_of_a_command_of_one_process_are_one_line(command, capsys):
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name_of(command)).main(ALONE[command])
    captured = capsys.readouterr()
    assert ended.value.code == 2 and captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith(f"python -m bench.{command}: error: ")


@pytest.mark.mpi
@pytest.mark.parametrize("command", ON_RANKS)
def test_errors_of_a_command_of_several_ranks_are_the_same_on_all(command, mpi_world):
    from commengine import Communicator, UsageError

    option, value = ON_RANKS[command]
    with Communicator(mpi_world) as world, pytest.raises(UsageError, match=f"^{option} {value}.*: (must|there is no) "):
        importlib.import_module(name_of(command)).main(world, ON_RANKS[command])


def test_gpu_studies_say_in_one_line_that_there_is_none(capsys):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    from bench import gpu

    assert set(gpu.STUDIES) - {"losses"} == set(gpu.ON_GPU)
    for study in gpu.ON_GPU:
        with pytest.raises(SystemExit) as ended:
            gpu.main([study])
        (line,) = capsys.readouterr().err.splitlines()
        assert ended.value.code == 2
        assert line == f"python -m bench.gpu: error: {study}: needs a CUDA device, and torch sees none"


def test_there_are_at_most_20_commands():
    assert len([*of_package("bench"), *of_package("trainers")]) <= 20


def test_names_that_stand_apart_from_torch_are_those_of_the_modules_that_need_it():
    from bench import gpu
    from bench.gpu_study.options import LINES
    from bench.prediction import flags, layout
    from bench.step_study.options import WRITTEN
    from bench.traces import formats
    from bench.transports import names, peer_process, variants
    from trainers import presets

    assert (*variants.TRANSPORTS, *peer_process.PEERS) == names.TRANSPORTS
    assert sorted(layout.MODELS) == [*flags.MODELS]
    assert (flags.LIST, flags.RESERVE_GB) == (presets.LIST, presets.RESERVE_GB)
    assert tuple(formats.WRITTEN) == WRITTEN and WRITTEN[0] == formats.DEFAULT
    assert {name: str(study.__doc__).splitlines()[0] for name, study in gpu.STUDIES.items()} == LINES
