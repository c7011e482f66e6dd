"""Flags that depend on other settings: against Megatron-LM's own formulas, written down again."""

import math
from fractions import Fraction
from pathlib import Path

import pytest

from commengine import UsageError
from tests.trainers.megatron_flags.test_reading import MOCK, refusal, taken
from trainers.data.tokenizer import Tokenizer
from trainers.settings import derived
from trainers.settings.commands import GPTSettings
from trainers.tasks.kinds import task_of
from trainers.training.learning_rate import learning_rate


def gpt(*words: str) -> GPTSettings:
    config, _ = taken("gpt", [*MOCK, *words])
    assert isinstance(config, GPTSettings)
    return config


def test_samples_become_the_steps_of_megatrons_schedule() -> None:
    """There the schedule counts samples: the rate of a step is that of the samples before it (and of the warm-up's)."""
    batch, samples, decay, warmup = 8, 1000, 800, 80
    config = gpt(
        "--global-batch-size", str(batch), "--train-samples", str(samples), "--lr-decay-samples", str(decay),
        "--lr-warmup-samples", str(warmup), "--lr-decay-style", "linear", "--min-lr", "0", "--lr", "1",
    )  # fmt: skip
    assert config.train_iters == samples // batch == 125
    for step in range(warmup // batch, decay // batch):
        there = 1 - (step * batch - warmup) / (decay - warmup)
        here = learning_rate(
            step, lr=config.lr, min_lr=0.0, style="linear", warmup_iters=config.lr_warmup_iters,
            decay_iters=config.lr_decay_iters or 0,
        )  # fmt: skip
        assert here == pytest.approx(there)


@pytest.mark.parametrize("share, decay", [(".01", 320000), ("0.001", 430000), ("1e-2", 320), ("0", 7), ("0.3", 10)])
def test_a_share_is_exact_and_rounded_down(share: str, decay: int) -> None:
    config, told = taken("gpt", [*MOCK, "--lr-decay-iters", str(decay), "--lr-warmup-fraction", share])
    assert config.lr_warmup_iters == math.floor(Fraction(share) * decay)
    expected = f"--lr-warmup-fraction {share}: is --lr-warmup-iters {config.lr_warmup_iters} here, rounded down"
    assert told[0].startswith(expected)
    of_run = gpt("--train-iters", "1000", "--lr-warmup-fraction", "0.01")  # there, too, without --lr-decay-iters
    assert of_run.lr_warmup_iters == 10
    of_samples = gpt("--global-batch-size", "4", "--lr-warmup-fraction", "0.01", "--train-samples", "8000")
    assert (of_samples.train_iters, of_samples.lr_warmup_iters) == (2000, 20)


@pytest.mark.parametrize(
    "words, problem",
    [
        (["--lr-warmup-fraction", "1"], "must be below 1"),
        (["--lr-warmup-fraction", "1e999999999"], "must be a share of the steps"),
        (["--lr-warmup-fraction", "1e-999999999"], ""),
        (["--lr-warmup-fraction", "nan"], "must be a share of the steps"),
        (["--lr-warmup-fraction", "-1"], "must be a share of the steps"),
        (["--lr-warmup-fraction", "0.1", "--lr-warmup-iters", "3"], "is --lr-warmup-iters 100, and --lr-warmup-iters"),
        (["--train-samples", "100"], "is counted in steps here: give --global-batch-size, or --train-iters"),
        (["--train-samples", "3", "--global-batch-size", "4"], "is less than a step of --global-batch-size 4"),
        (["--train-samples", "400", "--global-batch-size", "4", "--train-iters", "9"], "and --train-iters says 9"),
        (["--no-position-embedding"], "use --position-embedding-type rope"),
        (["--no-bias-gelu-fusion"], "or use --swiglu"),
        (["--grad-reduce-in-bf16"], "needs --bf16"),
        (["--fp32-residual-connection", "--bf16"], "not here: residuals have the dtype of the activations"),
        (["--start-weight-decay", "0.1"], "valid: that of --weight-decay 0.01"),
        (["--tokenizer-type", "Llama2Tokenizer"], "--tokenizer-model tokenizer.json"),
        (["--tokenizer-type", "BertWordPieceCase"], "do_lower_case"),
        (["--vocab-file", "a.json"], "is in NAMEvocab.json here"),
        (["--vocab-file", "a-vocab.json", "--merge-file", "b-merges.txt"], "put them beside each other"),
        (["--vocab-file", "a-vocab.json", "--tokenizer-model", "t.json"], "--tokenizer-model t.json names another"),
        (["--num-virtual-stages-per-pipeline-rank", "5"], "does not cut --num-layers 12 evenly over 1 stages"),
        (["--moe-router-load-balancing-type", "sinkhorn"], "valid: seq_aux_loss"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_write(words: list[str], problem: str) -> None:
    if not problem:
        gpt(*words)
        return
    with pytest.raises(UsageError) as caught:
        taken("gpt", [*MOCK, *words])
    assert problem in str(caught.value) and "\n" not in str(caught.value)


def test_flags_that_have_no_effect_beside_others() -> None:
    gpt("--no-position-embedding", "--use-rotary-position-embeddings")
    gpt("--no-bias-gelu-fusion", "--swiglu")
    gpt("--grad-reduce-in-bf16", "--bf16")
    gpt("--fp32-residual-connection")
    gpt("--start-weight-decay", "0.1", "--end-weight-decay", "0.1", "--weight-decay", "0.1")
    experts = [
        "--num-experts", "2", "--disable-bias-linear", "--moe-aux-loss-coeff", "0.1",
        "--moe-router-load-balancing-type",
    ]  # fmt: skip
    gpt(*experts, "aux_loss", "--micro-batch-size", "1")
    gpt(*experts, "seq_aux_loss", "--micro-batch-size", "4")
    assert "valid: seq_aux_loss" in refusal("gpt", *experts, "aux_loss", "--micro-batch-size", "4")
    assert gpt("--save-retain-interval", "50", "--save", "x").keep_every == 50
    staged = ["--num-layers", "8", "--num-virtual-stages-per-pipeline-rank", "2", "--pipeline-model-parallel-size", "2"]
    (config, _) = taken("gpt", [*MOCK, *staged, "--global-batch-size", "2"], 2)
    assert config.num_layers_per_virtual_pipeline_stage == 2 and derived.chunks(config) == 2
    bert, _ = taken("bert", [*MOCK, "--openai-gelu"])
    assert (bert.gelu, bert.head_gelu) == ("tanh", "tanh")


def test_what_matters_only_for_a_checkpoint_is_refused_where_there_is_one(tmp_path: Path) -> None:
    for flag in ("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-args", "--finetune", "--no-load-optim"):
        gpt(flag)
        gpt(flag, "--load", str(tmp_path), "--save", str(tmp_path))
        (tmp_path / "iter_0000010").mkdir(exist_ok=True)
        assert f"--load {tmp_path} has a checkpoint; " in refusal(
            "gpt", flag, "--load", str(tmp_path), "--save", str(tmp_path)
        )
        (tmp_path / "iter_0000010").rmdir()


def test_gpt2s_two_files_are_one_tokenizer(tmp_path: Path) -> None:
    Tokenizer.train_bpe(["a text, and a text"] * 9, 300)._backend.model.save(str(tmp_path), "gpt2")
    vocabulary, merges = str(tmp_path / "gpt2-vocab.json"), str(tmp_path / "gpt2-merges.txt")
    words = ["--vocab-size", "400", "--vocab-file", vocabulary, "--merge-file", merges]
    config, told = taken("gpt", ["--mock-data", *words])
    assert config.tokenizer_model == vocabulary and len([one for one in told if vocabulary in one]) == 2
    assert task_of(config).completed(1).vocab_size == 400
    whole, parts = Tokenizer.from_gpt2(vocabulary, merges), Tokenizer.from_file(vocabulary)
    assert parts.encode("a text") == whole.encode("a text") and parts.identity() == whole.identity()
