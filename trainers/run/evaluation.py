"""The loss on held-out samples, each counted once whatever the data-parallel size."""

from __future__ import annotations

import torch

from commengine import Communicator, UsageError
from tplayers import GPT
from trainers.data.batches import GlobalBatches


def evaluate(model: GPT, batches: GlobalBatches, data: Communicator, *, iterations: int) -> tuple[float, int]:
    """(Mean loss in nats per token, tokens) over the first ``iterations`` global batches, at most all samples.

    Collective over ``data`` and the model's tensor group. Leaves the model in training mode. Raises UsageError, on all
    ranks, where a token lies outside the vocabulary.
    """
    needed = -(-len(batches.samples) // batches.size)
    totals = torch.zeros(3, dtype=torch.float64)
    model.eval()
    with torch.no_grad():
        for k in range(min(iterations, needed)):
            for batch in batches(k):
                if not batch.fits(model.config.vocab_size):
                    totals[2] += 1
                    continue
                totals[1] += batch.counted
                batch = batch.to(data.device)
                totals[0] += model(batch.tokens, batch.labels).sum(dtype=torch.float64).item()
    model.train()
    data.all_reduce(totals)
    if totals[2]:
        raise UsageError(
            f"a held-out token lies outside the vocabulary of {model.config.vocab_size}: was --data-path made with "
            "another tokenizer, or is --vocab-size too small?"
        )
    return float(totals[0] / totals[1]), int(totals[1])
