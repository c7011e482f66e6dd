"""Settings that depend on the device: what None stands for."""

import pytest
import torch

from trainers.config import bucket_size
from trainers.tasks.gpt import GPTTrainConfig


@pytest.mark.parametrize(
    ("device", "ranks", "size"),
    [("cpu", 2, 4_000_000), ("cpu", 512, 4_000_000), ("cuda", 8, 40_000_000), ("cuda", 64, 64_000_000)],
)
def test_buckets_are_larger_on_devices_and_on_many_ranks(device, ranks, size):
    assert bucket_size(GPTTrainConfig().ddp_bucket_size, torch.device(device), ranks) == size
    assert bucket_size(5000, torch.device(device), ranks) == 5000
