"""Runs with --deterministic have the same bits at every layout, and runs without it have not.

Every rank trains the same tiny run alone, too, and compares the digests of its group's run with its own.
"""

import shutil
import tempfile
from pathlib import Path

import pytest

from bench.contest.parts.tiny_run import RunLayout, run, unlike

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.every_size]

ALONE = RunLayout(1, 1)
#: two steps of 12 samples: four leaves of the tree of samples, of three samples each
SMALL = {"num_layers": 1, "global_batch_size": 12, "steps": 2}
#: (model, precision, layout): they have every option once; ``python -m bench.contest same_bits`` has the whole grid
CHOSEN = [
    ("gpt", "fp32", RunLayout(1, 1, {"micro_batch_size": 4, "recompute_granularity": "full"})),
    ("gpt", "bf16", RunLayout(1, 1, {"use_distributed_optimizer": True, "ddp_bucket_size": 500})),
    ("gpt", "fp32", RunLayout(1, 2, {"ddp_bucket_size": 700, "overlap_grad_reduce": True})),
    ("gpt", "fp32", RunLayout(2, 1, {"sequence_parallel": True})),
    ("gpt", "fp16", RunLayout(1, 2, {"use_distributed_optimizer": True, "overlap_grad_reduce": True})),
    ("bert", "fp32", RunLayout(2, 1, {"recompute_granularity": "selective"})),
    ("llama", "fp32", RunLayout(2, 1, {"sequence_parallel": True, "recompute_granularity": "full"})),
    ("gpt", "fp32", RunLayout(4, 1, {"async_tensor_model_parallel_allreduce": True})),
    ("gpt", "fp32", RunLayout(1, 4, {"use_distributed_optimizer": True, "ddp_bucket_size": 1000})),
    ("gpt", "bf16", RunLayout(2, 2, {"micro_batch_size": 2, "use_distributed_optimizer": True})),
    ("bert", "bf16", RunLayout(2, 2, {"sequence_parallel": True, "overlap_grad_reduce": True})),
    ("llama", "bf16", RunLayout(4, 1, {"sequence_parallel": True})),
]
#: settings under which other code computes: sizes that fill no vector and no block of rows, attention in fused kernels,
#: a gradient that is not clipped, three samples in all, more shards
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
UNUSUAL = [
    ("gpt", "bf16", RunLayout(2, 1), {"hidden_size": 36, "seq_length": 17, "vocab_size": 49, "clip_grad": 0.0}),
    ("gpt", "fp32", RunLayout(1, 2, {"use_distributed_optimizer": True}), {"hidden_size": 36, "global_batch_size": 6}),
    ("gpt", "bf16", RunLayout(2, 1, {"sequence_parallel": True}), {"seq_length": 64, **NO_DROPOUT}),
    ("llama", "fp32", RunLayout(2, 1), {"deterministic_shards": 2, "num_query_groups": 2, **NO_DROPOUT}),
    ("bert", "fp32", RunLayout(2, 1, {"sequence_parallel": True}), {"bert_no_binary_head": True, "seq_length": 20}),
]
#: matrices of which every side is long enough for products in one batch (`tplayers.canonical.products.one_batch`)
LONG = {
    "hidden_size": 256, "num_attention_heads": 4, "seq_length": 40, "vocab_size": 160, "ffn_hidden_size": 256,
    "global_batch_size": 4,
}  # fmt: skip
UNUSUAL += [
    ("gpt", "bf16", RunLayout(2, 1, {"sequence_parallel": True, "recompute_granularity": "selective"}), LONG),
    (
        "llama",
        "bf16",
        RunLayout(4, 1, {"sequence_parallel": True}),
        LONG | {"num_attention_heads": 8, "kv_channels": 64},
    ),
    # one shard of two heads a rank, and sums over so many tokens that it matters whether a matrix lies transposed
    ("gpt", "bf16", RunLayout(2, 1), {
        "seq_length": 1040, "hidden_size": 160, "deterministic_shards": 2, "global_batch_size": 1, "steps": 1,
    }),
]  # fmt: skip
#: ranks that share sequences, which are computed in as many parts on one rank, too
PARTS = {"deterministic_parts": 2}
CP2 = {"context_parallel_size": 2}
SHARED = [
    ("gpt", "fp32", RunLayout(1, 1, {**CP2, "ddp_bucket_size": 700}), PARTS),
    ("bert", "bf16", RunLayout(1, 1, {**CP2, "recompute_granularity": "full"}), PARTS),
    ("llama", "bf16", RunLayout(1, 1, {**CP2, "recompute_granularity": "selective"}), {"deterministic_parts": 4}),
    ("gpt", "fp16", RunLayout(2, 1, {**CP2, "sequence_parallel": True}), PARTS),
    ("llama", "fp32", RunLayout(1, 2, {**CP2, "use_distributed_optimizer": True}), {"deterministic_parts": 4}),
    ("bert", "fp32", RunLayout(1, 1, {"context_parallel_size": 4}), {"deterministic_parts": 4}),
    ("bert", "fp32", RunLayout(2, 1, CP2), PARTS | {"bert_no_binary_head": True}),
]
#: experts, which each of the ranks has, or which ranks share
EP2, EP4 = {"expert_model_parallel_size": 2}, {"expert_model_parallel_size": 4}
EXPERTS = [
    ("experts", "fp32", RunLayout(1, 2, EP2), {}),
    ("experts", "bf16", RunLayout(2, 1, {"sequence_parallel": True}), {}),
    ("experts", "fp16", RunLayout(1, 2, {**EP2, "use_distributed_optimizer": True, "overlap_grad_reduce": True}), {}),
    ("experts", "bf16", RunLayout(1, 2, {**EP2, "recompute_granularity": "full", "ddp_bucket_size": 700}), {}),
    ("experts", "fp32", RunLayout(1, 4, {**EP4, "overlap_grad_reduce": True}), {}),
    ("experts", "bf16", RunLayout(1, 4, {**EP2, "use_distributed_optimizer": True}), {}),
    ("experts", "fp32", RunLayout(2, 2, {**EP2, "sequence_parallel": True, "recompute_granularity": "full"}), {}),
    ("experts", "fp32", RunLayout(4, 1, {"use_distributed_optimizer": True}), {"moe_router_pre_softmax": True}),
    ("experts", "fp32", RunLayout(1, 2), {"num_experts": 3, "moe_router_topk": 3, "swiglu": False}),
]
MORE_UNUSUAL = [("gpt", "bf16", RunLayout(4, 1), LONG | NO_DROPOUT), ("bert", "bf16", RunLayout(4, 1), LONG)]
#: the cases of four ranks that `make test` runs: two axes of a grid, shards of shards, experts, parts of sequences
ON_FOUR = [CHOSEN[9], UNUSUAL[6], SHARED[5], EXPERTS[6]]
#: gradients and activations that go through shared memory
LARGE = {"hidden_size": 256, "num_attention_heads": 8, "seq_length": 256, "vocab_size": 4000, "global_batch_size": 4}
FOUND = {}


def on_its_ranks(cases, *more):
    """Parameters of tests, each for the number of ranks of its layout."""
    params = []
    for case in cases:
        left_out = [pytest.mark.long] if case[2].ranks == 4 and case not in ON_FOUR else []
        params.append(pytest.param(*case, marks=[pytest.mark.sizes(case[2].ranks), *more, *left_out]))
    return params


def alone(model, precision, settings=()):
    """The digests of the run on this rank alone: made once for each model, precision and settings."""
    from mpi4py import MPI

    key = (model, precision, str(settings))
    if key not in FOUND:
        FOUND[key] = run(MPI.COMM_SELF, model, ALONE, precision=precision, **SMALL | dict(settings))
    return FOUND[key]


@pytest.mark.some(2)
@pytest.mark.slow
@pytest.mark.parametrize(("model", "precision", "layout"), on_its_ranks(CHOSEN), ids=str)
def test_layouts(mpi_world, model, precision, layout):
    if mpi_world.size != layout.ranks:
        pytest.skip(f"for {layout.ranks} ranks")
    expected = alone(model, precision)
    found = run(mpi_world, model, layout, precision=precision, **SMALL)
    assert unlike(expected, found) == []
    assert len(expected["steps"]) == SMALL["steps"] and len(expected) > 30
    assert {step[2] for step in expected["steps"]} == ({False, True} if precision == "fp16" else {False})  # skipped


@pytest.mark.some(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "precision", "layout", "settings"),
    on_its_ranks(UNUSUAL + SHARED + EXPERTS) + on_its_ranks(MORE_UNUSUAL, pytest.mark.long),
    ids=str,
)
def test_unusual_settings(mpi_world, model, precision, layout, settings):
    if mpi_world.size != layout.ranks:
        pytest.skip(f"for {layout.ranks} ranks")
    found = run(mpi_world, model, layout, precision=precision, **SMALL | settings)
    assert unlike(alone(model, precision, settings), found) == []


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "layout",
    [RunLayout(4, 1, {"sequence_parallel": True}), RunLayout(2, 2, {"use_distributed_optimizer": True})],
    ids=str,
)
def test_tensors_in_shared_memory(mpi_world, layout, precision):
    if mpi_world.size != layout.ranks:
        pytest.skip(f"for {layout.ranks} ranks")
    found = run(mpi_world, "gpt", layout, precision=precision, **SMALL | LARGE)
    assert unlike(alone("gpt", precision, LARGE), found) == []


@pytest.fixture
def folder(mpi_world):
    path = Path(mpi_world.bcast(tempfile.mkdtemp() if mpi_world.rank == 0 else None))
    yield path
    mpi_world.Barrier()
    if mpi_world.rank == 0:
        shutil.rmtree(path)


@pytest.mark.some(2)
@pytest.mark.slow
@pytest.mark.sizes(2)
@pytest.mark.parametrize(
    ("model", "first", "second", "settings"),
    [
        ("gpt", RunLayout(1, 2), RunLayout(2, 1, {"sequence_parallel": True}), {}),
        ("gpt", RunLayout(1, 1, CP2), RunLayout(1, 2, {"use_distributed_optimizer": True}), PARTS),
        ("gpt", RunLayout(2, 1), RunLayout(1, 1, CP2), PARTS),
        ("experts", RunLayout(1, 2, EP2), RunLayout(2, 1), {}),
        ("experts", RunLayout(1, 2), RunLayout(1, 2, {**EP2, "use_distributed_optimizer": True}), {}),
    ],
    ids=str,
)
def test_a_run_is_resumed_at_another_layout(mpi_world, folder, model, first, second, settings):
    """After the first of two steps, in the middle of an epoch. A second step at the first layout is lost."""
    if mpi_world.size != 2:
        pytest.skip("for 2 ranks")
    found = run(mpi_world, model, second, resumed=(first, 1, folder), **SMALL | settings)
    assert unlike(alone(model, "fp32", settings), found) == []


@pytest.mark.some(1)
@pytest.mark.slow
@pytest.mark.sizes(2)
@pytest.mark.parametrize(
    ("model", "layout"),
    [("gpt", RunLayout(2, 1)), ("gpt", RunLayout(1, 2)), ("experts", RunLayout(1, 2, EP2))],
    ids=str,
)
def test_without_the_option_the_bits_differ(mpi_world, model, layout):
    """The control: the comparison finds the differences of ordinary runs."""
    from mpi4py import MPI

    if mpi_world.size != layout.ranks:
        pytest.skip(f"for {layout.ranks} ranks")
    expected = run(MPI.COMM_SELF, model, ALONE, deterministic=False, **SMALL)
    found = run(mpi_world, model, layout, deterministic=False, **SMALL)
    assert len(unlike(expected, found)) > 20
