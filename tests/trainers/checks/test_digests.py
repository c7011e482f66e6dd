"""Digests of tensors: the same however a tensor is split, and another for any change of a bit."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tplayers import Placement
from trainers.checks.digests import BITS, CHUNK, _of_text, tensor_sum

SHAPES = [((8,), 0), ((12, 5), 0), ((12, 8), 1), ((3 * CHUNK // 8, 8), 0)]


def whole_sum(tensor, view=()):
    return tensor_sum(tensor, Placement(tuple(tensor.shape), view=view))


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("shape", "dim"), SHAPES, ids=str)
def test_the_parts_add_up_to_the_whole(shape, dim, dtype, count):
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    placed = [Placement(shape, dim=dim, index=index, count=count) for index in range(count)]
    total = sum(tensor_sum(one.part(whole), one) for one in placed)
    assert (total - whole_sum(whole)) % 2**64 == 0


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("shape", "view", "dim"), [((6, 8), (), 1), ((6, 8), (6, 2, 4), 1), ((8, 6), (2, 4, 6), 0)])
def test_a_matrix_that_lies_transposed(shape, view, dim, count):
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for index in range(count):
        one = Placement(shape, view=view, dim=dim, index=index, count=count)
        part = one.part(whole).contiguous()
        turned = part.t().contiguous().t()
        assert not turned.is_contiguous() and tensor_sum(turned, one) == tensor_sum(part, one)


@pytest.mark.parametrize("padded", [(), (3, 10, 5)])
def test_parts_that_are_no_blocks(padded):
    """As of a fused weight, in which each of three blocks is split; and with padding, which counts as nothing."""
    whole = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))
    shape = {"view": (3, 8, 5), "dim": 1, "padded": padded}
    found = [
        sum(
            tensor_sum(one.part(whole), one)
            for one in (Placement((24, 5), index=index, count=count, **shape) for index in range(count))
        )
        for count in (1, 2)
    ]
    assert (found[0] - found[1]) % 2**64 == 0


class Copies(TorchFunctionMode):
    """Counts the copies to the host."""

    count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.Tensor.cpu
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("padded", [(), (3, 10, 5)])
def test_a_part_on_a_device_is_read_once(padded):
    """The factors lie on the host."""
    one = Placement((24, 5), view=(3, 8, 5), dim=1, padded=padded)
    part = one.part(torch.randn(24, 5, generator=torch.Generator().manual_seed(0)))
    with Copies() as copies:
        tensor_sum(part, one)
    assert copies.count == 1


def test_every_bit_and_every_place_counts():
    whole = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    found = {whole_sum(whole)}
    for number in range(whole.numel()):
        for bit in (0, 22, 31):
            changed = whole.clone()
            changed.view(-1).view(torch.int32)[number] ^= -(2**31) if bit == 31 else 1 << bit
            found.add(whole_sum(changed))
    assert len(found) == 1 + 3 * whole.numel()
    rows = whole[torch.tensor([1, 0, 2, 3, 4, 5])]
    assert whole_sum(rows) not in found and whole_sum(whole.t().contiguous().view(6, 4)) not in found
    assert whole_sum(torch.tensor([0.0])) != whole_sum(torch.tensor([-0.0]))


def test_digests_are_numbers_that_json_keeps():
    assert 0 <= _of_text("a") < 2**BITS and _of_text("a") != _of_text("b")
