"""Resuming in half precision and with a sharded optimizer: bit for bit, and from one mode into another."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.checkpoints import rewrite_state
from trainers.checkpoints import run_state

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]

SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True}
FUSED = {"attention_dropout_mask": "fused"}
PRECISIONS = {
    "fp32": {},
    "bf16": {"bf16": True, "grad_reduce_in_fp32": True},
    # The scale has grown, and is to grow again, and one overflow is forgiven already.
    "fp16": {"fp16": True, "initial_loss_scale": 256.0, "loss_scale_window": 2, "hysteresis": 3},
}


@pytest.fixture
def folder(world, tmp_path):
    """Rank 0's temporary folder, on all ranks."""
    return Path(world.mpi.bcast(str(tmp_path)))


def steps(trainer, count):
    done = [trainer.step() for _ in range(count)]
    trainer.optimizer.wait_for_parameters()
    return [(step.loss, step.norm, step.rate, trainer.loss_scale) for step in done]


def overflow(trainer):
    """A step whose gradient is not finite."""
    hook = trainer.model.final_norm.bias.register_hook(lambda grad: grad * float("inf"))
    assert trainer.step().skipped
    hook.remove()


def state(trainer):
    """All that the optimizer has, on rank 0 of the data group, and all parameters."""
    parameters = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return parameters | {name: tensor.clone() for name, tensor in trainer.optimizer.tensors()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("precision", "saving", "loading"),
    [  # a plain fp32 run is test_checkpoint's
        ("fp32", {}, SHARDED), ("fp32", SHARDED, SHARDED), ("bf16", {}, {}), ("bf16", SHARDED, {}),
        ("fp32", FUSED, FUSED), ("fp16", {}, {}), ("fp16", SHARDED, SHARDED),
    ],
)  # fmt: skip
def test_resuming_is_bit_for_bit_with_and_without_shards(world, trainer, folder, precision, saving, loading):
    """Where the two add alike (no clipping, a data group of at most two) they may take turns."""
    settings = {"save": str(folder), "hidden_dropout": 0.1, "attention_dropout": 0.1, **PRECISIONS[precision]}
    settings["tensor_model_parallel_size"] = 2 if world.size == 4 else 1
    straight = trainer(world, **settings, **saving)
    steps(straight, 3)
    if precision == "fp16":
        overflow(straight)
        steps(straight, 1)
    run_state.CheckpointSaver(straight).start(background=False)
    written = state(straight)
    resumed = trainer(world, load=str(folder), **settings, **loading)
    assert run_state.resume(resumed) and resumed.iteration == straight.iteration
    assert (resumed.optimizer.updates, resumed.scaler) == (straight.optimizer.updates, straight.scaler)
    assert_same(state(resumed), written)
    assert [one[::2] for one in steps(resumed, 3)] == [one[::2] for one in steps(straight, 3)]  # the norm's sums differ
    assert_same(state(resumed), state(straight))
    if precision == "fp16":
        assert straight.skipped == resumed.skipped == 1 and straight.loss_scale > 256


@pytest.mark.parametrize("precision", PRECISIONS)
def test_files_are_the_same_with_and_without_shards(world, trainer, folder, precision):
    for name, mode in (("whole", {}), ("sharded", SHARDED)):
        settings = {"tensor_model_parallel_size": 2 if world.size == 4 else 1, **PRECISIONS[precision]}
        made = trainer(world, save=str(folder / name), **settings, **mode)
        steps(made, 2)
        run_state.CheckpointSaver(made).start(background=False)
    for file in ("model.safetensors", "optimizer.safetensors"):
        one, other = ((folder / name / "iter_0000002" / file).read_bytes() for name in ("whole", "sharded"))
        assert one == other
    kept = load_file(folder / "sharded" / "iter_0000002" / "optimizer.safetensors")
    weights = load_file(folder / "sharded" / "iter_0000002" / "model.safetensors")
    kinds = ("exp_avg", "exp_avg_sq") if precision == "fp32" else ("exp_avg", "exp_avg_sq", "master")
    assert kept.keys() == {f"{kind}.{name}" for kind in kinds for name in weights}
    assert {tensor.dtype for tensor in kept.values()} == {torch.float32}
    if precision != "fp32":
        for name, weight in weights.items():
            assert torch.equal(weight, kept[f"master.{name}"].to(weight.dtype))
    world.barrier()


@pytest.mark.parametrize(("first", "second"), [("fp32", "bf16"), ("bf16", "fp32"), ("bf16", "fp16")])
def test_a_run_goes_on_in_another_precision_from_the_masters(world, trainer, folder, first, second):
    before = trainer(world, save=str(folder), **PRECISIONS[first], **SHARDED)
    steps(before, 2)
    run_state.CheckpointSaver(before).start(background=False)
    after = trainer(world, load=str(folder), **PRECISIONS[second])
    assert run_state.resume(after)
    old, new = state(before), state(after)
    if world.rank == 0:
        for name, p in after.model.named_parameters():
            master = old[f"master.{name}"] if first != "fp32" else old[name]
            assert torch.equal(new[name], master.to(p.dtype))
            assert second == "fp32" or torch.equal(new[f"master.{name}"], master)
            assert torch.equal(new[f"exp_avg.{name}"], old[f"exp_avg.{name}"])
    assert steps(after, 1)[0][0] == pytest.approx(steps(before, 1)[0][0], abs=2e-2)


def test_a_checkpoint_of_the_first_format_loads(world, trainer, folder):
    """As written before there was half precision: no updates, loss scaler or masters."""
    made = trainer(world, save=str(folder))
    steps(made, 2)
    run_state.CheckpointSaver(made).start(background=False)
    if world.rank == 0:
        old = json.loads((folder / "iter_0000002" / "state.json").read_text()) | {"format": 1}
        for key in ("updates", "loss_scaler", "masters"):
            del old[key]
        for key in ("bf16", "fp16", "use_distributed_optimizer", "loss_scale", "initial_loss_scale", "hysteresis"):
            del old["settings"][key]
        rewrite_state(folder / "iter_0000002", old, listed=False)
    resumed = trainer(world, load=str(folder), **SHARDED)
    assert run_state.resume(resumed)
    assert (resumed.iteration, resumed.optimizer.updates) == (2, 2)
    assert_same(state(resumed), state(made))
