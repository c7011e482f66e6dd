"""Reading a part from a file: what is asked for ahead, and errors; test_parallel_safetensors.py has the values."""

import pytest
import torch

from tplayers import Placement
from trainers.checkpoints import part_reader

WHOLE = torch.arange(64 * 2048, dtype=torch.float32).view(64, 2048)


def file_of(path, data):
    path.write_bytes(data)
    return path.open("rb")


@pytest.mark.parametrize("width", [part_reader.SHORT_ROW // 4, part_reader.SHORT_ROW // 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_rows_are_read_one_by_one_and_short_ones_with_their_neighbours(tmp_path, monkeypatch, width, dtype):
    """In both, each block of rows comes in order, so that the system can read ahead."""
    whole, read = WHOLE[:, : 4 * width].contiguous(), []
    monkeypatch.setattr(part_reader, "BLOCK", 5 * 4 * whole.shape[1])  # of which 64 rows are no multiple

    class Counted(part_reader.FileBytes):
        def read(self, target, start):
            read.append(("read", start, len(target)))
            super().read(target, start)

        def announce(self, start, size):
            read.append(("announce", start, size))
            super().announce(start, size)

    placement = Placement(tuple(whole.shape), dim=1, index=2, count=4)
    with file_of(tmp_path / "file", b"before" + whole.numpy().tobytes()) as file:
        out = torch.zeros(placement.local_shape, dtype=dtype)
        part_reader.fill_part(Counted(file.fileno(), tmp_path / "file", 6), whole.dtype, placement, out)
    assert torch.equal(out, placement.part(whole).to(dtype))
    row = 4 * whole.shape[1]
    reads = [(start, size) for kind, start, size in read if kind == "read"]
    if width * 4 >= part_reader.SHORT_ROW:
        assert reads == [(number * row + 2 * row // 4, row // 4) for number in range(64)]
        ahead = [(start, size) for kind, start, size in read if kind == "announce"]
    else:
        ahead = reads
    assert [start for start, _ in ahead] == [
        0,
        *(sum(size for _, size in ahead[: n + 1]) for n in range(len(ahead) - 1)),
    ]
    assert sum(size for _, size in ahead) == 64 * row and max(size for _, size in ahead) <= part_reader.BLOCK


def test_padding_alone_is_cleared_and_nothing_is_read_twice(tmp_path):
    """A vocabulary of 1000 rows, padded to 1024: the last of 4 ranks has 24 of 0."""
    whole, sizes = torch.randn(1000, 8), []
    placement = Placement((1000, 8), dim=0, index=3, count=4, padded=(1024, 8))

    class Counted(part_reader.FileBytes):
        def read(self, target, start):
            sizes.append(len(target))
            super().read(target, start)

    with file_of(tmp_path / "file", whole.numpy().tobytes()) as file:
        source = Counted(file.fileno(), tmp_path / "file", 0)
        for dtype in (torch.float32, torch.float16):
            out = torch.full(placement.local_shape, torch.nan, dtype=dtype)
            part_reader.fill_part(source, whole.dtype, placement, out)
            assert torch.equal(out, placement.part(whole).to(dtype)) and out._version
    assert sizes == [232 * 8 * 4] * 2


def test_a_file_that_ends_too_early_is_named(tmp_path):
    with file_of(tmp_path / "file", bytes(100)) as file:
        source = part_reader.FileBytes(file.fileno(), tmp_path / "file", 0)
        source.announce(50, 100)  # only advice
        with pytest.raises(ValueError, match="file: ends at byte 100"):
            part_reader.fill_part(source, torch.float32, Placement((30,)), torch.zeros(30))
