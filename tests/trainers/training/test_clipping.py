"""The norm of gradients: in stretches on the host, whole on a device, and accurate on both."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from trainers.training.clipping import PIECE, STRETCH, exact_gradient_norm, gradient_norm, sum_of_squares
from trainers.training.layout import Treatment
from trainers.training.reduction import GradientSegment

ALONE = SimpleNamespace(all_reduce=lambda tensor, op="sum": None)


def flat(*tensors):
    """Stretches of flat buffers, every second one of parameters that are split."""
    return [GradientSegment(Treatment(True, n % 2 == 1, False), stretch=one) for n, one in enumerate(tensors)]


def test_parts_of_any_layout_and_dtype_are_those_of_float64():
    """Equal numbers too, of which rounding has one direction."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape, dtype=torch.float32):
        return torch.randn(shape, dtype=dtype, generator=generator)

    every = [
        drawn(), drawn(0), drawn(STRETCH - 1), drawn(STRETCH), drawn(3, STRETCH, 7).permute(2, 0, 1),
        drawn(999, 777).t(), drawn(1000, 1000)[:, ::3], drawn(7).expand(1000, 7), drawn(PIECE + 5),
        drawn(64, 32, 3, 3).contiguous(memory_format=torch.channels_last),
        drawn(999, 77, dtype=torch.complex64).conj().t(), drawn(999, 77, dtype=torch.float64),
        drawn(999, 77).half(), drawn(999, 77).bfloat16(),
        torch.full((1024, 1024), 0.1), torch.full((STRETCH - 1,), 0.7),
    ]  # fmt: skip
    expected = [float(one.abs().double().square().sum()) for one in every]
    for one, square in zip(every, expected, strict=True):
        assert float(sum_of_squares([one])) == pytest.approx(square, rel=1e-6)
    found = sum_of_squares(every)
    assert found.dtype == torch.float64 and float(found) == pytest.approx(sum(expected), rel=1e-6)


def assert_accurate(device):
    """Of equal numbers rounding has one direction, and adds up; a float32 sum of 2**25 of them would be wrong."""
    count = 2**25
    found = gradient_norm(flat(torch.full((count,), 0.1, device=device), torch.full((7,), 0.1, device=device)), ALONE)
    assert found == pytest.approx(math.sqrt((count + 7) * float(torch.tensor(0.1)) ** 2), rel=1e-6)


def test_the_norm_is_accurate_on_the_host():
    assert_accurate("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device, or not asked for with -m gpu")
def test_the_norm_is_accurate_on_a_device():
    assert_accurate("cuda")


class Copies(TorchFunctionMode):
    count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.Tensor.cpu
        return function(*args, **(kwargs or {}))


def test_the_sums_of_both_kinds_are_read_from_the_device_at_once():
    with Copies() as copies:
        assert gradient_norm(flat(torch.tensor([3.0]), torch.tensor([4.0])), ALONE) == 5.0
    assert copies.count == 1
    assert gradient_norm([], ALONE) == 0.0


def test_the_exact_norm_is_that_of_float64_however_the_gradient_is_cut():
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-30, 1e-3, 1.0, 1e30):
        whole = torch.randn(100_003, generator=generator) ** 3 * scale
        right = float(torch.linalg.vector_norm(whole.double()))
        found = {
            exact_gradient_norm(flat(*torch.split(whole[torch.randperm(len(whole), generator=generator)], size)), ALONE)
            for size in (len(whole), 32768, 999, 50_001)
        }
        assert len(found) == 1 and found.pop() == pytest.approx(right, rel=1e-9)


def test_the_exact_norm_of_special_gradients():
    zeros, one = torch.zeros(5), torch.tensor([3.0, 0.0])
    assert exact_gradient_norm(flat(zeros, zeros), ALONE) == 0 and exact_gradient_norm([], ALONE) == 0
    assert exact_gradient_norm(flat(one, torch.tensor([4.0])), ALONE) == 5
    for bad in (math.nan, math.inf, -math.inf):
        assert exact_gradient_norm(flat(one, torch.tensor([bad])), ALONE) == math.inf
    tiny = torch.tensor([1e-44, 0.0])
    assert exact_gradient_norm(flat(tiny), ALONE) == float(tiny[0])
