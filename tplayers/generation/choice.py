"""The next token, chosen from logits of which each rank holds the columns of its part of the vocabulary.

The ranks exchange a few numbers for each row, and never their logits:

======================  =======================  ==================================================================
step                    collective               bytes that a rank sends for each row
======================  =======================  ==================================================================
top-k                   all-gather               4 * min(k, columns of a rank): its largest logits
top-p                   5 all-reduces            4, the largest logit, then 4 times 8 * 256, the histograms below
the token               all-gather               16: the best score and its token
======================  =======================  ==================================================================
"""

from __future__ import annotations

import torch
from torch import Tensor

from commengine import Communicator
from tplayers.rng import exponential

from .sampling import Sampling
from .vocab_argmax import vocab_parallel_max

#: bins of a histogram of one byte, and the bytes of a float32 from the highest on
_BINS, _SHIFTS = 256, (24, 16, 8, 0)


class TokenChooser:
    """Chooses the next token of each row. Every rank of ``comm`` must make the same calls.

    vocab_size: of the whole vocabulary, without padding. columns: of this rank's logits, the same on all ranks.
    """

    def __init__(
        self, comm: Communicator, vocab_size: int, columns: int, sampling: Sampling, device: torch.device
    ) -> None:
        self.comm, self.sampling, self.vocab_size = comm, sampling, vocab_size
        self.columns, self.device = columns, device
        self.first = comm.rank * columns
        self.real = min(max(vocab_size - self.first, 0), columns)  # this rank's columns that are no padding
        self._ids = torch.arange(self.first, self.first + columns, device=device, dtype=torch.int32)

    def choose(self, logits: Tensor, keys: Tensor | None, seen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The chosen tokens, int64 [b], and their scores, float64 [b]; both are equal on all ranks. Collective.

        logits: [b, columns], this rank's; they may be overwritten. keys: int64 [b], which decide what is drawn; of one
        key the same tokens are drawn at every number of ranks. None if the sampling is greedy. seen: bool
        [b, columns], True for tokens of the repetition penalty. A score is not finite if a logit that counts is not.
        """
        scores = self.filtered(logits, seen)
        if self.sampling.temperature > 0:
            assert keys is not None
            scores = self._with_noise(scores, keys)
        return vocab_parallel_max(scores, self.comm, self.vocab_size)

    def filtered(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """The scores after all that `Sampling` says, -inf where a token is not kept: this rank's [b, columns].

        Float32, or the dtype of greedy float64 logits. Collective.
        """
        sampling = self.sampling
        greedy = sampling.temperature == 0
        scores = logits if greedy and logits.dtype == torch.float64 else logits.float()
        scores[:, self.real :] = -torch.inf
        if seen is not None:
            penalty = sampling.repetition_penalty
            scores = torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
        if greedy:
            return scores
        if sampling.temperature != 1:
            scores = scores / sampling.temperature
        if 0 < sampling.top_k < self.vocab_size:
            scores = _cut(scores, self._kth_largest(scores, sampling.top_k))
        if sampling.top_p < 1:
            scores = _cut(scores, self._nucleus(scores, sampling.top_p))
        return scores

    def _kth_largest(self, scores: Tensor, k: int) -> Tensor:
        """The k-th largest score of each row [b, 1], over all ranks."""
        best = scores.topk(min(k, scores.shape[-1])).values
        if self.comm.size > 1:
            ranks = best.new_empty((self.comm.size, *best.shape))
            self.comm.all_gather(ranks.view(-1), best.view(-1))
            best = ranks.transpose(0, 1).flatten(1)
        return best.topk(k).values[:, -1:]

    def _nucleus(self, scores: Tensor, p: float) -> Tensor:
        """The smallest score of each row [b, 1] such that the tokens of larger scores have less than ``p`` together.

        It is searched for byte by byte. A histogram over the values of a byte has the probability of the tokens that
        agree with what was found so far; the byte is the one at which the sum from above reaches ``p``.
        """
        comm = self.comm
        largest = scores.max(dim=-1, keepdim=True).values
        if comm.size > 1:
            comm.all_reduce(largest, "max")
        mass = (scores - largest).double().exp_()
        bits = scores.view(torch.int32)
        order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() + 2**31  # 0 to 2^32 - 1, ordered as the scores are
        found = torch.zeros_like(order[:, :1])
        above = torch.zeros_like(mass[:, :1])  # the mass of all larger values of the bytes that are done
        target = None
        for shift in _SHIFTS:
            inside = order >> (shift + 8) == found
            histogram = mass.new_zeros((len(mass), _BINS))
            histogram.scatter_add_(1, (order >> shift) & (_BINS - 1), torch.where(inside, mass, 0.0))
            if comm.size > 1:
                comm.all_reduce(histogram.view(-1))
            if target is None:  # the first byte's histogram has all tokens
                target = p * histogram.sum(dim=1, keepdim=True)
            from_above = above + histogram.flip(1).cumsum(1)
            bin_ = (from_above < target).sum(dim=1, keepdim=True).clamp_(max=_BINS - 1)
            passed = from_above.gather(1, (bin_ - 1).clamp_(min=0))
            above = torch.where(bin_ > 0, passed, above)
            found = found * _BINS + (_BINS - 1 - bin_)
        signed = (found - 2**31).to(torch.int32)
        return (signed ^ ((signed >> 31) & 0x7FFFFFFF)).view(torch.float32)

    def _with_noise(self, scores: Tensor, keys: Tensor) -> Tensor:
        """The scores with Gumbel noise: their largest is a draw from their softmax (Maddison et al. 2014, section 2).

        The noise is a function of key and token, so that each rank draws that of its own tokens.
        """
        if self.sampling.top_k == 0 and self.sampling.top_p == 1:
            return scores - exponential(self._ids, keys[:, None]).log_()
        row, column = (scores != -torch.inf).nonzero(as_tuple=True)  # few, and every NaN
        noisy = torch.full_like(scores, -torch.inf)
        noisy[row, column] = scores[row, column] - exponential(self._ids[column], keys[row]).log_()
        return noisy


def _cut(scores: Tensor, least: Tensor) -> Tensor:
    """``scores`` with -inf below ``least`` [b, 1]. A NaN stays, so that the choice shows it."""
    return scores.masked_fill(scores < least, -torch.inf)
