"""Private names of torch: each stands in one table, and without it the substitute serves or the error names it."""

import ast
import importlib
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from torch.utils import checkpoint

from commengine import torch_private
from commengine.torch_private import NAMES, MissingInTorch, private, watched_recomputation

ROOT = Path(__file__).resolve().parents[2]
#: private names outside the table, and why each is no danger
ALLOWED = {
    "torch.autograd.Variable._execution_engine": "looked up at import: a torch without it fails there, by name",
    "torch.autograd.forward_ad._current_level": "a number that changes: a torch without it fails at each look, by name",
    "torch._C._nn": "a place to look for functions, of which none need be there",
    "torch.ops.mkldnn._reorder_linear_weight": "an operator: a torch without it fails at the call, by name",
    "torch.ops.mkldnn._linear_pointwise": "the same",
}
#: what proves our own figures is in no wheel
OURS = ("bench/peers/", "bench/contest/", "bench/emulator/")


def taken_away(monkeypatch, name):
    owner, _, last = name.path.rpartition(".")
    try:
        place = importlib.import_module(owner)
    except ImportError:
        place = torch
        for part in owner.split(".")[1:]:
            place = getattr(place, part)
    monkeypatch.delattr(place, last)


def dotted(node):
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def private_names(source):
    """The private names of torch in a source: attributes of torch, and imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found = [f"{node.module}.{one.name}" for one in node.names]
        elif isinstance(node, ast.Attribute):
            name = dotted(node)
            for known, whole in (("forward_ad", "torch.autograd.forward_ad"), ("F", "torch.nn.functional"),
                                 ("checkpoint", "torch.utils.checkpoint")):  # fmt: skip
                name = name.replace(f"{known}.", f"{whole}.", 1) if name.startswith(f"{known}.") else name
            found = [name] if name.startswith("torch.") else []
        else:
            continue
        yield from (one for one in found if any(p.startswith("_") and not p.startswith("__") for p in one.split(".")))


def test_no_other_file_names_a_private_name_of_torch():
    assert list(private_names("import torch\nfrom torch.utils._x import y\ntorch._a(torch.b)")) == [
        "torch.utils._x.y", "torch._a"
    ]  # fmt: skip
    left = set(ALLOWED)
    for package in ("commengine", "tplayers", "trainers", "bench"):
        for path in (ROOT / package).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            if name == "commengine/torch_private.py" or name.startswith(OURS):
                continue
            for one in private_names(path.read_text()):
                known = next(
                    (allowed for allowed in ALLOWED if allowed.startswith(one) or one.startswith(allowed)), None
                )
                assert known, f"{path}: {one}: put it into commengine/torch_private.py"
                left.discard(known)
    assert not left


@pytest.mark.parametrize("name", [one for one in NAMES.values() if one.instead is None], ids=lambda one: one.path)
def test_without_a_substitute_the_call_names_torch_and_the_use(name, monkeypatch):
    assert name.found() is not name._missing
    taken_away(monkeypatch, name)
    with pytest.raises(MissingInTorch, match=f"torch {torch.__version__[:3]}.* has no {name.path}, which .* needs"):
        name.found()()


@pytest.mark.parametrize("name", [one for one in NAMES.values() if one.instead is not None], ids=lambda one: one.path)
def test_a_substitute_serves(name, monkeypatch):
    if name.path != "torch._C._cuda_getCurrentRawStream" or torch.version.cuda:  # which a CPU build has not
        assert name.found() is not name.instead
        taken_away(monkeypatch, name)
    assert name.found() is name.instead


def test_substitutes_do_the_same():
    pair = namedtuple("pair", "a b")
    tree = {"x": [1, (2, 3)], "y": pair(4, [5])}
    for name, words in (("tree_map", (lambda one: one * 2, tree)), ("tree_leaves", (tree,))):
        assert private(name)(*words) == NAMES[name].instead(*words)
    torch.manual_seed(0)
    many = [torch.randn(3), torch.randn(2, 2), torch.randn(0)]
    for name, words in (
        ("_foreach_norm", ()),
        ("_foreach_mul_", (3.0,)),
        ("_foreach_copy_", ([one + 1 for one in many],)),
    ):
        mine, theirs = [one.clone() for one in many], [one.clone() for one in many]
        found, other = NAMES[name].instead(mine, *words), private(name)(theirs, *words)
        for one, two in zip(found or mine, other or theirs, strict=True):
            torch.testing.assert_close(one, two)
    for count in (private("_increment_version"), NAMES["_increment_version"].instead):
        before = many[0]._version
        count((many[0],))
        assert many[0]._version == before + 1


def test_a_recomputation_is_seen_or_the_torch_is_refused(monkeypatch):
    """Whether or not gradients are followed; and a torch that calls another function is noticed at once."""
    found = []
    with watched_recomputation(found.append), torch.no_grad():
        found.clear()
        checkpoint.checkpoint(torch.clone, torch.ones(3), use_reentrant=False)
    assert any(isinstance(one, torch.Tensor) and one.numel() == 3 for one in found[0])
    monkeypatch.setattr(torch_private, "RECOMPUTATION", ("_no_such_name",))
    with pytest.raises(MissingInTorch, match="which a trace that must see recomputations needs"):
        watched_recomputation(found.append).__enter__()
    checkpoint.checkpoint(torch.clone, torch.ones(3), use_reentrant=False)
    assert len(found) == 1
