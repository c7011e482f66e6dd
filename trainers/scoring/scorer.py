"""The log-likelihoods that a tensor-parallel GPT gives to the targets of passages, at any number of replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import torch
from torch import Tensor

from commengine import Communicator
from tplayers import GPT, vocab_parallel_argmax, vocab_parallel_cross_entropy

from .passages import Passage

#: how many logits a rank computes at once, and how many of them it copies to float64 at once. On the host malloc maps
#: a block of more than 32 MB anew each time, and the page faults take longer than the arithmetic. A device keeps its
#: memory, and large blocks need fewer kernels.
_ON_HOST = (1 << 22, 1 << 20)
_ON_DEVICE = (1 << 25, 1 << 25)


@dataclass(frozen=True)
class Scores:
    """The scores of n passages, equal on all ranks. The tensors lie on the host.

    nll: float64 [n], of each passage the summed negative log-likelihood of its targets in nats. predicted: int64, the
    model's most likely token at each target, of all passages one after the other; None if it was not asked for.
    ends: int64 [n], where the targets of each passage end in ``predicted``. position_nll, position_targets: float64
    [s], summed over the passages by the position of the token from which a target is predicted.
    """

    nll: Tensor
    predicted: Tensor | None
    ends: Tensor
    position_nll: Tensor
    position_targets: Tensor

    def predicted_of(self, n: int) -> list[int]:
        """The most likely tokens at the targets of passage n, if they were asked for."""
        assert self.predicted is not None
        begin = int(self.ends[n - 1]) if n else 0
        return [int(token) for token in self.predicted[begin : int(self.ends[n])]]


def score(
    model: GPT, passages: Sequence[Passage], data: Communicator, *, batch: int, predict: bool = False,
    progress: Callable[[int], object] = lambda passages: None,
) -> Scores:  # fmt: skip
    """Score every passage once, each on one rank of ``data``.

    model: in eval mode, without sequence parallelism. passages: of at most ``max_position_embeddings`` + 1 tokens.
    batch: passages that go through the model at once. predict: also find the most likely tokens. progress: called after
    each batch with the number of passages that all ranks together have about scored.

    Batches are made of passages of similar length, in the same way at every number of ranks. So the scores are the same
    bits at every data-parallel size. Collective over ``data`` and the model's tensor group, with the same arguments on
    every rank. Raises the model's ValueError, on the ranks that have the passage, if one is too long or, on the host,
    has a token outside the vocabulary.
    """
    count = len(passages)
    sizes = np.fromiter((len(one.tokens) for one in passages), dtype=np.int64, count=count)
    scored = torch.from_numpy(np.fromiter((one.scored for one in passages), dtype=np.int64, count=count))
    ends = scored.cumsum(0)
    nll = torch.zeros(count, dtype=torch.float64)
    predicted = torch.zeros(int(ends[-1]) if count and predict else 0, dtype=torch.int64)
    by_position = torch.zeros(2, int(sizes.max(initial=2)) - 1, dtype=torch.float64)
    order = np.argsort(-sizes, kind="stable")  # the longest first, so that a lack of memory shows at once
    with torch.no_grad():
        for begin in range(data.rank * batch, count, data.size * batch):
            numbers = order[begin : begin + batch].tolist()
            chosen = [passages[number] for number in numbers]
            found = _score_batch(model, chosen, predict=predict)
            for number, (losses, best) in zip(numbers, found, strict=True):
                nll[number] = losses.sum()
                first = len(passages[number].tokens) - 1 - len(losses)
                by_position[0, first : first + len(losses)] += losses
                by_position[1, first : first + len(losses)] += 1
                if predict:
                    predicted[int(ends[number]) - len(best) : int(ends[number])] = best
            progress(min(begin + (data.size - data.rank) * batch, count))
    for tensor in (nll, predicted, by_position):
        if tensor.numel():
            data.all_reduce(tensor)  # one rank's number and zeros: exact, but for the sums by position
    return Scores(nll, predicted if predict else None, ends, by_position[0], by_position[1])


def _score_batch(model: GPT, passages: Sequence[Passage], *, predict: bool) -> list[tuple[Tensor, Tensor]]:
    """(Losses, float64; most likely tokens, int64 or empty) at the targets of each passage, on the host."""
    device = model.comm.device
    longest = max(len(one.tokens) for one in passages)
    tokens = torch.zeros(len(passages), longest, dtype=torch.int64)  # the end of a short one is filled up, and not seen
    for row, one in enumerate(passages):
        tokens[row, : len(one.tokens)] = torch.from_numpy(one.tokens.astype(np.int64))
    scored = [one.scored for one in passages]
    rows = torch.repeat_interleave(torch.arange(len(passages)), torch.tensor(scored))
    places = torch.cat([torch.arange(len(one.tokens) - 1 - one.scored, len(one.tokens) - 1) for one in passages])
    targets = tokens[rows, places + 1].to(device)
    hidden = model.hidden_states(tokens[:, :-1].to(device))[places.to(device), rows.to(device)]  # [targets, h]
    losses: list[Tensor] = []
    best: list[Tensor] = []
    narrow, wide = _ON_HOST if device.type == "cpu" else _ON_DEVICE
    for part in _parts(len(targets), model.embedding.weight.shape[0], narrow):
        logits = model.logits(hidden[part])
        if predict:
            best.append(vocab_parallel_argmax(logits, model.comm, model.config.vocab_size))
        # In float64 the sum over the vocabulary adds no error of its own to that of the logits.
        losses += [
            vocab_parallel_cross_entropy(
                logits[few].double(), targets[part][few], model.comm, vocab_size=model.config.vocab_size, overwrite=True
            )
            for few in _parts(len(logits), logits.shape[1], wide)
        ]
    found = torch.split(torch.cat(losses).cpu(), scored)
    none = torch.empty(0, dtype=torch.int64)
    return list(zip(found, torch.split(torch.cat(best).cpu(), scored) if predict else repeat(none), strict=False))


def _parts(count: int, columns: int, logits: int) -> Iterator[slice]:
    """Slices of ``count`` rows, of whose ``columns`` logits each has at most ``logits``."""
    rows = max(logits // columns, 1)
    yield from (slice(begin, begin + rows) for begin in range(0, count, rows))
