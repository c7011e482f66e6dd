"""--deterministic: what it sets, and what it refuses by name."""

import pytest

from commengine import UsageError
from trainers.settings import derived
from trainers.settings.commands import BERTSettings, GPTSettings
from trainers.settings.rules import require_resumable, require_valid
from trainers.tasks.kinds import task_of

BASE = {
    "num_layers": 1, "hidden_size": 32, "num_attention_heads": 8, "seq_length": 16, "vocab_size": 61,
    "mock_data": True, "global_batch_size": 16, "deterministic": True, "make_vocab_size_divisible_by": 16,
}  # fmt: skip


def checked(ranks, **settings):
    config = GPTSettings(**(BASE | settings))
    require_valid(config, ranks)
    return task_of(config).completed(ranks)


@pytest.mark.parametrize(("tensor", "shards"), [(1, 4), (2, 4), (4, 4), (8, 8)])
def test_default_shards(tensor, shards):
    config = checked(8, tensor_model_parallel_size=tensor)
    assert derived.canonical_shards(config) == config.deterministic_shards == shards
    assert derived.order(config) == "tree" and derived.samples_at_once(config) == 1 and derived.writes_digests(config)


def test_with_context_groups_there_are_as_many_parts_and_enough_shards():
    config = checked(8, context_parallel_size=2)
    assert (config.deterministic_shards, config.deterministic_parts) == (4, 2)
    config = checked(8, context_parallel_size=4, tensor_model_parallel_size=2)
    assert (config.deterministic_shards, config.deterministic_parts) == (8, 4)
    assert checked(8).deterministic_parts == 1 and derived.canonical_parts(checked(8, deterministic_parts=4)) == 4


def test_a_run_goes_on_with_its_shards_and_its_parts():
    alone = checked(8)
    require_resumable(alone, {"deterministic_shards": 4})  # of before there were parts
    require_resumable(alone, {"deterministic_shards": 4, "deterministic_parts": 1})
    require_resumable(alone, {"deterministic_shards": None, "deterministic_parts": None})
    with pytest.raises(UsageError, match=r"-parts 1: its bits are not .* which has 2; give --deterministic-parts 2"):
        require_resumable(alone, {"deterministic_shards": 4, "deterministic_parts": 2})
    with pytest.raises(UsageError, match=r"--deterministic-parts 2: .* which has 1; give --deterministic-parts 1"):
        require_resumable(checked(8, deterministic_parts=2), {"deterministic_shards": 4})


def test_without_it_nothing_is_set():
    config = checked(8, deterministic=False, micro_batch_size=2)
    assert derived.canonical_shards(config) is config.deterministic_shards is derived.order(config) is None
    assert derived.samples_at_once(config) == 2 and not derived.writes_digests(config)
    assert derived.writes_digests(checked(8, deterministic=False, log_digests=True))


@pytest.mark.parametrize(
    ("ranks", "settings", "words"),
    [
        (8, {"deterministic": False, "deterministic_shards": 4}, "--deterministic-shards 4: needs --deterministic"),
        (8, {"deterministic_shards": 6}, "--deterministic-shards 6: must be a power of two"),
        (8, {"deterministic": False, "deterministic_parts": 2}, "--deterministic-parts 2: needs --deterministic"),
        (8, {"deterministic_parts": 3}, "--deterministic-parts 3: must be a power of two"),
        (
            8,
            {"deterministic_parts": 2, "context_parallel_size": 4},
            "--context-parallel-size 4: does not divide --deterministic-parts 2",
        ),
        (
            8,
            {"deterministic_shards": 4, "context_parallel_size": 4, "tensor_model_parallel_size": 2},
            "--context-parallel-size 4: times --tensor-model-parallel-size 2 it does not divide --deterministic-shards",
        ),
        (
            8,
            {"deterministic_parts": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True},
            "--deterministic-parts 2: excludes --sequence-parallel",
        ),
        (
            8,
            {"deterministic_parts": 2, "seq_length": 18},
            "--seq-length 18: must be a multiple of --deterministic-shards 4 and of --deterministic-parts 2",
        ),
        (
            8,
            {"tensor_model_parallel_size": 8, "deterministic_shards": 4},
            "--tensor-model-parallel-size 8: does not",
        ),
        (3, {"global_batch_size": 3}, "--deterministic: 3 data-parallel ranks are not a power of two"),
        (8, {"compile": True}, "--deterministic: excludes --compile"),
        (8, {"global_batch_size": None}, "--deterministic: needs --global-batch-size"),
        (8, {"attention_dropout_mask": "fused"}, "--attention-dropout-mask fused: excludes --deterministic"),
        (
            8,
            {"sequence_parallel": True, "seq_length": 18},
            "--seq-length 18: must be a multiple of --det",
        ),
        (1, {"num_attention_heads": 2}, "--num-attention-heads 2: is not a multiple of --deterministic-shards 4"),
        (1, {"num_attention_heads": 2, "pad_attention_heads": True}, "; --pad-attention-heads pads for the tensor-par"),
        (1, {"ffn_hidden_size": 30}, "--ffn-hidden-size 30: is not a multiple"),
        (1, {"group_query_attention": True, "num_query_groups": 2}, "--num-query-groups 2: is not a multiple"),
        (1, {"make_vocab_size_divisible_by": 1}, "the padded vocabulary of 61: is not a multiple"),
    ],
)
def test_refusals(ranks, settings, words):
    with pytest.raises(UsageError) as raised:
        checked(ranks, **settings)
    assert words in str(raised.value)


def test_a_run_goes_on_with_its_shards():
    config = checked(8, tensor_model_parallel_size=8)
    with pytest.raises(UsageError, match="which has 4; give --deterministic-shards 4"):
        require_resumable(config, {"deterministic_shards": 4})
    require_resumable(config, {"deterministic_shards": 8})
    require_resumable(config, {"deterministic_shards": None})
    require_resumable(config, {})
    require_resumable(checked(8, deterministic=False), {"deterministic_shards": 4})


def test_bert_has_it_too():
    config = BERTSettings(**(BASE | {"seq_length": 18, "sequence_parallel": True}))
    with pytest.raises(UsageError, match="--seq-length 18"):
        require_valid(config, 4)
