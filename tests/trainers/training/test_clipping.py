"""The norm of flat gradients: in stretches on the host, whole on a device, and accurate on both."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from trainers.training.clipping import STRETCH, exact_gradient_norm, gradient_norm, summands
from trainers.training.layout import Treatment
from trainers.training.reduction import GradientSegment

ALONE = SimpleNamespace(all_reduce=lambda tensor, op="sum": None)
BILLION = 1_200_000_000


def flat(*tensors):
    """Stretches of flat buffers, every second one of parameters that are split."""
    return [GradientSegment(Treatment(True, n % 2 == 1, False), stretch=one) for n, one in enumerate(tensors)]


def test_a_flat_gradient_is_one_summand_on_a_device_and_many_on_the_host():
    """A kernel is started for each few hundred tensors, and each tensor costs time on the host."""
    on_device = torch.empty(BILLION, dtype=torch.float32, device="meta")
    assert [part.shape for part in summands(on_device)] == [on_device.shape]
    parts = summands(torch.zeros(3 * STRETCH + 5))
    assert [len(part) for part in parts] == [STRETCH, STRETCH, STRETCH, 5]
    matrix = torch.zeros(STRETCH, 2)
    assert summands(matrix) == (matrix,)


def assert_accurate(device):
    """Of equal numbers rounding has one direction, and adds up; a float32 sum of 2**25 of them would be wrong."""
    count = 2**25
    found = gradient_norm(flat(torch.full((count,), 0.1, device=device), torch.full((7,), 0.1, device=device)), ALONE)
    assert found == pytest.approx(math.sqrt((count + 7) * float(torch.tensor(0.1)) ** 2), rel=1e-5)


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
