"""The model of the protocol: it holds, each part of it is needed, and it does what the code does."""

import pytest

from tests.proof import traces
from tests.proof.__main__ import main
from tests.proof.checking import NAMES, NUMBERS, SOURCES, Model, Setting, missing
from tests.proof.places import PLACES, found
from tests.proof.questions import left_out

#: of `pytest.mark.skipif`: SPIN is no Python package
needs_spin = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Two ranks, whose loads and stores change places."""
    return Model(tmp_path_factory.mktemp("model"), 2, "weak", quick=True)


@pytest.fixture(scope="module")
def player(tmp_path_factory):
    return traces.Player(tmp_path_factory.mktemp("player"), 2)


def test_the_waits_and_fences_of_the_code_stand_in_the_model():
    """A new call of `meet`, `begin`, `post`, a fence or an agreement has a name in the model, or a reason."""
    known = [place for places in PLACES.values() for place in places]
    assert sorted(found()) == sorted(known)
    assert list(PLACES) == list(NAMES)
    text = "".join(source.read_text() for source in SOURCES)
    assert [name for name in NAMES if f"WITHOUT({name})" not in text] == []


@needs_spin
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ALL_REDUCE", "SLOTS", "COMPARED"])
def test_two_equal_calls_hold(model, kind):
    setting = Setting(first=NUMBERS[kind], next=NUMBERS[kind], most_chunks=1)
    answer = model.search(setting)
    assert answer.error is None and answer.whole and answer.states > 1000


@needs_spin
@pytest.mark.slow
@pytest.mark.parametrize("name", ["MEET_FENCE", "AWAIT_FENCE", "POST_FENCE", "FILLED_WAIT", "ALL_REDUCE_END"])
def test_a_wait_or_fence_left_out_gives_a_story(model, name):
    (question,) = (one for one in left_out("weak") if one.name == name)
    answer, story = model.counterexample(question.setting)
    assert answer.error is not None
    assert " · calls " in story[0] and story[0].lstrip().startswith("1 · rank ")
    assert any(" · reads " in line for line in story)
    assert story[-1].startswith("wrong: ")


@needs_spin
@pytest.mark.slow
def test_recorded_runs_are_accepted_and_those_of_a_mutation_are_not(player):
    assert [why for _, why in player.rejected(traces.record(12, 2))] == [None] * 12
    swapped = traces.record(3, 2, mutation="the round is told before the fence")
    assert all("not its step" in why for _, why in player.rejected(swapped))


def test_without_spin_there_is_a_reason(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert main([]) == 0
    assert "skipped: spin" in capsys.readouterr().out
