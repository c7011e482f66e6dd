"""Peer of bench.generation: `transformers`' ``generate`` on one process.

    python -m bench.peers.generated_text --task FILE

It has as many threads as OMP_NUM_THREADS says, and the key-value cache and the attention that `transformers` chooses.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from bench.command.parser import new_program_parser
from bench.contests.generation_task import GenerationTask, checksum
from bench.contests.serving import serve


def build(task: GenerationTask) -> Any:
    """``GPT2LMHeadModel`` with the task's weights. No token ends a text."""
    shape = transformers.GPT2Config(
        vocab_size=task.vocab_size, n_positions=task.max_position_embeddings, n_embd=task.hidden_size,
        n_layer=task.num_layers, n_head=task.num_attention_heads, activation_function="gelu_new", bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    model: Any = transformers.GPT2LMHeadModel(shape)
    model.eval()
    weights = task.weights()
    missing = set(model.load_state_dict(weights, strict=False).missing_keys) - {"lm_head.weight"}  # tied
    assert not missing, missing
    return model


def main() -> None:
    """Set up, then do as the driver says."""
    options = new_program_parser("bench.peers.generated_text", __doc__)
    options.add_argument("--task", required=True, metavar="FILE", help="JSON file of a GenerationTask")
    task = GenerationTask.load(options.parse_args().task)
    model, prompts = build(task), torch.tensor(task.prompts())
    real = torch.ones_like(prompts)

    def step() -> float:
        with torch.no_grad():
            texts = model.generate(
                prompts, attention_mask=real, max_new_tokens=task.new_tokens, do_sample=False, pad_token_id=0
            )
        return checksum(texts[:, task.prompt_tokens :].tolist())

    note = f"transformers {transformers.__version__}, {model.config._attn_implementation} attention, dynamic cache"
    serve(step, note=f"{note}, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
