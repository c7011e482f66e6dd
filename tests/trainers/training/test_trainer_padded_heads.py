"""A run with padded heads is the run without them, and nothing that it saves holds padding."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from commengine import ProcessGrid
from trainers.checkpoints import run_state
from trainers.trained import load_trained

SHAPES = {
    "five heads": {"num_attention_heads": 5, "hidden_size": 40},
    "queries of shared groups": {
        "num_attention_heads": 6, "hidden_size": 48, "group_query_attention": True, "num_query_groups": 2,
        "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "ffn_hidden_size": 64,
    },
}  # fmt: skip


@pytest.mark.sizes(1, 2)
@pytest.mark.mpi
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


# Commands: 5 heads at every size, and SmolLM's 9 query heads in 3 groups in, trained and out

OFF = ["--hidden-dropout", "0", "--attention-dropout", "0"]
TRAIN = ["--train-iters", "20", "--lr", "3e-3", "--lr-warmup-iters", "3", "--weight-decay", "0.1", *OFF]
FIVE = ["--num-attention-heads", "5", "--hidden-size", "40", *TRAIN]
SIZES = [1, 2, 4]
LAST = "iter_0000020"


def smollm():
    """A random model of SmolLM-135M's shape, but smaller: 9 query heads in 3 groups, tied."""
    transformers = pytest.importorskip("transformers", reason="SmolLM is a model of transformers")
    torch.manual_seed(5)
    shape = transformers.LlamaConfig(
        vocab_size=100, hidden_size=72, intermediate_size=48, num_hidden_layers=2, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=16, tie_word_embeddings=True, initializer_range=0.1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(shape)


@pytest.fixture(scope="module")
def root(pretrain, mock, tmp_path_factory):
    root = tmp_path_factory.mktemp("padded")
    smollm().save_pretrained(root / "smollm")
    commands = []
    for n in SIZES:
        size = ["--tensor-model-parallel-size", str(n), *(["--pad-attention-heads"] if n > 1 else [])]
        commands.append(("pretrain_gpt", n, [*mock, *FIVE, *size, "--save", root / f"five-{n}"]))
    small = [word for word in mock if word not in ("--vocab-size", "100")]
    for name in ("--num-layers", "--hidden-size", "--num-attention-heads", "--make-vocab-size-divisible-by"):
        at = small.index(name)
        del small[at : at + 2]
    for n in (1, 2):
        size, pad = ["--tensor-model-parallel-size", str(n)], ["--pad-attention-heads"] if n > 1 else []
        run, trained = root / f"run-{n}", root / f"trained-{n}"
        train = [*small, *TRAIN, *size, *pad, "--load", run, "--save", trained]
        commands += [
            ("convert", n, ["--from", "hf", root / "smollm", "--save", run, *size]),
            ("convert", n, ["--load", run, "--to", "hf", root / f"same-{n}", *size]),
            ("pretrain_gpt", n, train),
            ("convert", n, ["--load", trained, "--to", "hf", root / f"out-{n}", *size]),
        ]
    done = pretrain(*((n, words) for _, n, words in commands), command=[command for command, *_ in commands])
    for (_, n, _), outcome in zip(commands, done, strict=True):
        assert outcome.codes == [0] * n, outcome.err
    return root


def losses(rows, folder):
    found = rows(folder)
    assert [row["iteration"] for row in found] == list(range(1, 21))
    return [row["lm_loss"] for row in found]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("n", SIZES[1:])
def test_five_heads_train_alike_at_every_size(root, rows, n):
    whole = losses(rows, root / "five-1")
    assert losses(rows, root / f"five-{n}") == pytest.approx(whole, rel=2e-5)
    assert whole[-1] < whole[0] - 0.05 and math.isfinite(whole[-1])
    for file in ("model.safetensors", "optimizer.safetensors"):
        one, other = (load_file(root / f"five-{size}" / LAST / file) for size in (1, n))
        assert {key: tensor.shape for key, tensor in one.items()} == {key: t.shape for key, t in other.items()}
    assert other["exp_avg.layers.0.attention.projection.weight"].shape == (40, 40)


@pytest.mark.slow
@pytest.mark.long
def test_smollm_in_trained_and_out(root, rows):
    assert losses(rows, root / "trained-2") == pytest.approx(losses(rows, root / "trained-1"), rel=2e-5)
    given = load_file(root / "smollm" / "model.safetensors")
    for n in (1, 2):
        same = load_file(root / f"same-{n}" / "model.safetensors")
        assert same.keys() == given.keys() and all(torch.equal(same[key], given[key]) for key in given)
    assert (root / "same-1" / "model.safetensors").read_bytes() == (root / "same-2" / "model.safetensors").read_bytes()
    one, two = (load_file(root / f"out-{n}" / "model.safetensors") for n in (1, 2))
    for key in given:
        torch.testing.assert_close(two[key], one[key], rtol=1e-3, atol=1e-4)
        assert not torch.equal(one[key], given[key]), key
