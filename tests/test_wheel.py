"""What a user installs: the wheel and the source distribution hold what they need, and the wheel has its types."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import commengine
from setup import readme

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("commengine", "tplayers", "trainers", "bench")
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
#: what stays out of a copy of the tree from which is built
LEFT_OUT = (".*", "__pycache__", "*.egg-info", "build", "dist", "site", "runs")
#: a program of somebody else, of which mypy --strict says nothing
PROGRAM = """
import torch

import tplayers
from commengine import Communicator, ProcessGrid, Stream, UsageError, Work, launch
from commengine.cost import Link, collective
from tplayers import GPT, GPTConfig, MLP, ColumnParallelLinear, RowParallelLinear, initialize


def main(world: Communicator) -> None:
    with ProcessGrid(world, tensor=world.size) as grid:
        side: Stream = world.new_stream(device="cpu")
        work: Work = world.all_reduce(torch.ones(4), "sum", stream=side)
        work.wait()
        layers: list[torch.nn.Module] = [ColumnParallelLinear(8, 16, grid.tensor)]
        layers.append(RowParallelLinear(16, 8, grid.tensor))
        sizes = GPTConfig(
            num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=16, max_position_embeddings=4
        )
        layers += [MLP(8, 32, world), GPT(sizes, grid.tensor)]
        initialize(layers[-1], seed=1)
        seconds: float = collective("all_reduce", "ring", 8.0, world.size).seconds(Link(1e-6, 1e-9))
        print(seconds, grid.data.size, tplayers.__name__)


try:
    launch.run(main)
except UsageError as error:
    print(error)
"""
#: lines of it that are wrong, in place of right ones
WRONG = (
    ('"sum", stream=side', '"sum", stream=3'),
    ("work.wait()", "work.wait(1, 2, 3)"),
    ("seconds: float", "seconds: str"),
    ("seed=1", 'seed="one"'),
    ("MLP(8, 32, world)", 'MLP("8", 32, world)'),
    ("ProcessGrid, Stream", "ProcessGrid, Nonsense, Stream"),
    ("world.size).seconds", "world.sise).seconds"),
)


def built(kind: str, folder: Path) -> Path:
    """The wheel or the source distribution that setuptools makes of a copy of the tree."""
    pytest.importorskip("setuptools", "77", reason="the build back end, setuptools 77 or newer, is not installed")
    source = folder / "source"  # a build leaves folders beside its source
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*LEFT_OUT), dirs_exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, f"build_{kind}", str(folder)], cwd=source, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / str(done.stdout.split()[-1])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return built("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.mark.slow
def test_wheel_holds_all_modules_and_their_data(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    kinds = {".py", ".yaml", ".json", ".html", ".jinja", ".css", ".js", ".sh", ".typed", ".c", ".cpp", ".h", ".f90"}
    files = [path.relative_to(ROOT) for name in PACKAGES for path in (ROOT / name).rglob("*") if path.suffix in kinds]
    left_out = [("bench", name) for name in ("results", "contest", "emulator")]
    expected = {path.as_posix() for path in files if path.parts[:2] not in left_out}
    assert {"bench/clusters/dgx-2h.yaml", "bench/gpu.sh", "bench/peers/models.py"} <= expected
    assert held == expected and {f"{name}/py.typed" for name in PACKAGES} <= held


@pytest.mark.long
def test_a_program_of_somebody_else_sees_the_types(wheel, tmp_path):
    """Mypy --strict takes it, and none of its wrong variants. The environment has the wheel and what it needs."""
    pytest.importorskip("mypy")
    place = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    packages = place / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def said(text: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "program.py").write_text(text)
        words = ["--strict", "--python-executable", str(place / "bin" / "python"), "program.py"]
        return subprocess.run(
            [sys.executable, "-m", "mypy", *words], cwd=tmp_path, capture_output=True, text=True, check=False,
            env=os.environ | {"MYPYPATH": ""},
        )  # fmt: skip

    done = said(PROGRAM)
    assert done.returncode == 0, done.stdout
    for right, wrong in WRONG:
        assert right in PROGRAM
        done = said(PROGRAM.replace(right, wrong))
        assert done.returncode == 1 and "Found 1 error" in done.stdout, (wrong, done.stdout)


@pytest.mark.slow
def test_source_distribution_holds_the_tests_and_the_documents(tmp_path):
    with tarfile.open(built("sdist", tmp_path)) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    folders = ("tests", "docs", "examples", "bench", *PACKAGES)
    for folder in folders:
        there = [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        missing = {path.relative_to(ROOT).as_posix() for path in there} - held
        assert not missing, sorted(missing)[:5]
    assert {"CHANGELOG.md", "Makefile", "constraints.txt", "LICENSE", "setup.py"} <= held
    assert not [name for name in held if name.startswith((".venv", ".git", "runs", "site"))]


def test_the_version_stands_once_for_users_and_once_for_packagers():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == commengine.__version__
    assert f"## [{project['version']}]" in (ROOT / "CHANGELOG.md").read_text()


def test_a_readme_for_a_package_index_has_no_relative_links():
    text = (ROOT / "README.md").read_text()
    plain, linked = readme(text, ""), readme(text, "https://example.org/blob/v1/")
    assert "](docs/" in text and "](docs/" not in plain and "](https://example.org/blob/v1/docs/" in linked
    assert plain.replace("](http", "").count("](") == plain.replace("](http", "").count("](#")
