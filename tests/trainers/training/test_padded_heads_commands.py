"""The commands with padded heads: 5 heads at every size, and SmolLM's 9 query heads in 3 groups in, trained and out."""

import math

import pytest
import torch
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.long]

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


@pytest.mark.parametrize("n", SIZES[1:])
def test_five_heads_train_alike_at_every_size(root, rows, n):
    whole = losses(rows, root / "five-1")
    assert losses(rows, root / f"five-{n}") == pytest.approx(whole, rel=2e-5)
    assert whole[-1] < whole[0] - 0.05 and math.isfinite(whole[-1])
    for file in ("model.safetensors", "optimizer.safetensors"):
        one, other = (load_file(root / f"five-{size}" / LAST / file) for size in (1, n))
        assert {key: tensor.shape for key, tensor in one.items()} == {key: t.shape for key, t in other.items()}
    assert other["exp_avg.layers.0.attention.projection.weight"].shape == (40, 40)


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
