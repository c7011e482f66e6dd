"""The rules of imports, folders and names, read from the syntax tree of every file; no import starts MPI."""

import ast
import functools
import graphlib
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ORDER = ("bench", "trainers", "tplayers", "commengine")  # each may import those after it
PEERS = "bench/peers/"  # what we are measured against: the only place for torch.distributed
DISTRIBUTED = ("torch.distributed", "torch._C._distributed", "torch.nn.parallel.DistributedDataParallel")
#: the rooms (files and folders) of each package, in tiers: a room may import rooms of the tiers before its own, and
#: nothing of its own tier or of a later one. "top" are the files at the top of a package that are not listed: its
#: commands, which may import each other
ROOMS = {
    "commengine": (
        {"errors"},
        {"files"},  # reading and writing what users name; checksums
        {"options"},  # of commands: flags and YAML of a dataclass
        {"mpi", "job_end", "dtypes", "decomposition", "torch_private"},
        {"agreement", "trace", "cost", "startup"},
        {"shared_memory"},  # windows and flags; knows no transport
        {"host"},  # MPI for host tensors
        {"timeout", "stream"},
        {"device"},  # NCCL, or MPI through the host
        {"operations"},  # a file each, from the public call to the wire
        {"calls"},  # chooses the way of a call, traces and watches it
        {"compiled_ops"},
        {"communicator"},
        {"grid", "cartesian", "copies", "launch", "rank_zero", "rollcall"},  # rollcall: runs any program
        {"command"},  # lists the commands of all packages by their names, and runs one
        {"__main__"},
    ),
    "tplayers": (
        {"formulas"},  # of a transformer: its size, memory, products and collectives, without a tensor
        {"host_copy", "checks", "adjoint_pair", "recompute", "dropout_kernel"},
        {"functions"},
        {"rng", "regions", "movement", "bridge"},  # bridge: to another program of the job
        {"placement", "cross_entropy", "distillation"},  # the losses of split logits
        {"linear", "norm", "context"},  # context: split along the sequence
        {"embedding", "attention", "mlp", "fields"},  # fields: split in space
        {"sharding"},  # a torch module becomes layers of fields
        {"experts"},  # many feed-forward blocks, of which each token has a few
        {"models"},
        {"canonical"},  # the same layers and models, with the same bits at every tensor-parallel size
        {"generation"},  # tokens from a model, one after the other
    ),
    "trainers": (
        {"megatron_flags", "presets"},  # answers to flags that we do not have; the paper's models
        {"settings"},  # of commands, and the rules about them; it imports no torch
        {"tokenizing"},  # a tokenizer with all that stands beside it
        {"data"},
        {"cleaning", "generation"},  # from texts to a corpus: filters, duplicates, held-out text; texts from a model
        {"pipeline"},  # in which order the stages of a model compute, and the messages between them
        {"training"},  # one step: a model, an objective and gradients; it knows no data and no files
        {"checkpoints"},
        {"weights"},  # models and tokenizers of other programs, read and written as checkpoints are
        {"checks"},  # of a run while it trains
        {"run"},
        {"comparison"},  # of two runs, bit by bit
        {"tasks"},  # a model with its objective and its batches, such as GPT
        {"trained"},  # the model of a run, from its checkpoint
        {"distillation"},  # a small model learns from a large one
        {"finetuning"},  # the tasks of section 5.3: files, samples, measures, predictions
        {"scoring"},  # log-likelihoods of text, and what follows from them
        {"supervision"},  # starting a command again; it reads the command's settings and its folder
        {"top"},
    ),
    "bench": (
        {"timing", "command", "clusters"},
        {"transports", "step_study", "prediction"},
        {"collective_study", "programs", "traces", "conformance"},
        {"peers", "gpu_study", "checkup", "report_page"},
        {"top"},
        {"study", "emulator"},
        {"contest"},  # what proves our own figures: a wheel does not have it
    ),
}
LARGEST_FOLDER = 16
IMPORTERS = ("importlib.import_module", "import_module", "__import__", "pytest.importorskip", "importorskip")

FILES = sorted(path.relative_to(ROOT).as_posix() for name in ORDER for path in (ROOT / name).rglob("*.py"))


def names(nodes: Sequence[ast.AST], package: str = "") -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all that a file imports, or reaches through what it imported.

    nodes: of its tree. package: the package that the file is in, for relative imports.
    """
    aliases: dict[str, str] = {}
    for node in nodes:
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
    for node in nodes:  # t = torch; also through any number of names
        if isinstance(node, ast.Assign) and (value := dotted(node.value, aliases)):
            aliases.update({target.id: value for target in node.targets if isinstance(target, ast.Name)})
    for node in nodes:
        if isinstance(node, ast.Attribute) and (name := dotted(node, aliases)):
            yield node.lineno, name
        elif isinstance(node, ast.Call) and node.args:
            called, first = dotted(node.func, aliases), node.args[0]
            if called in IMPORTERS and isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield node.lineno, first.value
            elif called == "getattr" and (name := dotted(first, aliases)):
                yield from ((node.lineno, f"{name}.{a.value}") for a in node.args[1:2] if isinstance(a, ast.Constant))


@functools.cache
def parsed(source: str) -> list[ast.AST]:
    """The nodes of a program's tree, its module first; three tests look at those of each file."""
    return list(ast.walk(ast.parse(source)))


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
    nodes = parsed(source)
    package = path.split("/")[0]
    found = []

    def fault(line: int, what: str) -> None:
        if (text := f"{path}:{line}: {what}") not in found:
            found.append(text)

    above = ORDER[: ORDER.index(package)]
    folder = ".".join(Path(path).parts[:-1])
    for line, name in names(nodes, folder):
        if within(name, *above, "tests"):
            fault(line, f"{package} imports {name.split('.')[0]}, which stands above it")
        if package == "commengine" and within(name, "torch.nn"):
            fault(line, "commengine knows no torch.nn")
        if within(name, "cupy", "cupy_backends") and not path.startswith(("commengine/device/", PEERS)):
            fault(line, "only commengine/device imports cupy")
        if (name.startswith(DISTRIBUTED)) and not path.startswith(PEERS):
            fault(line, name)
        if within(name, "pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"):
            fault(line, f"{name}: reading such a file runs what it says")
    aliases = {node.names[0].asname: "torch" for node in nodes if _is_alias_of_torch(node)}
    for node in nodes:
        if isinstance(node, ast.Call) and dotted(node.func, {"torch": "torch", **aliases}) == "torch.load":
            only = [keyword.value for keyword in node.keywords if keyword.arg == "weights_only"]
            if not (only and isinstance(only[0], ast.Constant) and only[0].value is True):
                fault(node.lineno, "torch.load without weights_only=True")
    return found


def _is_alias_of_torch(node: ast.AST) -> bool:
    return isinstance(node, ast.Import) and node.names[0].name == "torch" and bool(node.names[0].asname)


@pytest.mark.slow
def test_each_file_imports_only_what_it_may():
    assert [(path, found) for path in FILES if (found := faults(path, (ROOT / path).read_text(encoding="utf-8")))] == []


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


# Circles and rooms ---------------------------------------------------------------------------------------------------

MODULES = {".".join(Path(path).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}


def imports(path: str, source: str, modules: Mapping[str, object] = MODULES) -> set[str]:
    """The ``modules`` that the file at ``path`` imports, anywhere in it and for type checkers, too."""
    folder, found = list(Path(path).parts[:-1]), set()
    for node in parsed(source):
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else []
            imported = [".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names]
        else:
            continue
        for name in imported:
            while name and name not in modules:  # a class: its module
                name = name.rpartition(".")[0]
            found.add(name)
    return found - {"", ".".join(Path(path).with_suffix("").parts).removesuffix(".__init__")}


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """A circle of ``graph``, its first member again at the end; [] where there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(reversed(error.args[1]))  # the sorter's arrows go to the importer
    return []


def room(module: str) -> tuple[str, str]:
    """(package, room) of a module; the room is "" for the package's own ``__init__``."""
    package, _, rest = module.partition(".")
    listed = {name for tier in ROOMS[package] for name in tier}
    first = rest.partition(".")[0]
    top = first not in listed and "top" in listed and f"{package}/{first}.py" in FILES
    return package, "top" if top else first


def rooms_faults(graph: Mapping[str, set[str]]) -> list[str]:
    """Imports of a room that may not import the other one, and rooms that ROOMS does not list."""
    found = []
    for module, imported in sorted(graph.items()):
        package, mine = room(module)
        tiers = {name: number for number, tier in enumerate(ROOMS[package]) for name in tier}
        if mine and mine not in tiers:
            found.append(f"{module}: add {mine!r} to ROOMS[{package!r}]")
            continue
        for other in sorted(imported):
            theirs = room(other)
            if not mine or theirs[0] != package or theirs[1] == mine:
                continue
            if not theirs[1]:
                found.append(f"{module} imports the package {package} that it is part of")
            elif tiers.get(theirs[1], -1) >= tiers[mine]:
                found.append(f"{module} imports {other}, which stands beside or above it")
    return found


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """The modules that each module imports."""
    return {module: imports(path, (ROOT / path).read_text(encoding="utf-8")) for module, path in MODULES.items()}


@pytest.mark.slow
def test_no_circle_of_imports_those_for_types_included(graph: dict[str, set[str]]):
    assert not circle(graph), " imports ".join(circle(graph))


def test_rooms_import_only_rooms_below_them(graph: dict[str, set[str]]):
    assert not rooms_faults(graph), "\n".join(rooms_faults(graph))


def test_every_room_of_the_table_exists():
    existing = {room(module) for module in MODULES}
    assert {(package, name) for package, tiers in ROOMS.items() for tier in tiers for name in tier} <= existing


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from commengine.host.wire import MpiWire", {"commengine.host.wire"}),
        ("from commengine.host import wire", {"commengine.host.wire"}),
        ("from . import flags", {"commengine.shared_memory.flags"}),
        ("from .flags import Flags", {"commengine.shared_memory.flags"}),
        ("from commengine import Communicator", {"commengine"}),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from commengine.grid import A", {"commengine.grid"}),
        ("def f():\n    import commengine.trace", {"commengine.trace"}),
        ("import torch\nfrom numpy import array", set()),
    ],
)
def test_imports_are_found(source: str, expected: set[str]):
    assert imports("commengine/shared_memory/x.py", source) == expected


def test_a_circle_and_a_wrong_room_are_caught():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) in (
        ["a", "b", "c", "a"], ["b", "c", "a", "b"], ["c", "a", "b", "c"],
    )  # fmt: skip
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert rooms_faults({"commengine.host.wire": {"commengine.shared_memory.flags", "commengine.errors"}}) == []
    assert len(rooms_faults({"commengine.shared_memory.flags": {"commengine.host.wire"}})) == 1
    assert len(rooms_faults({"commengine.stream": {"commengine.timeout.watcher"}})) == 1
    assert len(rooms_faults({"commengine.stream": {"commengine"}})) == 1
    assert len(rooms_faults({"trainers.training.trainer": {"trainers.pretrain_gpt"}})) == 1
    assert len(rooms_faults({"commengine.another.room": set()})) == 1


# Folders and names ---------------------------------------------------------------------------------------------------


def test_no_folder_has_too_many_modules():
    folders = Counter(str(Path(path).parent) for path in FILES if not path.endswith("__init__.py"))
    assert not {folder: count for folder, count in folders.items() if count > LARGEST_FOLDER}


def test_no_two_public_classes_of_one_name():
    defined: dict[str, list[str]] = {}
    for path in FILES:
        for node in parsed((ROOT / path).read_text(encoding="utf-8"))[0].body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                defined.setdefault(node.name, []).append(path)
    assert not {name: paths for name, paths in defined.items() if len(paths) > 1}


@pytest.mark.slow
def test_import_starts_no_mpi():
    program = (
        "import mpi4py; mpi4py.rc.finalize = False\n"
        "import commengine, tplayers, trainers, sys\n"
        "mpi = sys.modules.get('mpi4py.MPI')\n"
        "print('started' if mpi and mpi.Is_initialized() else 'not started')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "not started\n"


@pytest.mark.slow
def test_tplayers_needs_torch_numpy_and_mpi4py_alone():
    """Every other library that pyproject.toml names, extras included, is missing for the program."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    names = {re.split(r"[^\w-]", one)[0].lower().replace("-", "_") for one in wanted}
    missing = sorted((names | {"yaml"}) - {"torch", "numpy", "mpi4py", "commengine"})
    assert {"tokenizers", "safetensors", "ftfy", "py3langid", "datasketch", "tqdm", "matplotlib"} <= set(missing)
    program = (
        "import importlib.abc, sys\n"
        "class Missing(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name.split('.')[0].lower() in {missing}:\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "import tplayers, commengine\n"
        "try:\n    import tokenizers\nexcept ModuleNotFoundError:\n    print('alone')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "alone\n"
