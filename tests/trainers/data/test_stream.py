"""The samples of a run by number: in proportion, each source in epochs, and so after any change of the blend."""

import json
import random
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.corpora import Named
from trainers.data.indexed import IndexedDataset
from trainers.data.indexed_writer import IndexedDatasetWriter
from trainers.data.permutation import HELD, EpochPermutation
from trainers.data.sentences.samples import SampleRules, SentenceSamples
from trainers.data.stream import MOCK, SampleStream, Source, record_of_one
from trainers.data.wordpiece import WordPieces

SEED = 5


def source(name: str, weight: str, count: int, data: str = "") -> Source:
    """A source of ``count`` samples; its data is known by the name, if no other is given."""
    return Source(name, f"data of {data or name}", Fraction(weight), Named(name, count))


def stream(*sources: Source) -> SampleStream:
    return SampleStream(sources, SEED)


def through_json(record: Any) -> Any:
    return json.loads(json.dumps(record))


def resumed(before: SampleStream, n: int, *sources: Source) -> SampleStream:
    after = stream(*sources)
    after.continue_from(n, through_json(before.record(n)))
    return after


A, B, C = source("A", "0.7", 10), source("B", "0.3", 7), source("C", "0.5", 4)


def test_each_source_is_read_in_its_own_epochs() -> None:
    """Every sample of an epoch once, in the permutation of that epoch, and with the epoch's number."""
    read: dict[str, list[tuple[int, int]]] = {"A": [], "B": []}
    blend = stream(A, B)
    for n in range(200):
        name, epoch, index = blend[n]
        read[name].append((epoch, index))
    assert {name: len(found) for name, found in read.items()} == {"A": 140, "B": 60}
    for name, count in (("A", 10), ("B", 7)):
        order = EpochPermutation(count, SEED)
        assert read[name] == [(k // count, order[k]) for k in range(len(read[name]))]


def test_a_blend_of_berts_samples_masks_them_anew_in_each_epoch(tmp_path: Path) -> None:
    """A sample of masked words is a function of (seed, epoch, index), whatever the blend."""
    pieces, rules = WordPieces.mock(40), SampleRules(seq_length=24, seed=SEED)
    sources = []
    for name, documents, weight in (("A", 6, "0.7"), ("B", 3, "0.3")):
        with IndexedDatasetWriter(tmp_path / name, "u2") as writer:
            for n in range(documents):
                writer.add_document(np.arange(30) % 35 + 5, [10 + n, 10 - n, 10])
        samples = SentenceSamples(IndexedDataset(tmp_path / name), range(documents), pieces, rules)
        sources.append(Source(name, name, Fraction(weight), samples))
    blend = stream(*sources)
    found: dict[str, list[Any]] = {"A": [], "B": []}
    for n in range(60):
        of, k = blend.place(n)
        chosen = blend.sources[of]
        size, expected = len(chosen.training), EpochPermutation(len(chosen.training), SEED)
        row, truth = blend[n], chosen.training.draw(k // size, expected[k])
        assert all(np.array_equal(one, other) for one, other in zip(row, truth, strict=True))
        found[chosen.name].append((expected[k], k // size, row.tokens.tolist()))
    for rows in found.values():
        of_first = [tokens for index, _, tokens in rows if index == 0]
        assert len(of_first) > 2 and len({tuple(tokens) for tokens in of_first}) > 1  # not the same in every epoch


def test_one_source_is_read_as_before_there_were_blends() -> None:
    order = EpochPermutation(10, SEED)
    for alone in (stream(A), stream(source("A", "3", 10))):
        assert [alone[n] for n in range(35)] == [("A", n // 10, order[n]) for n in range(35)]


def test_samples_are_a_function_of_their_number_and_of_nothing_else() -> None:
    """The order of asking, that of the sources, the scale of the weights and the place of the data do not count."""
    forward = stream(A, B, C)
    expected = [forward[n] for n in range(300)]
    backward = stream(source("C", "5", 4), source("A", "7", 10), source("B", "3", 7))
    assert [backward[n] for n in reversed(range(300))] == expected[::-1]
    ties = [source(name, "1", 9) for name in "ABCD"]  # the tree must not settle them by the order on the command line
    one, other = stream(*ties), stream(*ties[::-1])
    assert [one[n] for n in range(100)] == [other[n] for n in range(100)]
    moved = stream(source("elsewhere", "0.7", 10, data="A"), B, C)
    assert [moved[n][1:] for n in range(300)] == [found[1:] for found in expected]


@pytest.mark.parametrize("stop", [0, 1, 13, 50])
def test_resuming_unchanged_changes_nothing(stop: int) -> None:
    """Also a second time, with the sources in another order, and with one of weight 0 that comes or goes."""
    straight = stream(A, B, C)
    idle = source("D", "0", 3)
    again = resumed(straight, stop, C, B, A)
    third = resumed(again, stop + 8, A, B, C, idle)
    fourth = resumed(third, stop + 9, A, B, C)
    for later in (again, third, fourth):
        assert [later[n] for n in range(stop + 9, stop + 60)] == [straight[n] for n in range(stop + 9, stop + 60)]
    assert stream(A, B, C).continue_from(stop, straight.record(stop)) == []


def test_after_new_weights_each_source_goes_on_where_it_was() -> None:
    before = stream(A, B)
    after = resumed(before, 15, source("A", "0.2", 10), source("B", "0.8", 7))
    counts = Counter(before[n][0] for n in range(15))
    assert before.consumed(15) == after.consumed(15) == [counts["A"], counts["B"]]
    orders = {"A": EpochPermutation(10, SEED), "B": EpochPermutation(7, SEED)}
    for n in range(15, 400):
        name, epoch, index = after[n]
        k = counts[name]
        assert (epoch, index) == (k // orders[name].size, orders[name][k])
        counts[name] += 1
        drawn = n + 1 - 15
        assert abs(counts["A"] - before.consumed(15)[0] - 0.2 * drawn) <= 0.5 + 1e-9


@pytest.mark.parametrize("trial", range(6))
def test_nothing_repeats_before_its_epoch_ends_whatever_changes(trial: int) -> None:
    """Random histories: weights change, sources come, go and come back, runs are resumed in between. Counted here."""
    draw = random.Random(trial)
    count = {name: draw.randint(1, 40) for name in "ABCDEFGHIJ"}
    used: dict[str, list[int]] = {name: [] for name in count}
    n, current = 0, None
    for _ in range(12):
        names = draw.sample(sorted(count), draw.randint(1, len(count)))
        sources = [source(name, str(draw.choice([0.1, 0.5, 1, 3, 20])), count[name]) for name in names]
        for _ in range(2):  # changed, then resumed unchanged
            current = resumed(current, n, *sources) if current is not None else stream(*sources)
            for _ in range(draw.randint(0, 60)):
                name, epoch, index = current[n]
                assert epoch == len(used[name]) // count[name]
                used[name].append(index)
                n += 1
            written = {record["name"]: record["consumed"] for record in current.record(n)["sources"]}
            assert {name: consumed for name, consumed in written.items() if consumed} == {
                name: len(found) for name, found in used.items() if found
            }
    for name, found in used.items():
        epochs = [found[k : k + count[name]] for k in range(0, len(found), count[name])]
        assert all(len(set(epoch)) == len(epoch) for epoch in epochs), name


def test_fifty_sources_and_a_change_of_all_their_weights() -> None:
    sizes = {f"{number:02}": 3 + number for number in range(50)}
    first = stream(*(source(name, str(1 + size), size) for name, size in sizes.items()))
    used = Counter(first[n][::2] for n in range(1000))
    second = resumed(first, 1000, *(source(name, str(100 - size), size) for name, size in sizes.items()))
    used += Counter(second[n][::2] for n in range(1000, 3000))
    for name, size in sizes.items():
        times = [used[name, index] for index in range(size)]
        assert max(times) - min(times) <= 1  # no sample a second time more than another
        share = Fraction(1 + size, 50 + sum(sizes.values()))
        assert abs(sum(times) - 1000 * share - 2000 * Fraction(100 - size, 5000 - sum(sizes.values()))) < 4


def test_what_the_user_is_told_of_a_change() -> None:
    before = stream(A, B)
    (line,) = stream(source("A", "0.5", 10), source("C", "0.5", 4)).continue_from(1000, before.record(1000))
    assert line == (
        "other data from sample 1,000 on: A 0.5 (0.7 before, 700 samples read); C 0.5 (new in this run); "
        "B no longer (300 samples read)"
    )
    (line,) = stream(source("A", "1", 12, data="changed")).continue_from(10, stream(A).record(10))
    assert "A 1 (not the data of that name that the checkpoint knows, so read from its first sample)" in line


def test_another_vocabulary_is_said() -> None:
    def of(vocabulary: str | None) -> SampleStream:
        return SampleStream([A, B], SEED, vocabulary)

    for saved, ours in ((None, "b"), ("a", None), ("a", "a")):
        assert of(ours).continue_from(10, through_json(of(saved).record(10))) == []
    after = of("b")
    (line,) = after.continue_from(10, through_json(of("a").record(10)))
    assert line == "another tokenizer from sample 10 on: its vocabulary is not that of the checkpoint's run"
    assert after.record(10)["vocabulary"] == "b" and after.record(10)["order"] == 2
    many = [source("A", "1", HELD + 1)]
    for record, lines in ((stream(*many).record(10), 0), (stream(*many).record(10) | {"order": 1}, 1)):
        said = stream(*many).continue_from(10, record)
        assert len(said) == lines and all("another order of the samples from sample 10 on" in one for one in said)
    assert stream(A).continue_from(10, stream(A).record(10) | {"order": 1}) == []
    old = of("a").record(10)
    del old["vocabulary"]  # of a version that did not record it
    assert of("b").continue_from(10, old) == []


def test_a_source_that_comes_back_goes_on() -> None:
    away = resumed(stream(A, B), 10, B)
    back = resumed(away, 14, A, B)
    assert back.consumed(14) == [7, 7]
    assert [back.place(n) for n in range(14, 18)] == [(0, 7), (1, 7), (0, 8), (0, 9)]


@pytest.mark.parametrize("name", ["A", "no longer there", MOCK])
def test_a_checkpoint_of_an_older_version_was_of_one_source(name: str) -> None:
    """Such a version did not compare --data-path, so a run of one source goes on whatever its name is."""
    straight, after = stream(A), stream(A)
    assert after.continue_from(23, record_of_one(name, 23)) == []
    assert [after[n] for n in range(23, 60)] == [straight[n] for n in range(23, 60)]
    assert after.record(30) == straight.record(30)


def test_an_older_run_goes_on_with_a_blend() -> None:
    after = stream(A, B)
    (line,) = after.continue_from(23, record_of_one("A", 23))
    assert after.consumed(23) == [23, 0] and "A 0.7 (1 before, 23 samples read); B 0.3 (new in this run)" in line
    other = stream(B, C)
    (line,) = other.continue_from(23, record_of_one("A", 23))
    assert other.consumed(23) == [0, 0] and "A no longer (23 samples read)" in line
    later = resumed(other, 30, A)  # not taken for the old source's data because it is the only one
    assert later.consumed(30) == [23]
    later = resumed(other, 30, source("D", "1", 9))
    assert later.consumed(30) == [0]


DAMAGE = {
    "start after the end": lambda record: record.update(start=99),
    "a count is too large": lambda record: record["sources"][0].update(consumed=8),
    "a count is negative": lambda record: record["sources"][0].update(consumed=-7),
    "weights do not sum to 1": lambda record: record["sources"][0].update(weight="1/3"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_record_is_refused(damage: str) -> None:
    record = through_json(stream(A, B).record(10))
    stream(A, B).continue_from(10, record)
    DAMAGE[damage](record)
    with pytest.raises(ValueError, match="record of its data is damaged"):
        stream(A, B).continue_from(10, record)


def test_a_record_of_another_iteration_is_refused() -> None:
    with pytest.raises(ValueError, match="not one of 11 samples"):
        stream(A, B).continue_from(11, stream(A, B).record(10))
