"""Writing and reading global tensors in one file: the library's bytes, exact ranges, and errors that name the file."""

import itertools
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tplayers import Placement
from trainers.checkpoints import parallel_safetensors, part_reader
from trainers.checkpoints.disk import RangeWriter
from trainers.checkpoints.parallel_safetensors import read_layout


@pytest.fixture
def folder(world, tmp_path):
    """Rank 0's temporary folder, on all ranks."""
    return Path(world.mpi.bcast(str(tmp_path)))


def placed(rank, count):
    """Tensors that are split in every way: not at all, by rows, by columns, by heads; and of every awkward size."""
    split = {"index": rank, "count": count}
    return {
        "whole": (torch.float32, Placement((3, 5))),
        "rows": (torch.float32, Placement((8, 6), dim=0, **split)),
        "columns": (torch.bfloat16, Placement((7, 12), dim=1, **split)),
        "few rows": (torch.float32, Placement((1, 8), dim=1, **split)),
        "heads": (torch.float16, Placement((3 * 8, 5), dim=1, view=(3, 8, 5), **split)),
        "large columns": (torch.float32, Placement((130, 4096), dim=1, **split)),
        "large whole": (torch.float32, Placement((600, 700))),
        "padded heads": (torch.float16, Placement((3 * 5, 6), dim=1, view=(3, 5, 6), padded=(3, 8, 6), **split)),
        "padded rows": (torch.float32, Placement((6, 7), dim=0, view=(2, 3, 7), padded=(2, 4, 7), **split)),
        "padded columns": (torch.bfloat16, Placement((40, 6), dim=1, view=(40, 2, 3), padded=(40, 4, 4), **split)),
        "large padded columns": (torch.float32, Placement((130, 3000), dim=1, padded=(130, 4096), **split)),
        "scalar": (torch.float64, Placement(())),
        "empty": (torch.float32, Placement((0, 4))),
        "no rows": (torch.float32, Placement((0, 8), dim=1, **split)),
    }


def truth(described):
    """The global tensors, a function of their names."""
    return {
        name: torch.randn(placement.shape, generator=torch.Generator().manual_seed(number)).to(dtype)
        for number, (name, (dtype, placement)) in enumerate(described.items())
    }


def write(path, described, world):
    whole = truth(described)
    parts = [(name, described[name][1].part(one).contiguous()) for name, one in whole.items()]
    found = []
    with RangeWriter(path) as writer:
        for start, data in parallel_safetensors.ranges(described, parts, world):
            found.append((start, start + len(data)))
            writer.write(start, data)
    assert writer.problem is None
    return whole, found


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.every_size
@pytest.mark.parametrize("chunk", [parallel_safetensors.CHUNK, 100, 4096])
def test_the_file_is_the_librarys_and_every_rank_gets_its_parts(world, folder, monkeypatch, chunk):
    monkeypatch.setattr(parallel_safetensors, "CHUNK", chunk)
    monkeypatch.setattr(part_reader, "BLOCK", min(chunk, part_reader.BLOCK))
    monkeypatch.setattr(parallel_safetensors, "SHARED_FROM", 1000)
    described = placed(world.rank, world.size)
    whole, mine = write(folder / "ours", described, world)
    ranges = sorted(one for some in world.mpi.allgather(mine) for one in some)
    size = parallel_safetensors.file_size(described)
    assert [0, *(stop for _, stop in ranges)] == [*(start for start, _ in ranges), size]  # no gap, nothing twice
    world.barrier()
    found = load_file(folder / "ours")
    assert found.keys() == whole.keys() and all(torch.equal(found[name], whole[name]) for name in whole)
    if world.rank == 0:
        save_file(whole, folder / "theirs")
    world.barrier()
    for short in (1, 1 << 20):
        monkeypatch.setattr(part_reader, "SHORT_ROW", short)
        for file in ("ours", "theirs"):
            parts = dict(parallel_safetensors.read(folder / file, {name: p for name, (_, p) in described.items()}))
            for name, (dtype, placement) in described.items():
                assert parts[name].dtype == dtype and torch.equal(parts[name], placement.part(whole[name])), name
            placements = {name: p for name, (_, p) in described.items()}
            for other in (None, torch.float64):
                own = {n: torch.zeros(p.local_shape, dtype=other or dtype) for n, (dtype, p) in described.items()}
                for name, part in parallel_safetensors.read(folder / file, placements, into=own):
                    assert part is own[name] and torch.equal(part, parts[name].to(part.dtype)), name
                    assert part._version or not part.numel()  # what is computed from a weight may be kept
    world.barrier()


@pytest.mark.mpi
def test_a_rank_that_cannot_write_goes_on_with_the_exchanges(world, folder):
    """Otherwise the others would wait for it for ever."""
    described = placed(world.rank, world.size)
    path = folder if world.rank == world.size - 1 else folder / "file"  # a folder cannot be opened for writing
    parts = [(name, described[name][1].part(one).contiguous()) for name, one in truth(described).items()]
    with RangeWriter(path) as writer:
        for start, data in parallel_safetensors.ranges(described, parts, world):
            writer.write(start, data)
    assert (writer.problem is None) == (world.rank != world.size - 1)
    assert writer.problem is None or isinstance(writer.problem, IsADirectoryError)


def header(entries, body=b"", length=None):
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + body


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no safetensors file"), (b"\x01", "no safetensors file"), (header({}, length=1 << 62), "header"),
        (header(b"\xff{"), "header is damaged"), (header(b"[]"), "header is damaged"),
        (header(b"[" * 100_000), "header is damaged"), (header({"a": 5}, bytes(8)), "header is damaged"),
        (header({"a": ENTRY | {"dtype": "F33"}}, bytes(8)), "a is of dtype F33; valid: F64, F32"),
        (header({"a": ENTRY | {"dtype": ["F32"]}}, bytes(8)), "header is damaged"),
        (header({"a": ENTRY | {"shape": [-2]}}, bytes(8)), "header is damaged"),
        (header({"a": ENTRY | {"shape": [True, 2]}}, bytes(8)), "header is damaged"),
        (header({"a": ENTRY | {"data_offsets": [0, 4]}}, bytes(8)), "place of a"),
        (header({"a": ENTRY, "b": ENTRY}, bytes(8)), "place of b"),
        (header({"a": ENTRY}, bytes(7)), "has 76 bytes; its header says 77"),
        (header({"a": ENTRY}, bytes(9)), "its header says"),
        (header({"a": ENTRY | {"dtype": "I32"}}, bytes(8)), "torch.int32"),
        (header({"b": ENTRY}, bytes(8)), "lacks a; has unknown b"),
        (header({"a": ENTRY | {"shape": [1, 2]}}, bytes(8)), r"a is \[1, 2\], the model's is \[2\]"),
    ],
    ids=itertools.count(),
)  # fmt: skip
def test_a_damaged_file_is_an_error_with_its_name(tmp_path, data, said):
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(ValueError, match=f"file: .*{said}"):
        list(parallel_safetensors.read(tmp_path / "file", {"a": Placement((2,))}))


def test_metadata_of_other_programs_is_left_alone(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "file", metadata={"format": "pt"})
    file = os.open(tmp_path / "file", os.O_RDONLY)
    assert list(read_layout(file, tmp_path / "file")) == ["a"]
    os.close(file)
