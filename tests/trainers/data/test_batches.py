"""Global batches: the same samples at every data-parallel and micro-batch size, and after every restart."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest

from tests.support.corpora import Named
from trainers.data.batches import GlobalBatches
from trainers.data.stream import SampleStream, Source


@dataclass(frozen=True)
class Rank:
    """One rank of a data group."""

    size: int
    rank: int


WORDS = {"vocab_size": 1, "unusable": ""}


class Lists(GlobalBatches[list[tuple[int, Any, bool]]]):
    """A micro-batch is a list of (number, sample, whether it is only padding)."""

    def microbatch(self, rows: Sequence[Any], numbers: range, past_end: Sequence[bool]) -> list[tuple[int, Any, bool]]:
        return list(zip(numbers, rows, past_end, strict=True))


def blend(first: str = "0.7") -> SampleStream:
    counts = {"A": (first, 30), "B": ("0.3", 11), "C": ("0.05", 2)}
    return SampleStream([Source(name, name, Fraction(w), Named(name, n)) for name, (w, n) in counts.items()], seed=3)


def read(samples: Any, k: int, ranks: int, micro: int, record: Any = None, at: int = 0) -> list[tuple[int, Any, bool]]:
    """The samples of global batch k, of 24 samples, as all ranks get them."""
    found = []
    for rank in range(ranks):
        batches = Lists(
            samples() if callable(samples) else samples, size=24, micro=micro, data=Rank(ranks, rank), **WORDS
        )
        if record is not None:
            batches.continue_from(at, json.loads(json.dumps(record)))
        parts = list(batches(k))
        assert [len(part) for part in parts] == [micro] * (24 // ranks // micro)
        found += [one for part in parts for one in part]
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("micro", [1, 3])
def test_a_blend_is_the_same_on_any_number_of_ranks(ranks: int, micro: int) -> None:
    whole = blend()
    for k in (0, 1, 7):
        assert read(blend, k, ranks, micro) == [(n, whole[n], False) for n in range(24 * k, 24 * k + 24)]


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_resumed_blend_is_the_same_on_any_number_of_ranks(ranks: int) -> None:
    """Resumed as it was, and with another weight, on another number of ranks than before."""
    before = Lists(blend(), size=24, micro=4, data=Rank(2, 1), **WORDS)
    record = before.record(5)
    whole = blend()
    assert read(blend, 6, ranks, 2, record, at=5) == [(n, whole[n], False) for n in range(144, 168)]
    changed = blend("5")
    (line,) = changed.continue_from(120, record)
    assert "from sample 120" in line
    found = read(lambda: blend("5"), 6, ranks, 2, record, at=5)
    assert found == [(n, changed[n], False) for n in range(144, 168)]
    assert [one[1] for one in found] != [whole[n] for n in range(144, 168)]
    assert [source.consumed for source in before.sources(5)] == whole.consumed(120)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_an_evaluation_reads_each_sample_once_and_pads_the_end(ranks: int) -> None:
    samples = Named("A", 50)
    assert len(Lists(samples, size=24, micro=2, data=Rank(ranks, 0), **WORDS)) == 3
    found = [one for k in range(3) for one in read(samples, k, ranks, 2)]
    assert [row for _, row, past in found if not past] == [("A", 0, n) for n in range(50)]
    assert [past for _, _, past in found] == [False] * 50 + [True] * 22
