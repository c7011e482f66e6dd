"""Which sentences of a data set form each of BERT's samples."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainers.data.indexed import IndexedDataset
from trainers.data.samples import SHORT, philox

#: sentences that are mapped at a time: about 100 MB of work arrays
_BLOCK = 1 << 20
#: the smallest target of a short sample: a token for each of its two parts
SHORTEST = 2


class SentenceMap(NamedTuple):
    """For each sample its run of sentences, and how many tokens of them it takes.

    start: int64 [n], where the first sentence begins in `IndexedDataset.tokens`. first, stop: int64 [n], the run of
    sentences as indices into `IndexedDataset.sequence_lengths`. target: int32 [n], the largest number of tokens.
    """

    start: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]
    stop: npt.NDArray[np.int64]
    target: npt.NDArray[np.int32]


def sentence_map(
    dataset: IndexedDataset, documents: range, *, target: int, short_seq_prob: float, seed: int, pairs: bool,
    one_sentence: bool,
) -> SentenceMap:  # fmt: skip
    """The samples of a run of documents: whole sentences of one document, in order, up to ``target`` tokens or more.

    A sample ends with the sentence that reaches its target. With the probability ``short_seq_prob`` its target is a
    number from 2 to ``target`` instead, each equally likely (Devlin et al. 2019, A.2). The choice is a function of the
    seed and of the sample's first sentence, so the samples are the same in every epoch.

    pairs: samples are cut into two parts later, so each takes at least two sentences, and the last sentence of a
    document joins the sample before it rather than stand alone. one_sentence: with ``pairs``, whether a document of one
    sentence becomes a sample, of one part, or is left out. Sentences and documents without tokens never count.

    The work is in NumPy, for blocks of about a million sentences; a Python loop only follows the chain of samples.
    """
    parts: list[SentenceMap] = []
    least = 2 if pairs else 1
    draws = philox(seed, SHORT)
    begins = dataset.document_sequences
    first = documents.start
    while first < documents.stop:
        stop = int(np.searchsorted(begins, begins[first] + _BLOCK, side="right")) - 1
        stop = min(max(stop, first + 1), documents.stop)
        lengths = dataset.sequence_lengths[begins[first] : begins[stop]].astype(np.int64)
        real = np.flatnonzero(lengths)  # a sentence without tokens belongs to no sample
        ends = np.searchsorted(real, begins[first + 1 : stop + 1] - begins[first])  # of documents, among the real ones
        sums = np.concatenate(([0], np.cumsum(lengths[real])))
        targets = _targets(draws.random_raw(len(lengths))[real], target, short_seq_prob)
        chosen, following = _chain(sums, ends, targets, least)
        if pairs and not one_sentence:
            several = following[chosen] - chosen > 1
            chosen = chosen[several]
        if len(chosen):
            base, last = int(begins[first]), following[chosen] - 1
            parts.append(SentenceMap(
                sums[chosen] + dataset.document_offsets[first], base + real[chosen], base + real[last] + 1,
                targets[chosen].astype(np.int32),
            ))  # fmt: skip
        first = stop
    if not parts:
        nothing = np.empty(0, dtype=np.int64)
        return SentenceMap(nothing, nothing, nothing, nothing.astype(np.int32))
    return SentenceMap(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _targets(raw: npt.NDArray[np.uint64], target: int, short_seq_prob: float) -> npt.NDArray[np.int64]:
    """A target for a sample that begins with each sentence. One raw number gives both draws: short or not, and length.

    Its high 32 bits decide, and its low 32 bits choose.
    """
    short = (raw >> np.uint64(32)) < np.uint64(round(short_seq_prob * 2**32))
    lengths = SHORTEST + ((raw & np.uint64(0xFFFFFFFF)) % np.uint64(max(target - SHORTEST + 1, 1))).astype(np.int64)
    return np.where(short, lengths, target)


def _chain(
    sums: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], targets: npt.NDArray[np.int64], least: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The first sentence of each sample, and for every sentence the one after the sample that would begin with it.

    The samples of all documents form one chain, because the sentence after a document begins the next one.
    """
    count = len(targets)
    here = np.arange(count)
    sizes = np.diff(ends, prepend=0)
    document_end = np.repeat(ends, sizes)
    following = np.searchsorted(sums, sums[:-1] + targets)
    np.maximum(following, here + least, out=following)
    following = np.where(following > document_end - least, document_end, following)
    steps = following.tolist()
    chosen, at = [], 0
    while at < count:
        chosen.append(at)
        at = steps[at]
    return np.array(chosen, dtype=np.int64), following
