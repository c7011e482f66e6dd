"""The first tensor in which two checkpoints differ."""

import pytest
import torch
from safetensors.torch import save_file

from commengine import UsageError
from trainers.comparison.tensors import common_checkpoint, difference, differences


def checkpoint(folder, iteration, model, optimizer=None):
    path = folder / f"iter_{iteration:07d}"
    path.mkdir(parents=True)
    save_file(model, path / "model.safetensors")
    save_file(optimizer or {}, path / "optimizer.safetensors")
    (path / "state.json").write_text("{}")
    return path


def test_a_difference_says_where_and_how_much():
    one = torch.tensor([1.0, -0.0, 3.0])
    assert difference(one, one.clone()) == ""
    assert difference(one, torch.tensor([1.0, 0.0, 3.5])) == "2 of 3 elements, by at most 0.5"
    assert difference(one, torch.tensor([1.0, -0.0, torch.nan])) == "1 of 3 elements, by at most inf"
    assert difference(one, one.bfloat16()) == "is torch.float32 [3] and torch.bfloat16 [3]"
    assert difference(torch.tensor(0.0), torch.tensor(-0.0)) == "1 of 1 elements, by at most 0"


def test_parameters_come_first_and_in_their_order(tmp_path):
    model, moments = {"b": torch.ones(2), "a": torch.ones(3)}, {"exp_avg.a": torch.zeros(3)}
    one = checkpoint(tmp_path / "one", 1, model, moments)
    same = checkpoint(tmp_path / "same", 1, model, moments)
    other = checkpoint(tmp_path / "other", 1, {"b": torch.ones(2), "c": torch.ones(1)}, {"exp_avg.a": torch.ones(3)})
    assert list(differences(one, same)) == []
    assert list(differences(one, other)) == [
        "a: is in the first run only", "c: is in the second run only", "exp_avg.a: 3 of 3 elements, by at most 1",
    ]  # fmt: skip


def test_the_checkpoints_of_one_step(tmp_path):
    for folder, iterations in (("one", (2, 4, 6)), ("other", (1, 4, 6, 8)), ("apart", (3,))):
        for iteration in iterations:
            checkpoint(tmp_path / folder, iteration, {})
    one, other = tmp_path / "one", tmp_path / "other"
    for asked, iteration in ((None, 6), (1, 4), (4, 4), (5, 6), (7, 6)):
        found = common_checkpoint(one, other, asked)
        assert [path.name for path in found] == [f"iter_{iteration:07d}"] * 2
        assert [path.parent for path in found] == [one, other]
    assert common_checkpoint(one, tmp_path / "apart", None) is None
    for folder in (one, other):  # the numbers count, and not their digits
        for iteration in (9_999_999, 10_000_000):
            checkpoint(folder, iteration, {})
    for asked, iteration in ((None, 10_000_000), (9_999_999, 9_999_999), (10_000_000, 10_000_000), (7, 9_999_999)):
        assert [path.name for path in common_checkpoint(one, other, asked)] == [f"iter_{iteration:07d}"] * 2


def test_a_damaged_file(tmp_path):
    one, other = (checkpoint(tmp_path / name, 1, {"a": torch.ones(2)}) for name in ("one", "other"))
    (other / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(UsageError, match=r"model.safetensors of .* cannot be compared"):
        list(differences(one, other))
