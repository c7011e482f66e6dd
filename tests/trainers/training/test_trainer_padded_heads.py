"""A run with padded heads is the run without them, and nothing that it saves holds padding."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from commengine import ProcessGrid
from trainers.checkpoints import run_state
from trainers.trained import load_trained

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]

SHAPES = {
    "five heads": {"num_attention_heads": 5, "hidden_size": 40},
    "queries of shared groups": {
        "num_attention_heads": 6, "hidden_size": 48, "group_query_attention": True, "num_query_groups": 2,
        "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "ffn_hidden_size": 64,
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "distributed"),
    [pytest.param("five heads", False, marks=pytest.mark.sizes(1, 4)),
     pytest.param("queries of shared groups", True, marks=pytest.mark.sizes(1, 2))],
)  # fmt: skip
def test_losses_of_twenty_steps_and_checkpoints(world, alone, trainer, tmp_path, name, distributed):
    settings = {**SHAPES[name], "lr": 3e-3, "clip_grad": 1.0, "use_distributed_optimizer": distributed}
    root = Path(world.mpi.bcast(str(tmp_path)))
    folder = {"save": str(root / "split")}
    split = trainer(world, tensor_model_parallel_size=world.size, pad_attention_heads=True, **settings, **folder)
    whole = trainer(alone, **settings, save=str(root / f"whole-{world.rank}"))
    for _ in range(20):
        one, other = split.step(), whole.step()
        assert one.losses["lm_loss"] == pytest.approx(other.losses["lm_loss"], rel=2e-5)
        assert one.norm == pytest.approx(other.norm, rel=1e-3)
    run_state.CheckpointSaver(split).start(background=False)
    run_state.CheckpointSaver(whole).start(background=False)
    for file in ("model.safetensors", "optimizer.safetensors"):
        mine, theirs = (load_file(root / f / "iter_0000020" / file) for f in ("split", f"whole-{world.rank}"))
        assert {n: t.shape for n, t in mine.items()} == {n: t.shape for n, t in theirs.items()}
        for n, tensor in mine.items():
            torch.testing.assert_close(tensor, theirs[n], rtol=2e-3, atol=1e-4, msg=f"{file}: {n}")
    # The commands that use a trained model need no option; the run that they read had no padding.
    with ProcessGrid(world, tensor=world.size) as grid:
        source = Path(world.mpi.bcast(str(root / "whole-0")))
        trained = load_trained(source, grid)
        tokens = torch.arange(16).view(1, 16)
        whole.model.eval()
        expected = whole.model(tokens[:, :-1], tokens[:, 1:])
        torch.testing.assert_close(trained.model(tokens[:, :-1], tokens[:, 1:]), expected, rtol=1e-4, atol=1e-4)
        whole.model.train()
    # It goes on without padding and, at the first size, from the checkpoint of the run without padding.
    again = trainer(alone, **settings, load=str(root / "split"))
    run_state.resume(again)
    back = trainer(world, tensor_model_parallel_size=world.size, pad_attention_heads=True, load=str(source), **settings)
    world.barrier()
    run_state.resume(back)
    after = [one.step() for one in (again, back, whole)]
    for one in after:
        assert one.losses["lm_loss"] == pytest.approx(after[2].losses["lm_loss"], rel=2e-5)
