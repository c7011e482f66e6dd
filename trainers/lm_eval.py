"""lm-evaluation-harness on a run's model: ``mpiexec -n 4 python -m trainers.lm_eval --load RUN --tasks NAME ...``.

The harness runs on rank 0; the model computes on all N ranks, with N / T replicas (T: --tensor-model-parallel-size).
The library is the extra "lm-eval".
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from commengine import Communicator, ProcessGrid, UsageError, launch
from commengine.errors import one_line
from tplayers import GPT

from .checkpoints import disk
from .files.writing import check_writable
from .options import BATCH, LENGTH, NOT_EMPTY, NOT_NEGATIVE, SEED, given, option, require
from .run.startup import job_config
from .scoring.service import ModelService
from .scoring.settings import window_length
from .trained import LoadConfig, Trained, loaded


@dataclass(frozen=True)
class LmEvalConfig(LoadConfig):
    """The settings of `trainers.lm_eval`. A field is the flag of the same name, with dashes."""

    tasks: str | Sequence[str] | None = option(None, "names of the harness's tasks, groups or tags", words=True)
    include_path: str | None = option(None, "a folder with task files (YAML) of your own", valid=NOT_EMPTY)
    num_fewshot: int | None = option(
        None, "examples before each question (default: the task's own number)", valid=NOT_NEGATIVE
    )
    limit: float | None = option(
        None, "only this number of documents of each task, or this share below 1; for trials", valid=NOT_NEGATIVE
    )
    seq_length: int | None = option(
        None, "most tokens that the model reads at once (default: the --seq-length of its training)", valid=LENGTH
    )
    max_gen_toks: int = option(256, "new tokens of a text, where the task has no number of its own", valid=LENGTH)
    micro_batch_size: int = option(8, "requests that a rank takes through the model at once", valid=BATCH)
    bootstrap_iters: int = option(
        1000, "samples of the standard errors that are not computed in closed form; 0: none", valid=NOT_NEGATIVE
    )
    offline: bool = option(False, "never look for data sets on the network")
    seed: int = option(1234, "seed of few-shot examples and of text that is drawn", valid=SEED)
    json: str | None = option(None, "write all results to this file", valid=NOT_EMPTY)
    samples: str | None = option(None, "write every request and answer to this file, as JSON lines", valid=NOT_EMPTY)

    def validate(self, ranks: int) -> None:
        """Raise UsageError, naming the option and what is valid, unless this is possible on ``ranks`` ranks."""
        super().validate(ranks)
        require(bool(self.tasks), "--tasks NAME ...: needed: tasks of lm-evaluation-harness")
        folder = self.include_path is None or Path(self.include_path).is_dir()
        require(folder, f"{given(self, 'include_path')}: no such folder")
        try:
            check_writable(json=self.json, samples=self.samples)
        except ValueError as error:
            raise UsageError(str(error)) from error

    def completed(self, ranks: int) -> Self:
        """These settings. Raises UsageError if the harness is not installed."""
        found = importlib.util.find_spec("lm_eval") is not None
        require(found, "trainers.lm_eval needs lm-evaluation-harness; install it with: pip install '.[lm-eval]'")
        return super().completed(ranks)

    @property
    def names(self) -> list[str]:
        """The tasks."""
        names = [self.tasks] if isinstance(self.tasks, str) else list(self.tasks or [])
        return [name for word in names for name in word.split(",") if name]


def main(world: Communicator) -> None:
    """One rank of the command. Rank 0 reads the flags and runs the harness; the other ranks serve it."""
    config = job_config(world, LmEvalConfig, "lm_eval")
    with loaded(config, world, kind="gpt") as (trained, grid):
        service, length = _service(config, world, trained, grid)
        if world.rank:
            service.serve()
        else:
            _run(config, service, length)


def _service(
    config: LmEvalConfig, world: Communicator, trained: Trained, grid: ProcessGrid
) -> tuple[ModelService, int]:
    """The model of all ranks, and the tokens that it reads at once. Raises UsageError, on all ranks."""
    assert isinstance(trained.model, GPT)
    length = window_length(config, config.seq_length, trained.settings)
    tokenizer = trained.tokenizer
    try:
        _ = tokenizer.eod  # which ends a text
    except ValueError as error:
        raise UsageError(f"--tokenizer-model: {error}, which lm-evaluation-harness needs") from error
    service = ModelService(world, grid, trained.model, tokenizer, batch=config.micro_batch_size, seed=config.seed)
    return service, length


def _run(config: LmEvalConfig, service: ModelService, length: int) -> None:
    """Run the harness and report, on rank 0. An error of the user's is raised on all ranks."""
    os.environ["DISABLE_MULTIPROC"] = "1"  # the harness would fork this rank of an MPI job
    os.environ.pop("LOCAL_RANK", None)  # the harness gives no results where it is not 0
    if config.offline:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1"}
    problem = ""
    try:
        _report(config, _results(config, service, length))
    except (UsageError, ValueError, KeyError, OSError, ImportError, AssertionError) as error:
        if service.busy:  # the other ranks are in a request, and not waiting for one
            raise
        problem = f"--tasks {' '.join(config.names)}: {one_line(error) or repr(error)}"
    service.stop(problem)


def _results(config: LmEvalConfig, service: ModelService, length: int) -> dict[str, Any]:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from .scoring.harness import HarnessModel

    manager = TaskManager(include_path=config.include_path)
    if unknown := [name for name in config.names if not manager.match_tasks([name])]:
        where = "" if config.include_path is None else f" and in {config.include_path}"
        raise UsageError(f"no such task: {', '.join(unknown)} (looked for among the harness's{where})")
    limit = config.limit if config.limit is None or config.limit < 1 else int(config.limit)
    results: dict[str, Any] = simple_evaluate(
        model=HarnessModel(service, length=length, max_gen_toks=config.max_gen_toks), tasks=config.names,
        num_fewshot=config.num_fewshot, limit=limit, bootstrap_iters=config.bootstrap_iters,
        log_samples=config.samples is not None, task_manager=manager, random_seed=config.seed,
        numpy_random_seed=config.seed, torch_random_seed=config.seed, fewshot_random_seed=config.seed,
    )  # fmt: skip
    return results


def _report(config: LmEvalConfig, results: dict[str, Any]) -> None:
    from lm_eval.utils import handle_non_serializable, make_table

    samples = results.pop("samples", {})
    print(make_table(results), flush=True)
    if results.get("groups"):
        print(make_table(results, "groups"), flush=True)
    if config.json is not None:
        content = json.dumps(results, indent=1, default=handle_non_serializable, ensure_ascii=False) + "\n"
        disk.rewrite(Path(config.json), content.encode())
    if config.samples is not None:
        rows = ({"task": task} | row for task, of_task in samples.items() for row in of_task)
        lines = (json.dumps(row, default=handle_non_serializable, ensure_ascii=False) for row in rows)
        disk.rewrite(Path(config.samples), "".join(f"{line}\n" for line in lines).encode())


if __name__ == "__main__":
    launch.run(main, device="cpu")
