"""A package of an extra that is missing is one line, which names the extra, and no traceback."""

import re
import subprocess
import sys
import tomllib

import pytest

from commengine.command.extras import PACKAGES, missing, say_what_is_missing
from tests.support import mpirun

#: distributions whose packages have other names
IMPORTED = {"pyyaml": "yaml", "markdown-it-py": "markdown_it"}
WITHOUT = """
import importlib.abc, runpy, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
sys.argv = ["-m", *{words!r}]
import {top}
sys.argv[0] = {module!r}
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
"""


def test_the_table_has_what_pyproject_has():
    extras = tomllib.loads((mpirun.ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, packages in PACKAGES.items():
        names = [re.split(r"[<>=\\[]", one)[0].lower() for one in extras[extra]]
        assert sorted(IMPORTED.get(name, name) for name in names if name != "commengine") == sorted(packages)


def test_only_a_package_of_an_extra_has_a_line():
    assert missing(ModuleNotFoundError("no", name="yaml.nodes")) == (
        "yaml is not installed; pip install 'commengine[train]' brings it"
    )
    assert missing(ModuleNotFoundError("no", name="yaml"), "study").endswith("'commengine[study]' brings it")
    assert missing(ModuleNotFoundError("no", name="torch")) is None and missing(ValueError("yaml")) is None


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [("trainers.pretrain_gpt", "tokenizers", "train"), ("bench.predict", "pydantic", "study")],
)
def test_a_command_says_it_in_one_line(module, package, extra):
    program = WITHOUT.format(package=package, module=module, words=["--mock-data"], top=module.split(".")[0])
    done = subprocess.run([sys.executable, "-c", program], cwd=mpirun.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.endswith(f"error: {package} is not installed; pip install 'commengine[{extra}]' brings it")


def test_the_line_names_the_module_behind_a_word_of_commengine(monkeypatch, capsys):
    monkeypatch.setattr(sys, "orig_argv", ["python", "/bin/commengine", "train", "gpt", "--mock-data"])
    monkeypatch.setattr(sys, "argv", ["-m", "--mock-data"])  # as while Python looks for the module
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    say_what_is_missing("train")
    sys.excepthook(ModuleNotFoundError, ModuleNotFoundError("no", name="yaml"), None)
    assert capsys.readouterr().err.startswith("python -m trainers.pretrain_gpt: error: yaml is not installed")
