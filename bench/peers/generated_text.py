"""Peer of ``bench.contest generation``: `transformers`' ``generate`` on one process.

It has as many threads as OMP_NUM_THREADS says, and the key-value cache and the attention that `transformers` chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers

from bench.programs.generation_task import GenerationTask, checksum


def write_model(task: GenerationTask, folder: str) -> None:
    """Write the task's model with random weights, drawn as `transformers` draws them. No token ends a text."""
    sizes = {name: getattr(task, name) for name in ("hidden_size", "num_attention_heads", "vocab_size")}
    sizes |= {"num_hidden_layers": task.num_layers, "max_position_embeddings": task.max_position_embeddings}
    if task.family == "llama":
        sizes["intermediate_size"] = max(task.hidden_size // 24, 1) * 64  # as Megatron-LM has it
    config = transformers.AutoConfig.for_model(task.family, **sizes, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(task.seed)
    model: Any = transformers.AutoModelForCausalLM
    model.from_config(config).save_pretrained(folder)


def build(task: GenerationTask, **more: Any) -> Any:
    """The model, as `transformers` loads it. more: arguments of ``from_pretrained``."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(task.weights, dtype=torch.float32, **more)
    return model.eval()


def writer(model: Any, task: GenerationTask) -> Callable[[], float]:
    """A step that writes the task's texts."""
    prompts = torch.tensor(task.prompts())
    real = torch.ones_like(prompts)

    def step() -> float:
        with torch.no_grad():
            texts = model.generate(
                prompts, attention_mask=real, max_new_tokens=task.new_tokens, do_sample=False, pad_token_id=0
            )
        return checksum(texts[:, task.prompt_tokens :].tolist())

    return step


@contextmanager
def contestant(task: dict[str, Any], way: str) -> Iterator[tuple[Callable[[], float], str]]:
    """The texts of a `GenerationTask` in one process."""
    given = GenerationTask(**task)
    model = build(given)
    note = f"transformers {transformers.__version__}, {model.config._attn_implementation} attention, dynamic cache"
    yield writer(model, given), f"{note}, {torch.get_num_threads()} threads"
