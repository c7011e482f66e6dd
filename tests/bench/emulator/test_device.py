"""The emulated device: shapes are torch's, times are those of the machine, and large results are not computed."""

import resource
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bench.emulator.device import EmulatedDevice
from bench.emulator.machine import EmulatedMachine

PLAIN = replace(
    EmulatedMachine.drawn(0, 1, 2),
    flops=1e12,
    half_flops=1e6,
    memory_rate=1e9,
    launch=1e-6,
    speed=(1.0, 1.5),
    noise=0.0,
)


def seconds(work, rank=0):
    device = EmulatedDevice(PLAIN, rank)
    with device:
        work()
    return device.seconds


def test_a_product_takes_its_flops_and_a_pass_its_bytes():
    left, right = torch.zeros(128, 256), torch.zeros(256, 64)
    assert seconds(lambda: left @ right) == pytest.approx(1e-6 + (2 * 128 * 256 * 64 + 1e6) / 1e12)
    assert seconds(lambda: left + left) == pytest.approx(1e-6 + 3 * 128 * 256 * 4 / 1e9)
    assert seconds(lambda: left.add_(left)) == pytest.approx(1e-6 + 3 * 128 * 256 * 4 / 1e9)


def test_a_slower_rank_takes_longer():
    x = torch.zeros(10_000)
    assert seconds(lambda: x * x, rank=1) == pytest.approx(1.5 * seconds(lambda: x * x))


def test_views_cost_nothing_and_small_tensors_are_real():
    x = torch.arange(6.0)
    with EmulatedDevice(PLAIN, 0) as device:
        assert x.view(2, 3).t().shape == (3, 2) and device.seconds == 0
        assert (x * 2).sum().item() == 30


def test_large_results_take_no_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with EmulatedDevice(PLAIN, 0):
        x = torch.zeros(1 << 15, 1 << 15)
        y = (x @ x).relu().add_(x)
        assert y.shape == (1 << 15, 1 << 15)  # 4 GB each
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kilobytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_results_are_zeros_in_memory_that_others_have_used(dtype):
    """A run's loss and its gradient's norm are sums over such results, and a trainer refuses any that is not finite."""
    written = [torch.full((rows, 1024), float("nan")) for rows in (2, 3, 4, 8, 30) for _ in range(30)]
    x = torch.ones(5, 1024, dtype=dtype)
    del written
    with EmulatedDevice(PLAIN, 0):
        found = [x + x for _ in range(100)] + [torch.empty(1024, 5, dtype=dtype).t() for _ in range(100)]
    assert not any(one.count_nonzero() or one.isnan().any() for one in found)


@pytest.mark.parametrize("fused", [False, True])
def test_a_training_step_runs_and_its_backward_takes_twice_its_forward(fused):
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.LayerNorm(2048), nn.Linear(2048, 512))
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    x = torch.zeros(256, 512, requires_grad=True)
    machine = replace(PLAIN, memory_rate=1e15, launch=0.0, half_flops=0.0)
    device = EmulatedDevice(machine, 0)
    with device:
        loss = F.mse_loss(model(x), torch.zeros(256, 512))
        forward = device.seconds
        loss.backward()
        backward = device.seconds - forward
        optimizer.step()
    assert forward == pytest.approx(2 * 2 * 256 * 512 * 2048 / 1e12, rel=0.01)
    assert backward == pytest.approx(2 * forward, rel=0.01)
    assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())
