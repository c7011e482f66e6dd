"""The files for those who pack and cite agree with pyproject.toml, and the sources keep what SECURITY.md promises."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
CODEMETA = json.loads((ROOT / "codemeta.json").read_text())
SPACK = ROOT / "packaging" / "spack" / "packages" / "py-commengine"
DEFINITIONS = sorted((ROOT / "packaging" / "apptainer").glob("*.def"))


def test_the_metadata_agree():
    assert CITATION["cff-version"] == "1.2.0" and CITATION["title"] == CODEMETA["name"] == PROJECT["name"]
    assert CITATION["version"] == CODEMETA["version"] == PROJECT["version"]
    assert CITATION["license"] == CODEMETA["license"].rpartition("/")[2] == PROJECT["license"]
    authors = [one["name"] for one in PROJECT["authors"]]
    assert authors == [one["name"] for one in CITATION["authors"]] == [one["name"] for one in CODEMETA["author"]]
    assert CITATION["abstract"].rstrip(".\n") == CODEMETA["description"] == PROJECT["description"]
    assert CITATION["keywords"] == CODEMETA["keywords"] == PROJECT["keywords"]
    assert CODEMETA["programmingLanguage"]["version"] == PROJECT["requires-python"]
    named = [Requirement(f"{one['name']}{one['version']}") for one in CODEMETA["softwareRequirements"]]
    assert named == [Requirement(one) for one in PROJECT["dependencies"]]
    released = re.search(
        rf"^## \[{re.escape(PROJECT['version'])}\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M
    )
    assert released and released[1] == str(CITATION["date-released"]) == CODEMETA["datePublished"]


def spack_range(wanted: SpecifierSet) -> str:
    """The range of Spack for a lower bound and a major version below which it must be: ``>=2.6,<3`` is ``@2.6:2``."""
    bounds = {one.operator: one.version for one in wanted}
    assert set(bounds) <= {">=", "<"}, wanted
    upper = str(int(bounds["<"]) - 1) if "<" in bounds else ""
    return f"@{bounds['>=']}:{upper}"


def recipe() -> tuple[ast.ClassDef, dict[str, dict[str, str]]]:
    """The class of the recipe, and the versions of Python packages that it depends on, by variant ("" is always)."""
    tree = ast.parse((SPACK / "package.py").read_text())
    found: dict[str, dict[str, str]] = {}

    def visit(node: ast.AST, variant: str) -> None:
        if isinstance(node, ast.With):
            for item in node.items:
                assert isinstance(item.context_expr, ast.Call)
                if ast.unparse(item.context_expr.func) == "when":
                    variant = ast.literal_eval(item.context_expr.args[0])
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) == "depends_on"
            and isinstance(node.args[0], ast.Constant)
        ):
            name, _, versions = re.fullmatch(r"([\w-]+)((@[\d.:]+)?).*", node.args[0].value).groups()
            assert not any(word.arg == "type" and word.value == "build" for word in node.keywords)
            if versions:
                found.setdefault(variant, {})[name.removeprefix("py-")] = versions
        for child in ast.iter_child_nodes(node):
            visit(child, variant)

    (described,) = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    visit(described, "")
    return described, found


def test_the_spack_package_has_the_dependencies_of_the_project():
    compile((SPACK / "package.py").read_text(), "package.py", "exec")
    described, found = recipe()
    wanted = {"": PROJECT["dependencies"]}
    for extra in ("train", "study"):  # an extra in an extra is required as a variant
        wanted[f"+{extra}"] = [
            one for one in PROJECT["optional-dependencies"][extra] if not one.startswith("commengine")
        ]
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    others = {"python": f"@{PROJECT['requires-python'].removeprefix('>=')}:"}
    others |= {one.name: spack_range(one.specifier) for one in map(Requirement, build)}
    for variant, requirements in wanted.items():
        mine = {one.name.lower(): spack_range(one.specifier) for one in map(Requirement, requirements)}
        assert found[variant] == mine | (others if variant == "" else {}), variant
    assert {"train", "study"} <= set(re.findall(r'variant\("(\w+)"', ast.unparse(described).replace("'", '"')))
    assert PROJECT["optional-dependencies"]["study"][0] == "commengine[train]"
    assert 'requires("+train", when="+study")' in (SPACK / "package.py").read_text()
    text = (SPACK / "package.py").read_text()
    assert f'version("{PROJECT["version"]}")' in text and f"commengine-{PROJECT['version']}.tar.gz" in text
    assert ast.get_docstring(described) == f"{PROJECT['description']}."
    assert {"test_program", "test_doctor"} <= {
        node.name for node in described.body if isinstance(node, ast.FunctionDef)
    }
    assert yaml.safe_load((SPACK.parents[1] / "repo.yaml").read_text())["repo"]["namespace"] == PROJECT["name"]


def test_the_smoke_test_is_the_program_of_the_readme():
    (shown,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    lines = (SPACK / "test" / "program.py").read_text().splitlines(keepends=True)
    assert "".join(line for line in lines if not line.startswith("# ")).strip() == shown.strip()


@pytest.mark.parametrize("path", DEFINITIONS, ids=lambda path: path.name)
def test_an_apptainer_definition_has_its_sections_and_files(path):
    text = path.read_text()
    sections = dict(re.findall(r"^%(\w+)\n(.*?)(?=^%|\Z)", text, re.M | re.S))
    assert set(sections) == {"arguments", "files", "post", "environment", "runscript", "test"}
    assert text.startswith("Bootstrap: docker\nFrom: debian:bookworm-slim\n")
    for name in ("post", "environment", "runscript", "test"):
        script = sections[name].replace("{{ extras }}", "study")
        done = subprocess.run(["sh", "-n"], input=script, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    extras = sections["arguments"].strip().removeprefix("extras=").split(",")
    assert set(extras) <= set(PROJECT["optional-dependencies"]) and ("mpich" in extras) == (path.name == "hybrid.def")
    (wheel, program) = (line.split()[0] for line in sections["files"].strip().splitlines())
    assert wheel == "dist/commengine-*.whl" and (ROOT / program).is_file()
    assert sections["post"].startswith("    set -e\n") and sections["test"].startswith("    set -e\n")


def test_the_scripts_are_bash_and_python():
    for path in (ROOT / "packaging").rglob("*.sh"):
        done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    checks = ROOT / "packaging" / "reframe"
    scope: dict[str, dict[str, list[dict[str, object]]]] = {}
    exec(compile((checks / "settings.py").read_text(), "settings.py", "exec"), scope)  # plain data
    (system,) = scope["site_configuration"]["systems"]
    environments = {one["name"] for one in scope["site_configuration"]["environments"]}
    assert [set(one["environs"]) for one in system["partitions"]] == [environments]
    modules = re.findall(r'\["-m", "([\w.]+)"', (checks / "commengine_checks.py").read_text())
    assert modules == ["bench.doctor", "bench.study"]
    for module in modules:
        done = subprocess.run(
            [sys.executable, "-c", f"import importlib.util as u; assert u.find_spec({module!r})"], cwd=ROOT, check=False
        )
        assert done.returncode == 0


def test_no_source_reads_what_could_run_code():
    """No pickle but with ``weights_only``, and no code beside a model."""
    files = [path for name in ("commengine", "tplayers", "trainers", "bench") for path in (ROOT / name).rglob("*.py")]
    loads = 0
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [one.name for one in node.names] + [getattr(node, "module", None)]
                assert not {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"} & set(names), path
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert {word.arg: ast.unparse(word.value) for word in node.keywords}["weights_only"] == "True", path
                loads += 1
            assert not (isinstance(node, ast.keyword) and node.arg == "trust_remote_code"), path
    assert loads >= 1
