"""The settings of pipeline stages: the cut, and what is refused by name."""

import pytest

from commengine import UsageError
from trainers.settings import derived
from trainers.settings.commands import GPTSettings
from trainers.settings.rules import require_valid
from trainers.tasks.kinds import task_of

BASE = {
    "num_layers": 8, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 16, "vocab_size": 64, "mock_data": True,
    "make_vocab_size_divisible_by": 16,
}  # fmt: skip


def checked(ranks, **settings):
    config = GPTSettings(**(BASE | settings))
    require_valid(config, ranks)
    return task_of(config).completed(ranks)


def layers(config):
    return [[list(chunk) for chunk in part.chunks] for part in task_of(config).parts()]


def test_the_layers_are_cut_by_their_cost():
    assert layers(checked(4, pipeline_model_parallel_size=4)) == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]
    large = checked(4, pipeline_model_parallel_size=4, vocab_size=4096)  # its logits cost as much as 2.6 layers
    parts = task_of(large).parts()
    assert [len(part.numbers) for part in parts] == [2, 2, 3, 1]
    assert [part.first for part in parts] == [True, False, False, False]
    assert [part.last for part in parts] == [False, False, False, True]


def test_interleaved_stages_have_equal_stretches():
    config = checked(2, pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=2, global_batch_size=4)
    assert derived.chunks(config) == 2
    assert layers(config) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    (first, _) = task_of(config).parts()
    assert [first.chunk_of(name) for name in ("embedding.weight", "layers.1.x", "layers.5.x")] == [0, 0, 1]


def test_stages_share_the_ranks_with_tensor_groups_and_replicas():
    config = checked(8, pipeline_model_parallel_size=2, tensor_model_parallel_size=2, micro_batch_size=3)
    assert derived.replica_size(config) == 4
    assert derived.batch_size(config, 8 // derived.replica_size(config)) == 6


@pytest.mark.parametrize(
    ("ranks", "settings", "words"),
    [
        (
            6, {"pipeline_model_parallel_size": 4},
            r"--pipeline-model-parallel-size 4: does not divide the 6 ranks; \[1, 2, 3, 6\] do",
        ),
        (
            16, {"pipeline_model_parallel_size": 16},
            "--pipeline-model-parallel-size 16: must be at most --num-layers 8: each stage needs a layer",
        ),
        (
            1, {"num_layers_per_virtual_pipeline_stage": 2},
            "--num-layers-per-virtual-pipeline-stage 2: needs a --pipeline-model-parallel-size above 1",
        ),
        (
            2, {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 3},
            "--num-layers-per-virtual-pipeline-stage 3: 2 stages of such stretches do not divide 8 layers; 1, 2, 4 wo",
        ),
        (
            3, {"pipeline_model_parallel_size": 3, "num_layers_per_virtual_pipeline_stage": 1},
            "no number would, as 3 stages do not either",
        ),
        (
            4, {"pipeline_model_parallel_size": 4, "num_layers_per_virtual_pipeline_stage": 1, "global_batch_size": 3},
            "needs a micro-batch for each of the 4 stages, and a step has 3: --global-batch-size 4 would do",
        ),
        (4, {"pipeline_model_parallel_size": 4, "global_batch_size": 6, "micro_batch_size": 4}, "--global-batch-size"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(ranks, settings, words):
    with pytest.raises(UsageError, match=words):
        checked(ranks, **settings)
