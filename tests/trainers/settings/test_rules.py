"""Settings that depend on the device (what None stands for) or on other settings."""

import pytest
import torch

from commengine import UsageError
from trainers.finetuning.completing import shape
from trainers.finetuning.settings import FinetuneSettings
from trainers.settings import derived
from trainers.settings.commands import GPTSettings
from trainers.settings.rules import require_valid
from trainers.tasks.fitting import require_split
from trainers.tasks.gpt import GPTTask


@pytest.mark.parametrize(
    ("device", "ranks", "size"),
    [("cpu", 2, 4_000_000), ("cpu", 512, 4_000_000), ("cuda", 8, 40_000_000), ("cuda", 64, 64_000_000)],
)
def test_buckets_are_larger_on_devices_and_on_many_ranks(device, ranks, size):
    assert derived.bucket_size(GPTSettings().ddp_bucket_size, torch.device(device), ranks) == size
    assert derived.bucket_size(5000, torch.device(device), ranks) == 5000


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
        require_valid(GPTSettings(mock_data=True, vocab_size=8, **settings), 1)


@pytest.mark.parametrize(
    ("settings", "last", "least"),
    [
        ({"lr": 5e-6, "lr_decay_style": "constant"}, 5e-6, 1.0),
        ({"lr": 5e-6}, 5e-6, 1.0),
        ({"lr": 1.0, "fp16": True, "initial_loss_scale": 0.25}, 1e-5, 0.25),
        ({"lr": 0.5, "min_lr": 0.25}, 0.25, 1.0),
    ],
)
def test_a_default_that_nobody_gave_refuses_nothing(settings, last, least):
    config = GPTSettings(mock_data=True, vocab_size=8, **settings)
    require_valid(config, 1)
    assert (derived.last_lr(config), derived.least_loss_scale(config)) == (last, least)


def test_a_rate_that_is_given_must_not_exceed_the_highest():
    with pytest.raises(UsageError, match=r"--min-lr 0\.5: must not exceed --lr 0\.25"):
        require_valid(GPTSettings(mock_data=True, vocab_size=8, lr=0.25, min_lr=0.5), 1)
    least = {"initial_loss_scale": 4.0, "min_loss_scale": 8.0}
    with pytest.raises(UsageError, match=r"--min-loss-scale 8\.0: must not exceed --initial-loss-scale 4\.0"):
        require_valid(GPTSettings(mock_data=True, vocab_size=8, fp16=True, **least), 1)


@pytest.mark.parametrize(
    "require",
    [
        lambda **sizes: require_split(GPTTask(GPTSettings(**sizes)).model(), GPTSettings(**sizes), 2),
        lambda **sizes: shape(FinetuneSettings(**sizes, norm_placement="pre", gelu="erf"), 2),
    ],
    ids=["pretraining", "finetuning"],
)
def test_a_model_that_does_not_split_is_told_in_the_words_of_the_options(require):
    sizes = {"num_layers": 1, "hidden_size": 12, "vocab_size": 9, "make_vocab_size_divisible_by": 5, "seq_length": 8,
             "max_position_embeddings": 8, "tensor_model_parallel_size": 2}  # fmt: skip
    require(num_attention_heads=4, **sizes)
    with pytest.raises(UsageError) as raised:
        require(num_attention_heads=3, **sizes)
    said = str(raised.value)
    assert said.startswith("--tensor-model-parallel-size 2 does not divide all of --num-attention-heads 3, ")
    assert "--vocab-size, padded to a multiple of --make-vocab-size-divisible-by: 10, " in said
    assert said.endswith("ranks: 2; sizes that would work: [1]; --pad-attention-heads adds heads of zeros")


@pytest.mark.parametrize(
    ("device", "asked", "steps", "interval"),
    [
        ("cpu", None, 5000, 1), ("cuda", None, 5000, 100), ("cuda", None, 20, 20), ("cuda", 1, 5000, 1),
        ("cuda", 0, 5000, 0), ("cpu", 7, 5, 7),
    ],
)  # fmt: skip
def test_a_trace_waits_for_a_device_so_few_steps_have_one_there(device, asked, steps, interval):
    given = GPTSettings(log_communication_interval=asked).log_communication_interval
    assert derived.traced_interval(given, torch.device(device), steps) == interval
