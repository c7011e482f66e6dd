"""A built wheel holds every module, and every file that a module reads beside itself."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("commengine", "tplayers", "trainers", "bench")
#: what pip reads to build the project
PROJECT = ("pyproject.toml", "README.md", "LICENSE")
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


@pytest.mark.slow
def test_wheel_holds_all_modules_and_their_data(tmp_path):
    pytest.importorskip("setuptools", "77", reason="the build back end, setuptools 77 or newer, is not installed")
    source, wheels = tmp_path / "source", tmp_path / "wheels"
    source.mkdir()
    for name in PROJECT:
        shutil.copy(ROOT / name, source)
    for name in PACKAGES:  # a build leaves folders beside its source
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(wheels)], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(wheels / done.stdout.split()[-1]) as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    kinds = {".py", ".yaml", ".json", ".html", ".jinja", ".css", ".js", ".sh", ".typed", ".c", ".cpp", ".h", ".f90"}
    files = [path.relative_to(ROOT) for name in PACKAGES for path in (ROOT / name).rglob("*") if path.suffix in kinds]
    left_out = [("bench", name) for name in ("results", "contest", "emulator")]
    expected = {path.as_posix() for path in files if path.parts[:2] not in left_out}
    assert {"bench/clusters/dgx-2h.yaml", "bench/gpu.sh", "bench/peers/models.py"} <= expected
    assert held == expected
