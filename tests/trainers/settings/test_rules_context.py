"""The settings of ranks that share sequences: the groups, and what is refused by name."""

import pytest

from commengine import UsageError
from trainers.settings import derived
from trainers.settings.commands import BERTSettings, GPTSettings
from trainers.settings.layout import METHODS
from trainers.settings.rules import require_valid
from trainers.tasks.kinds import task_of

BASE = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "seq_length": 48, "vocab_size": 64, "mock_data": True,
    "make_vocab_size_divisible_by": 16,
}  # fmt: skip


def checked(ranks, kind=GPTSettings, **settings):
    config = kind(**(BASE | settings))
    require_valid(config, ranks)
    return task_of(config).completed(ranks)


def test_a_context_group_is_of_one_replica():
    config = checked(16, context_parallel_size=2, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    assert derived.replica_size(config) == 8 and derived.batch_size(config, 16 // derived.replica_size(config)) == 2
    assert derived.context_method(config) == "ulysses"
    checked(2, context_parallel_size=2, cp_comm_type="p2p", attention_dropout_mask="fused", attention_dropout=0.0)


@pytest.mark.parametrize("kind", [GPTSettings, BERTSettings])
@pytest.mark.parametrize("way", METHODS)
@pytest.mark.parametrize("length", range(44, 60))
def test_lengths_that_are_taken_are_those_that_can_be_cut(kind, way, length):
    """A rank's part is of whole positions, and of two equal chunks where early and late positions cost differently."""
    parts = 4 if kind is GPTSettings and way != "a2a" else 2
    settings = {"context_parallel_size": 2, "cp_comm_type": way, "seq_length": length, "kind": kind}
    if length % parts == 0:
        assert derived.context_method(checked(2, **settings)) == METHODS[way]
        return
    suggested = length // parts * parts
    with pytest.raises(
        UsageError, match=f"--seq-length {length}: must be a multiple of {parts} .*such as {suggested}$"
    ):
        checked(2, **settings)


SHARED = {"context_parallel_size": 2}


@pytest.mark.parametrize(
    ("ranks", "settings", "words"),
    [
        (6, {"context_parallel_size": 4}, r"--context-parallel-size 4: does not divide the 6 ranks; \[1, 2, 3, 6\] do"),
        (
            8, {"tensor_model_parallel_size": 2, "context_parallel_size": 3},
            r"--context-parallel-size 3: does not divide the 8 ranks, with --tensor-model-parallel-size 2; "
            r"\[1, 2, 4\] do",
        ),
        (
            8, {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "pipeline_model_parallel_size": 3},
            r"--pipeline-model-parallel-size 3: does not divide the 8 ranks, with --tensor-model-parallel-size 2 and "
            r"--context-parallel-size 2; \[1, 2\] do",
        ),
        (2, {"cp_comm_type": "p2p"}, "--cp-comm-type p2p: needs a --context-parallel-size above 1"),
        (
            3, {"context_parallel_size": 3},
            r"--context-parallel-size 3: does not divide the 8 attention heads of a rank, as --cp-comm-type a2a needs; "
            r"\[1, 2, 4, 8\] do, and --cp-comm-type p2p takes any number",
        ),
        (
            8, {"context_parallel_size": 4, "tensor_model_parallel_size": 2, "seq_length": 52, "cp_comm_type": "p2p"},
            "--seq-length 52: must be a multiple of 8 with --context-parallel-size 4 and --cp-comm-type p2p, such as ",
        ),
        (
            8,
            {"context_parallel_size": 2, "tensor_model_parallel_size": 4, "seq_length": 4, "sequence_parallel": True},
            "--seq-length 4: must be a multiple of 8 with --context-parallel-size 2 and --tensor-model-parallel-size 4"
            ", such as 8",
        ),
        (
            2, SHARED | {"overlap_p2p_communication": True},
            "--overlap-p2p-communication: needs a --pipeline-model-parallel-size above 1, or a --cp-comm-type of p2p",
        ),
        (2, SHARED | {"compile": True}, "--context-parallel-size 2: excludes --compile"),
        (
            2, SHARED | {"deterministic": True, "global_batch_size": 2, "cp_comm_type": "p2p"},
            "--cp-comm-type p2p: excludes --deterministic, because .*--cp-comm-type a2a has whole rows",
        ),
        (
            2, SHARED | {"cp_comm_type": "all_gather", "attention_dropout_mask": "fused"},
            "--attention-dropout-mask fused: excludes --cp-comm-type all_gather: .* or --cp-comm-type a2a",
        ),
        (4, SHARED | {"global_batch_size": 3}, "--global-batch-size 3: must be a multiple .* data-parallel size 2"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(ranks, settings, words):
    with pytest.raises(UsageError, match=words) as raised:
        checked(ranks, **settings)
    assert "\n" not in str(raised.value)
