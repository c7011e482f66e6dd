"""What the tests of whole runs share: many commands in one MPI job, and a grid for those inside one."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.training.command_job import CommandJob
from trainers.settings.rules import require_valid
from trainers.tasks.kinds import task_of

#: a model that takes milliseconds a step, on any number of ranks up to 4
TINY = [
    "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16",
    "--make-vocab-size-divisible-by", "128", "--micro-batch-size", "4", "--global-batch-size", "8",
    "--log-interval", "1", "--sample-tokens", "0", "--eval-iters", "0",
]  # fmt: skip
MOCK = ["--mock-data", "--vocab-size", "100"]

#: the settings of such a model where a test drives the trainer itself; its buckets are of several parameters each
MINIATURE: dict[str, Any] = {
    "num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "vocab_size": 100,
    "make_vocab_size_divisible_by": 128, "hidden_dropout": 0.0, "attention_dropout": 0.0, "mock_data": True,
    "micro_batch_size": 2, "global_batch_size": 8, "train_iters": 20, "lr": 1e-2, "lr_warmup_iters": 4,
    "weight_decay": 0.5, "clip_grad": 0.0, "eval_iters": 0, "sample_tokens": 0, "ddp_bucket_size": 5000,
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """How one command ended: on each rank, the exit code, standard output and standard error."""

    codes: list[int]
    out: list[str]
    err: list[str]


@pytest.fixture(scope="session")
def pretrain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Outcome]]]:
    """Run a command as each of several (ranks, arguments[, signals[, input]]), in a job that all tests share.

    command: of all of them, or a list with the command of each.
    """
    job = CommandJob(tmp_path_factory.mktemp("job"))

    def pretrain(
        *runs: tuple[Any, ...], timeout: float = 110, command: str | list[str] = "pretrain_gpt"
    ) -> list[Outcome]:
        commands = [command] * len(runs) if isinstance(command, str) else command
        given = [
            [n, [str(word) for word in words], name, *more, *([], "")[len(more) :]]
            for (n, words, *more), name in zip(runs, commands, strict=True)
        ]
        return [
            Outcome(*([rank[key] for rank in ranks] for key in ("code", "out", "err")))
            for ranks in job.run(given, timeout)
        ]

    yield pretrain
    job.close()


@pytest.fixture(scope="session")
def tiny() -> list[str]:
    """Arguments of a run of a tiny model."""
    return TINY


@pytest.fixture(scope="session")
def mock() -> list[str]:
    """The same, on mock data."""
    return TINY + MOCK


@pytest.fixture(scope="session")
def rows() -> Callable[..., list[dict[str, Any]]]:
    """``rows(folder, key)``: the rows of its metrics.jsonl that have ``key``."""

    def rows(folder: Path, key: str = "lm_loss") -> list[dict[str, Any]]:
        every = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [row for row in every if key in row]

    return rows


@pytest.fixture
def trainer() -> Iterator[Callable[..., Any]]:
    """``trainer(world, **settings)``: a Trainer of a tiny GPT on mock data; closed when the test ends."""
    from trainers.data.corpus import open_corpus
    from trainers.settings.commands import GPTSettings

    made: list[Any] = []

    def trainer(world: Any, **settings: Any) -> Any:
        config = GPTSettings(**(MINIATURE | settings))
        require_valid(config, world.size)
        made.append(task_of(config).new_trainer(world, open_corpus(config)))
        return made[-1]

    yield trainer
    for one in made:
        one.close()


@pytest.fixture
def world(mpi_world: Any) -> Iterator[Any]:
    """All ranks of the job, as a Communicator."""
    from commengine import Communicator

    with Communicator(mpi_world) as world:
        yield world


@pytest.fixture
def itself() -> Any:
    """MPI.COMM_SELF."""
    from mpi4py import MPI

    return MPI.COMM_SELF


@pytest.fixture
def alone() -> Iterator[Any]:
    """A group of this rank only: what an independent truth is computed in."""
    from mpi4py import MPI

    from commengine import Communicator

    with Communicator(MPI.COMM_SELF, name="alone") as alone:
        yield alone
