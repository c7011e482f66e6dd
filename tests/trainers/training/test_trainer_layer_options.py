"""The options of the layers in the trainer: compilation, and what they refuse."""

import dataclasses
import functools
from fractions import Fraction

import pytest
import torch

from commengine import UsageError
from commengine.rank_zero import on_every_rank
from trainers.data.corpus import Corpus
from trainers.data.samples import Samples
from trainers.data.stream import Source
from trainers.settings.commands import GPTSettings
from trainers.settings.rules import require_valid
from trainers.tasks.kinds import task_of
from trainers.training.trainer import require_compiler


class Counting(Samples):
    """Samples of the numbers from n on."""

    def __len__(self):
        return 64

    def __getitem__(self, n):
        return (torch.arange(9) * 7 + n).remainder(50).numpy()


CORPUS = Corpus((Source("counting", "counting", Fraction(1), Counting()),))
CONFIG = GPTSettings(
    num_layers=1, hidden_size=16, num_attention_heads=4, seq_length=8, vocab_size=50, lr=1e-2,
    make_vocab_size_divisible_by=64, mock_data=True,
)  # fmt: skip


@pytest.mark.mpi(min_size=2)
@pytest.mark.slow
def test_compiled_training_changes_no_bit_and_compiles_once(world, monkeypatch):
    """With the backend that runs eager's operations; inductor's own kernels: tests/tplayers/models/test_compile.py."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    tensor = min(world.size, 2)
    config = dataclasses.replace(CONFIG, tensor_model_parallel_size=tensor, global_batch_size=2 * world.size // tensor)
    steps, parameters = [], []
    for compiled in (False, True):
        trainer = task_of(dataclasses.replace(config, compile=compiled)).new_trainer(world, CORPUS)
        first = trainer.step()
        with torch._dynamo.config.patch(error_on_recompile=True):
            steps.append([first, trainer.step(), trainer.step()])
        parameters.append(list(trainer.model.parameters()))
        trainer.close()
    assert steps[0] == steps[1]
    assert all(torch.equal(one, other) for one, other in zip(*parameters, strict=True))
    torch._dynamo.reset()


@pytest.mark.mpi
def test_a_rank_without_a_compiler_refuses_for_all(world, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    on_every_rank(world, require_compiler)
    if world.rank == world.size - 1:
        monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        UsageError, match=r"--compile: needs a C\+\+ compiler, and there is no no-such-compiler on PATH"
    ):
        on_every_rank(world, require_compiler)


def test_fused_dropout_and_compilation_exclude_each_other():
    fused = dataclasses.replace(CONFIG, attention_dropout_mask="fused", compile=True)
    with pytest.raises(UsageError, match="--attention-dropout-mask fused: excludes --compile, because a compiled"):
        require_valid(fused, 1)
    for allowed in ({"compile": False}, {"attention_dropout": 0.0}, {"attention_dropout_mask": "position"}):
        require_valid(dataclasses.replace(fused, **allowed), 1)
    assert task_of(fused).model().attention_dropout_mask == "fused"


@pytest.mark.mpi
def test_fused_dropout_trains_with_masks_of_its_own(world):
    """Equal on all ranks of a tensor group, as every loss; another loss than with the masks by position."""
    config = dataclasses.replace(
        CONFIG, tensor_model_parallel_size=min(world.size, 2), attention_dropout=0.5, hidden_dropout=0.0
    )
    losses = []
    for mask in ("position", "fused", "fused"):
        config = dataclasses.replace(config, attention_dropout_mask=mask)
        trainer = task_of(config).new_trainer(world, CORPUS)
        losses.append([trainer.step().loss for _ in range(3)])
        trainer.close()
    assert losses[1] == losses[2] and losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert len(set(world.mpi.allgather(str(losses)))) == 1


def test_a_sequence_that_does_not_divide_is_refused():
    config = dataclasses.replace(CONFIG, seq_length=9, sequence_parallel=True)
    require_valid(dataclasses.replace(config, tensor_model_parallel_size=1), 2)
    words = "--seq-length 9: with --sequence-parallel it must be a multiple of --tensor-model-parallel-size 2"
    with pytest.raises(UsageError, match=words):
        require_valid(dataclasses.replace(config, tensor_model_parallel_size=2), 2)
