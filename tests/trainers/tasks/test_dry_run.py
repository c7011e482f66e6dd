"""--dry-run: the formulas' memory, FLOPs and collectives for the options of a run, and nothing is trained."""

import json
import re
from dataclasses import replace

import pytest
import torch

from bench.step_study import volumes
from commengine import Communicator, UsageError
from commengine.cost import FittedModel, Segment
from tests.support import mpirun
from tplayers import formulas
from trainers.settings.commands import BERTSettings, GPTSettings
from trainers.settings.rules import require_valid
from trainers.tasks.dry_run import dry_run, forecast, kept_tensors
from trainers.tasks.kinds import task_of

HOST = torch.device("cpu")
SIZES = {
    "num_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "vocab_size": 1000,
    "make_vocab_size_divisible_by": 128, "micro_batch_size": 2, "mock_data": True, "ddp_bucket_size": 50_000,
}  # fmt: skip
LLAMA = {
    "normalization": "RMSNorm", "swiglu": True, "position_embedding_type": "rope", "group_query_attention": True,
    "num_query_groups": 2, "disable_bias_linear": True, "untie_embeddings_and_output_weights": True,
}  # fmt: skip
MODEL = FittedModel({name: (Segment(2, 0, 1e-5, 1e-9),) for name in ("all_reduce", "reduce_scatter", "all_gather")})


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"bf16": True, "recompute_granularity": "full", "sequence_parallel": True},
        {"bf16": True, "use_distributed_optimizer": True, "overlap_grad_reduce": True, "attention_dropout": 0.0},
        {"fp16": True, "grad_reduce_in_fp32": True, "hidden_dropout": 0.0, "attention_dropout_mask": "fused"},
        {**LLAMA, "hidden_dropout": 0.0, "attention_dropout": 0.0, "global_batch_size": 16},
    ],
)  # fmt: skip
def test_the_forecast_is_the_formulas(other):
    config = GPTSettings(**SIZES | {"tensor_model_parallel_size": 2} | other)
    found = forecast(config, 8, 1e9, HOST, MODEL)
    shape = task_of(config).model().cost_shape(32, 2)
    batch, recompute = config.global_batch_size or 8, config.recompute_granularity or "none"
    kept = formulas.KeptTensors(
        element_bytes=2 if "bf16" in other or "fp16" in other else 4, recompute=recompute,
        sequence_parallel="sequence_parallel" in other, hidden_dropout=config.hidden_dropout > 0,
        scores="none" if config.attention_dropout == 0 or "attention_dropout_mask" in other else "dropped",
        zero1="use_distributed_optimizer" in other, sends_together="overlap_grad_reduce" in other,
        sent_bytes=2 if "bf16" in other else 0,
    )  # fmt: skip
    assert kept_tensors(config, overlap="overlap_grad_reduce" in other) == kept
    assert found.memory == formulas.training_bytes(shape, 2, 2, 4, kept)
    assert found.flops == formulas.model_flops(shape, batch, recompute) / 8 and found.tokens == 32 * batch
    # The collectives are those that bench.step compares with traces, but for a few numbers and partial gradients.
    traced = volumes.expected(config, 8, 0)
    for group, mine in found.collectives.items():
        parts = [one.what for one in traced if one.group.startswith(group) and one.what.part != "loss and norm"]
        large = sum(one.count * one.size for one in parts if one.size > 64 and "partial" not in one.why)
        assert sum(one.count * one.size for one in mine) == pytest.approx(large, rel=0.02)  # buckets are padded
    every = [one for mine in found.collectives.values() for one in mine]
    assert found.communication == pytest.approx(
        sum(one.count * MODEL.seconds(one.operation, one.size, one.ranks) for one in every)
    )
    assert found.seconds == pytest.approx(found.flops / 1e9 + found.communication)


@pytest.mark.parametrize("way", ["a2a", "p2p", "all_gather"])
@pytest.mark.parametrize(
    "other", [{}, {"bf16": True, "recompute_granularity": "full"}, {**LLAMA, "use_distributed_optimizer": True}]
)
def test_ranks_that_share_sequences_share_the_flops_and_the_activations(way, other):
    alone = GPTSettings(**SIZES | {"tensor_model_parallel_size": 2, "attention_dropout": 0.0} | other)
    config = replace(alone, context_parallel_size=2, cp_comm_type=way)
    found, whole = forecast(config, 8, 1e9, HOST), forecast(alone, 4, 1e9, HOST)
    assert found.flops == whole.flops / 2 and found.tokens == whole.tokens
    assert found.collectives.keys() == {"tensor", "context", "replicas"}
    # Where layers run again, the gradient of a tied embedding may wait beside them, and that is not shared.
    waiting = 2 * 64 * 1024 / 2 if "recompute_granularity" in other else 0
    assert -1 <= found.memory["activations"] - whole.memory["activations"] / 2 <= waiting / 2 + 1
    traced = volumes.expected(config, 8, 0)
    for group, mine in found.collectives.items():
        parts = [one.what for one in traced if one.group.startswith(group) and one.what.part != "loss and norm"]
        large = sum(one.count * one.size for one in parts if one.size > 64 and "partial" not in one.why)
        assert sum(one.count * one.size for one in mine) == pytest.approx(large, rel=0.02)  # buckets are padded


@pytest.mark.parametrize(("way", "drawn"), [("p2p", True), ("all_gather", True), ("a2a", False)])
def test_a_ring_with_dropout_by_position_has_one_block_of_scores(way, drawn):
    """The other way round, an all-to-all keeps them all."""
    config = GPTSettings(**SIZES | {"context_parallel_size": 2, "cp_comm_type": way})
    found = forecast(config, 2, 1e9, HOST).memory
    block = 2 * 4 * 16 * 16 * 9  # samples, heads, positions of a rank, bytes
    assert found.get("one block of scores") == (block if drawn else None)
    without = forecast(replace(config, attention_dropout=0.0), 2, 1e9, HOST).memory
    assert "one block of scores" not in without
    assert (found["activations"] > without["activations"]) == (way == "a2a")


@pytest.mark.parametrize(("each", "chunks"), [(None, 1), (1, 2)])
def test_of_a_pipeline_it_shows_the_cut_the_bubble_and_the_memory_of_the_stage_that_needs_most(each, chunks):
    few = {"num_layers": 8, "vocab_size": 8, "make_vocab_size_divisible_by": 8, "global_batch_size": 16}  # no ends
    config = GPTSettings(**SIZES | few, pipeline_model_parallel_size=4, num_layers_per_virtual_pipeline_stage=each)
    found = forecast(config, 4, 1e9, HOST)
    assert found.cut == ("2 + 2 + 2 + 2" if each is None else "[1, 1] + [1, 1] + [1, 1] + [1, 1]")
    assert found.waits / (found.flops / 1e9) == pytest.approx(3 / (chunks * 8), rel=0.1)
    shape, kept = task_of(config).cost_shape(), kept_tensors(config, overlap=False)
    first = formulas.training_bytes(
        shape,
        2,
        1,
        1,
        kept,
        formulas.StageShape(2, first=True, last=False),
        formulas.kept_microbatches(0, 4, 8, chunks),
    )
    assert found.memory == first
    (messages,) = found.collectives["pipeline"]
    assert messages.size == 4 * 2 * 32 * 64 and messages.count == 2 * 8 * chunks
    assert f"bubble, on stages of {found.cut} layers" in "\n".join(found.lines())


def test_without_a_model_the_collectives_take_no_time_and_the_words_say_so():
    config = GPTSettings(**SIZES | {"tensor_model_parallel_size": 2})
    unknown, alone = (
        forecast(config, 2, 1e9, HOST),
        forecast(replace(config, tensor_model_parallel_size=1), 1, 1e9, HOST),
    )
    assert unknown.communication is None and unknown.seconds == unknown.flops / 1e9
    text = "\n".join(unknown.lines())
    assert "not calibrated: " in text and "--cost-model FILE tells it" in text
    assert f"{sum(unknown.memory.values()) / 1e9:.3f} GB" in text and f"{unknown.seconds:.4g} s, " in text
    assert alone.communication == 0.0 and alone.collectives == {} and "--cost-model" not in "\n".join(alone.lines())


def test_a_bert_has_a_forecast():
    config = BERTSettings(**SIZES | {"tensor_model_parallel_size": 2})
    found = forecast(config, 4, 1e9, HOST, MODEL)
    shape = task_of(config).model().cost_shape(32, 2)
    assert found.flops == formulas.model_flops(shape, 4) / 4
    kept = kept_tensors(config, overlap=False)
    assert found.memory == formulas.training_bytes(shape, 2, 2, 2, kept) and found.communication > 0

    def poolers(**other):
        found = forecast(replace(config, **other), 4, 1e9, HOST).collectives
        return [one.count for group in found.values() for one in group if one.part == "pooler"]

    # The pooler needs the first tokens of sequences whose positions ranks share.
    for other in ({"sequence_parallel": True}, {"context_parallel_size": 2}):
        assert len(poolers(**other)) > 0 and poolers(**other, bert_no_binary_head=True) == []


@pytest.mark.mpi
def test_the_ranks_agree_and_rank_0_prints(mpi_world, capfd, tmp_path_factory):
    path = mpi_world.bcast(tmp_path_factory.mktemp("models") if mpi_world.rank == 0 else None) / "model.json"
    if mpi_world.rank == 0:
        path.write_text(json.dumps(MODEL.to_json()))
    mpi_world.Barrier()
    with Communicator(mpi_world) as world:
        config = GPTSettings(**SIZES, dry_run=True, cost_model=str(path), device="cpu")
        assert not dry_run(replace(config, dry_run=False), world)
        assert dry_run(config, world)
        said = capfd.readouterr().out
        assert ("nothing is trained" in said) == (world.rank == 0)
        with pytest.raises(UsageError, match=r"--cost-model .*gone\.json"):
            dry_run(replace(config, cost_model=str(path.with_name("gone.json"))), world)


@pytest.mark.slow
def test_the_command_prints_and_trains_nothing(tmp_path):
    words = [word for name, value in SIZES.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words[words.index("--mock-data") + 1 : words.index("--mock-data") + 2] = []
    words += ["--tensor-model-parallel-size", "2", "--save", str(tmp_path / "run")]
    done = mpirun.run(2, "-m", "trainers.pretrain_gpt", *words, "--dry-run")
    assert done.returncode == 0, done.stderr
    config = GPTSettings(**SIZES | {"tensor_model_parallel_size": 2})
    memory = forecast(config, 2, 1.0, HOST).memory
    assert f"memory of a rank   {sum(memory.values()) / 1e9:9.3f} GB" in done.stdout
    assert re.search(r"time of a step     [\d.e-]+ s, [\d,]+ tokens/s", done.stdout)
    assert not (tmp_path / "run").exists() or not any((tmp_path / "run").iterdir())


def test_a_cost_model_without_a_dry_run_is_an_error():
    config = GPTSettings(**SIZES, cost_model="model.json")
    with pytest.raises(UsageError, match=r"--cost-model model\.json: goes with --dry-run"):
        require_valid(config, 1)
