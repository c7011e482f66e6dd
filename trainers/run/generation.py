"""Text from a tensor-parallel language model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tplayers import GPT


def generate(
    model: GPT, prompt: Sequence[int], count: int, *, seed: int, temperature: float = 0.8, top_k: int = 40
) -> list[int]:
    """Return ``count`` sampled tokens that continue ``prompt`` (at least one token).

    temperature: 0 takes the most likely token. top_k: draw from this many of the most likely tokens only.
    If a prompt is longer than the model's positions, only its end is read. Collective over the model's tensor group,
    with the same arguments on every rank. Rank 0 draws, so the ranks agree.
    """
    comm, config = model.comm, model.config
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    # The shards of a sequence must have one size. The window is filled up at its end, which earlier tokens do not see.
    parts = comm.size if config.sequence_parallel else 1
    longest = config.max_position_embeddings // parts * parts
    training = model.training
    model.eval()
    with torch.no_grad():
        for _ in range(count):
            window = tokens[-longest:]
            filled = window + [0] * (-len(window) % parts)
            mine = model(torch.tensor([filled], device=comm.device))[0, len(window) - 1].float()  # this rank's columns
            logits = mine.new_empty(mine.numel() * comm.size)
            comm.all_gather(logits, mine.contiguous())
            choice = _draw(logits[: config.vocab_size].cpu(), generator, temperature, top_k)
            comm.broadcast(choice)
            tokens.append(int(choice))
    model.train(training)
    return tokens[len(prompt) :]


def _draw(logits: torch.Tensor, generator: torch.Generator, temperature: float, top_k: int) -> torch.Tensor:
    if temperature == 0:
        return logits.argmax().reshape(1)
    best = torch.topk(logits, min(top_k, logits.numel()))
    place = torch.multinomial((best.values / temperature).softmax(dim=-1), 1, generator=generator)
    return best.indices[place]
