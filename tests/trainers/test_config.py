"""Settings that depend on the device (what None stands for) or on other settings."""

import pytest
import torch

from commengine import UsageError
from trainers.config import bucket_size
from trainers.tasks.gpt import GPTTrainConfig


@pytest.mark.parametrize(
    ("device", "ranks", "size"),
    [("cpu", 2, 4_000_000), ("cpu", 512, 4_000_000), ("cuda", 8, 40_000_000), ("cuda", 64, 64_000_000)],
)
def test_buckets_are_larger_on_devices_and_on_many_ranks(device, ranks, size):
    assert bucket_size(GPTTrainConfig().ddp_bucket_size, torch.device(device), ranks) == size
    assert bucket_size(5000, torch.device(device), ranks) == 5000


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"async_save": True}, "--async-save: needs --save DIR"),
        ({"keep_last": 2}, "--keep-last 2: needs --save DIR"),
        ({"keep_every": 5, "save": "d"}, "--keep-every 5: needs --keep-last N"),
        ({"keep_last": 0, "save": "d"}, "--keep-last 0: must be at least 1"),
        ({"keep_last": 1, "keep_every": 0, "save": "d"}, "--keep-every 0: must be at least 1"),
    ],
)
def test_which_checkpoints_are_kept_must_make_sense(settings, said):
    with pytest.raises(UsageError, match=said):
        GPTTrainConfig(mock_data=True, vocab_size=8, **settings).validate(1)
