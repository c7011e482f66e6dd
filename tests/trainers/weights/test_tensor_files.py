"""The weight files of a folder: which are read, and how damaged, missing and hostile ones are refused."""

import contextlib
import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trainers.checkpoints.part_reader import bytes_of
from trainers.weights.tensor_files import open_tensors

A, B = torch.arange(6.0).view(2, 3), torch.arange(5.0).to(torch.bfloat16)


def values(folder):
    """Every tensor of the folder, read in two pieces."""
    found = {}
    with contextlib.ExitStack() as files:
        for name, one in open_tensors(folder, files).items():
            found[name] = torch.empty(one.shape, dtype=one.dtype)
            flat = found[name].view(-1).view(torch.uint8)
            half = len(flat) // 2
            one.source.read(bytes_of(flat[half:]), half)
            one.source.read(bytes_of(flat[:half]), 0)
    return found


def index(folder, name, **where):
    (folder / f"{name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def whole(folder):
    save_file({"a": A, "b": B}, folder / "model.safetensors")
    torch.save({"a": A + 1}, folder / "pytorch_model.bin")  # not read: safetensors win


def shards(folder):
    save_file({"a": A}, folder / "one.safetensors")
    save_file({"b": B, "c": A}, folder / "two.safetensors")  # c is not in the index
    index(folder, "model.safetensors", a="one.safetensors", b="two.safetensors")


def pickled(folder):
    torch.save({"a": A.t().contiguous().t(), "b": torch.cat([B, B])[:5]}, folder / "pytorch_model.bin")


def old(folder):
    torch.save({"a": A, "b": B}, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def pickled_shards(folder):
    torch.save({"a": A}, folder / "one.bin")
    torch.save({"b": B}, folder / "two.bin")
    index(folder, "pytorch_model.bin", a="one.bin", b="two.bin")


@pytest.mark.parametrize("write", [whole, shards, pickled, old, pickled_shards])
def test_every_kind_of_file(tmp_path, write):
    write(tmp_path)
    found = values(tmp_path)
    assert found.keys() == {"a", "b"} and torch.equal(found["a"], A) and torch.equal(found["b"], B)


class Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def hostile(folder):
    torch.save({"a": A, "b": Hostile(folder / "made")}, folder / "pytorch_model.bin")


def hostile_old(folder):
    torch.save(Hostile(folder / "made"), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def cut(folder):
    pickled(folder)
    file = folder / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-100])


def cut_old(folder):
    old(folder)
    file = folder / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-4])


def no_names(folder):
    torch.save([A], folder / "pytorch_model.bin")


def no_tensor(folder):
    torch.save({"a": A, "b": 3}, folder / "pytorch_model.bin")


def elsewhere(folder):
    index(folder, "model.safetensors", a="../one.safetensors")


def no_index(folder):
    (folder / "model.safetensors.index.json").write_text("[]")


def missing_shard(folder):
    shards(folder)
    (folder / "two.safetensors").unlink()


def not_there(folder):
    shards(folder)
    index(folder, "model.safetensors", a="one.safetensors", b="one.safetensors")


def cut_shard(folder):
    shards(folder)
    file = folder / "two.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (hostile, "pytorch_model.bin: refused, because it asks for .*mkdir"),
        (hostile_old, "pytorch_model.bin: refused, because it asks for .*mkdir"),
        (cut, "pytorch_model.bin: damaged"), (cut_old, "pytorch_model.bin: damaged"),
        (no_names, "pytorch_model.bin: holds no tensors by their names"),
        (no_tensor, "pytorch_model.bin: b is no tensor"),
        (elsewhere, "model.safetensors.index.json: no index of shards"),
        (no_index, "model.safetensors.index.json: no index of shards"),
        (missing_shard, "two.safetensors: there is no such file, and model.safetensors.index.json names it"),
        (not_there, "one.safetensors: lacks b"), (cut_shard, "two.safetensors: .*its header says"),
        (lambda folder: None, "has no model.safetensors, no pytorch_model.bin, and no index"),
    ],
)  # fmt: skip
def test_bad_files_are_refused_by_name(tmp_path, write, said):
    write(tmp_path)
    with pytest.raises(ValueError, match=said) as raised:
        values(tmp_path)
    assert re.match(re.escape(str(tmp_path)), str(raised.value)) and "\n" not in str(raised.value)
    assert not (tmp_path / "made").exists()  # nothing was executed


def test_the_hostile_file_is_one(tmp_path):
    """It would make a folder in a reader that executes it."""
    torch.save({"a": Hostile(tmp_path / "made")}, tmp_path / "file")
    torch.load(tmp_path / "file", weights_only=False)
    assert (tmp_path / "made").is_dir()


def test_files_are_closed(tmp_path):
    whole(tmp_path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with contextlib.ExitStack() as files:
        open_tensors(tmp_path, files)
    (tmp_path / "model.safetensors").unlink()
    cut_after_one = tmp_path / "shards"
    cut_after_one.mkdir()
    cut_shard(cut_after_one)
    with pytest.raises(ValueError, match=r"two\.safetensors"), contextlib.ExitStack() as files:
        open_tensors(cut_after_one, files)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["meta", "nested"])
def test_a_tensor_without_values_or_shape_is_refused(tmp_path, kind):
    odd = torch.empty(2, device="meta") if kind == "meta" else torch.nested.nested_tensor([A, A[:1]])
    torch.save({"a": A, "odd": odd}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: odd is no tensor"), contextlib.ExitStack() as files:
        open_tensors(tmp_path, files)
