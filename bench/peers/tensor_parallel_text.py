"""Peers of ``bench.contest generation`` that serve on CPUs with tensor parallelism, on ranks of gloo.

The way "transformers": the tensor-parallel plan of the model in `transformers`. "deepspeed": DeepSpeed's inference
engine around the same model, with its all-reduce in shared memory.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import transformers

from bench.peers.generated_text import build, writer
from bench.programs.generation_task import GenerationTask


def with_plan(task: GenerationTask) -> tuple[Any, str]:
    """The model of `transformers`, split by its own plan, and a note."""
    dist.init_process_group("gloo")
    return build(task, tp_plan="auto"), f"transformers {transformers.__version__}, its tensor-parallel plan over gloo"


def with_deepspeed(task: GenerationTask) -> tuple[Any, str]:
    """DeepSpeed's engine around the model, and a note."""
    import deepspeed  # type: ignore[import-not-found]

    deepspeed.init_distributed("gloo")
    engine = deepspeed.init_inference(
        build(task), tensor_parallel={"tp_size": dist.get_world_size()}, dtype=torch.float32,
        replace_with_kernel_inject=False,
    )  # fmt: skip
    return engine.module, f"DeepSpeed {deepspeed.__version__} inference, automatic tensor parallelism"


@contextlib.contextmanager
def contestant(task: dict[str, Any], way: str) -> Iterator[tuple[Callable[[], float], str]]:
    """The texts of a `GenerationTask`. way: "transformers" or "deepspeed"."""
    given = GenerationTask(**task)
    os.environ.setdefault("LOCAL_SIZE", os.environ["WORLD_SIZE"])  # DeepSpeed: all ranks are on one node
    os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
    with contextlib.redirect_stdout(sys.stderr):
        model, note = {"transformers": with_plan, "deepspeed": with_deepspeed}[way](given)
    yield writer(model, given), f"{note}, {torch.get_num_threads()} threads"
    dist.destroy_process_group()
