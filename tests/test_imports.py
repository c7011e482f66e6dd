"""What may import what, read from the syntax tree of every file, and MPI started by none of them."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ORDER = ("bench", "trainers", "tplayers", "commengine")  # each may import those after it
PEERS = "bench/peers/"  # what we are measured against: the only place for torch.distributed
DISTRIBUTED = ("torch.distributed", "torch._C._distributed", "torch.nn.parallel.DistributedDataParallel")
IMPORTERS = ("importlib.import_module", "import_module", "__import__", "pytest.importorskip", "importorskip")

FILES = sorted(path.relative_to(ROOT).as_posix() for name in ORDER for path in (ROOT / name).rglob("*.py"))


def names(tree: ast.AST, package: str = "") -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all that a file imports, or reaches through what it imported.

    package: the package that the file is in, for relative imports.
    """
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
                top = alias.name.split(".")[0]
                aliases[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            yield node.lineno, base
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
                aliases[alias.asname or alias.name] = f"{base}.{alias.name}"
    for node in ast.walk(tree):  # t = torch; also through any number of names
        if isinstance(node, ast.Assign) and (value := dotted(node.value, aliases)):
            aliases.update({target.id: value for target in node.targets if isinstance(target, ast.Name)})
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := dotted(node, aliases)):
            yield node.lineno, name
        elif isinstance(node, ast.Call) and node.args:
            called, first = dotted(node.func, aliases), node.args[0]
            if called in IMPORTERS and isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield node.lineno, first.value
            elif called == "getattr" and (name := dotted(first, aliases)):
                yield from ((node.lineno, f"{name}.{a.value}") for a in node.args[1:2] if isinstance(a, ast.Constant))


def dotted(node: ast.AST, aliases: dict[str, str]) -> str:
    """``t.distributed`` as ``torch.distributed`` where t is torch; "" for what is not a dotted name."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, node.id if node.id in ("getattr", *IMPORTERS) else "")
    if isinstance(node, ast.Attribute) and (base := dotted(node.value, aliases)):
        return f"{base}.{node.attr}"
    return ""


def within(name: str, *modules: str) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def faults(path: str, source: str) -> list[str]:
    """What the file at ``path``, relative to the repository, does that it may not."""
    tree = ast.parse(source)
    package = path.split("/")[0]
    found = []

    def fault(line: int, what: str) -> None:
        if (text := f"{path}:{line}: {what}") not in found:
            found.append(text)

    above = ORDER[: ORDER.index(package)]
    folder = ".".join(Path(path).parts[:-1])
    for line, name in names(tree, folder):
        if within(name, *above, "tests"):
            fault(line, f"{package} imports {name.split('.')[0]}, which stands above it")
        if package == "commengine" and within(name, "torch.nn"):
            fault(line, "commengine knows no torch.nn")
        if within(name, "cupy", "cupy_backends") and path != "commengine/device/nccl.py" and not path.startswith(PEERS):
            fault(line, "only commengine/device/nccl.py imports cupy")
        if (name.startswith(DISTRIBUTED)) and not path.startswith(PEERS):
            fault(line, name)
        if within(name, "pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"):
            fault(line, f"{name}: reading such a file runs what it says")
    aliases = {node.names[0].asname: "torch" for node in ast.walk(tree) if _is_alias_of_torch(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and dotted(node.func, {"torch": "torch", **aliases}) == "torch.load":
            only = [keyword.value for keyword in node.keywords if keyword.arg == "weights_only"]
            if not (only and isinstance(only[0], ast.Constant) and only[0].value is True):
                fault(node.lineno, "torch.load without weights_only=True")
    return found


def _is_alias_of_torch(node: ast.AST) -> bool:
    return isinstance(node, ast.Import) and node.names[0].name == "torch" and bool(node.names[0].asname)


@pytest.mark.parametrize("path", FILES)
def test_file_imports_only_what_it_may(path: str):
    assert not faults(path, (ROOT / path).read_text(encoding="utf-8"))


def test_there_are_files_to_check():
    assert {path.split("/")[0] for path in FILES} >= {"trainers", "tplayers", "commengine"}


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed",
        "import torch.distributed as dist",
        "import torch.distributed.tensor",
        "from torch import distributed",
        "from torch import distributed as d",
        "from torch.distributed import all_reduce",
        "from torch.distributed.tensor import DTensor",
        "import torch\ntorch.distributed.init_process_group()",
        "import torch as t\nt.distributed.barrier()",
        "import torch\nt = torch\nt.distributed.barrier()",
        "import torch\ndef f():\n    return torch.distributed",
        "import torch\ngetattr(torch, 'distributed')",
        "import importlib\nimportlib.import_module('torch.distributed')",
        "import importlib as i\ni.import_module('torch.distributed')",
        "from importlib import import_module as load\nload('torch.distributed.fsdp')",
        "__import__('torch.distributed')",
        "import torch._C._distributed_c10d",
        "from torch._C import _distributed_c10d",
        "from torch._C._distributed_c10d import ProcessGroup",
        "import torch\ntorch._C._distributed_c10d",
        "from torch.nn.parallel import DistributedDataParallel",
        "import torch\ntorch.nn.parallel.DistributedDataParallel",
        "def f():\n    import torch.distributed",
    ],
)
def test_torch_distributed_is_caught_in_every_spelling(source: str):
    assert faults("trainers/x.py", source)
    assert faults("bench/x.py", source)
    assert not faults("bench/peers/x.py", source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("commengine/x.py", "import tplayers"),
        ("commengine/x.py", "from tplayers.gpt import GPT"),
        ("commengine/x.py", "from trainers import config"),
        ("commengine/x.py", "import bench.step"),
        ("tplayers/x.py", "import trainers.run.loop"),
        ("trainers/data/x.py", "from bench import step"),
        ("trainers/data/x.py", "import importlib\nimportlib.import_module('bench.step')"),
        ("tplayers/x.py", "import tests"),
        ("commengine/x.py", "import torch.nn"),
        ("commengine/x.py", "from torch import nn"),
        ("commengine/x.py", "import torch.nn.functional as F"),
        ("commengine/x.py", "import torch\ntorch.nn.Module"),
        ("commengine/host/transport.py", "import cupy"),
        ("commengine/host/transport.py", "from cupy.cuda import nccl"),
        ("trainers/x.py", "import cupy_backends.cuda"),
        ("trainers/x.py", "import pickle"),
        ("trainers/x.py", "from pickle import loads"),
        ("trainers/x.py", "import torch\ntorch.load('x')"),
        ("trainers/x.py", "import torch\ntorch.load('x', weights_only=False)"),
        ("trainers/x.py", "import torch as t\nt.load('x', map_location='cpu')"),
    ],
)
def test_fault_is_caught(path: str, source: str):
    assert len(faults(path, source)) >= 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("bench/x.py", "import trainers, tplayers, commengine"),
        ("tplayers/x.py", "from torch import nn\nfrom commengine import Communicator"),
        ("tplayers/x.py", "from . import regions\nfrom .regions import copy\nfrom tplayers import rng"),
        ("trainers/data/x.py", "from .. import config\nfrom ..config import Config\nfrom . import index"),
        ("commengine/device/nccl.py", "import cupy\nfrom cupy.cuda import nccl"),
        ("commengine/x.py", "'''Nothing here imports torch.distributed or torch.nn.'''\nimport torch"),
        ("trainers/x.py", "import torch\ntorch.load('x', weights_only=True)\ntorch.nn.Linear(1, 1)"),
        ("trainers/x.py", "distributed = 1\nload = open\nload('torch.distributed')"),
    ],
)
def test_what_is_allowed_is_not_a_fault(path: str, source: str):
    assert faults(path, source) == []


@pytest.mark.parametrize("package", ["commengine", "tplayers", "trainers"])
def test_import_starts_no_mpi(package: str):
    program = (
        "import mpi4py; mpi4py.rc.finalize = False\n"
        f"import {package}, sys\n"
        "mpi = sys.modules.get('mpi4py.MPI')\n"
        "print('started' if mpi and mpi.Is_initialized() else 'not started')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "not started\n"
