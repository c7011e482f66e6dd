"""The norm of flat gradients: in stretches on the host, whole on a device, and accurate on both."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from trainers.training.clipping import STRETCH, gradient_norm, summands
from trainers.training.layout import Treatment
from trainers.training.reduction import GradientSegment

ALONE = SimpleNamespace(all_reduce=lambda tensor: None)
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
