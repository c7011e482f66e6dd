"""The cut of a model into stages, and the time of schedules."""

import itertools
from dataclasses import replace

import pytest

from tplayers import formulas
from tplayers.formulas import StageShape, bubble, cut_layers, kept_microbatches, output_layers, timeline

GPT = formulas.TransformerShape(layers=24, hidden=1024, heads=16, seq=1024, vocab=51200)


def every_cut(layers, stages):
    for bounds in itertools.combinations(range(1, layers), stages - 1):
        yield [high - low for low, high in zip((0, *bounds), (*bounds, layers), strict=True)]


def most(counts, last):
    return max((*counts[:-1], counts[-1] + last))


@pytest.mark.parametrize("last", [0.0, 0.4, 1.0, 1.7, 3.0, 20.0])
@pytest.mark.parametrize("layers", range(1, 10))
def test_no_other_cut_has_a_cheaper_stage_that_costs_most(layers, last):
    for stages in range(1, layers + 1):
        cut = cut_layers(layers, stages, last)
        assert [layer for part in cut for layer in part] == list(range(layers))
        found = [len(part) for part in cut]
        assert min(found) >= 1
        assert most(found, last) == min(most(counts, last) for counts in every_cut(layers, stages))


def test_of_equal_cuts_the_later_stages_have_more_layers():
    assert [len(part) for part in cut_layers(10, 4)] == [2, 2, 3, 3]


@pytest.mark.parametrize("stages", [0, 5])
def test_a_stage_without_a_layer_is_refused(stages):
    with pytest.raises(ValueError, match=f"4 layers cannot be cut into {stages} stages: each needs a layer"):
        cut_layers(4, stages)


def test_the_output_layer_counts_as_its_products():
    assert output_layers(GPT) == pytest.approx(2 * 1024 * 51200 / (24 * 1024**2 * (1 + 1024 / (6 * 1024))))


def one_by_one(stages, microbatches):
    """GPipe: all forwards, then all backwards."""
    return [[(back, one, 0) for back in (False, True) for one in range(microbatches)] for _ in range(stages)]


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 1), (2, 4), (4, 2), (4, 8)])
def test_the_timeline_of_all_forwards_and_then_all_backwards_has_the_bubble(stages, microbatches):
    seconds = {(rank, back, 0): 2.0 if back else 1.0 for rank in range(stages) for back in (False, True)}
    found = timeline(one_by_one(stages, microbatches), seconds)
    assert found.seconds == pytest.approx(3 * microbatches * (1 + bubble(stages, microbatches)))
    for rank in range(stages):
        assert found.idle(rank) == pytest.approx((stages - 1) / (microbatches + stages - 1))


def test_messages_delay_what_needs_them():
    seconds = {(rank, back, 0): 1.0 for rank in range(2) for back in (False, True)}
    found = timeline(one_by_one(2, 1), seconds, message=0.25)
    assert found.spans[1][False, 0, 0] == (1.25, 2.25)
    assert found.spans[0][True, 0, 0] == (3.5, 4.5)
    assert timeline(one_by_one(1, 1), {(0, False, 0): 1.0, (0, True, 0): 1.0}, message=9.0).seconds == 2.0


def test_orders_that_wait_for_each_other_are_an_error():
    orders = [[(True, 0, 0), (False, 0, 0)], [(False, 0, 0), (True, 0, 0)]]
    with pytest.raises(ValueError, match="the orders wait for each other"):
        timeline(orders, {(rank, back, 0): 1.0 for rank in range(2) for back in (False, True)})


def test_an_early_stage_keeps_more_microbatches():
    assert [kept_microbatches(stage, 4, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert kept_microbatches(0, 4, 2) == 2
    assert kept_microbatches(0, 4, 8, chunks=2) == pytest.approx(4 * (1 + 3 / 8))  # L (1 + (p - 1) / (p v)) [P]


def test_each_link_has_a_message_of_its_own():
    seconds = {(rank, back, chunk): 1.0 for rank in range(2) for back in (False, True) for chunk in range(2)}
    orders = [[(back, 0, chunk) for back in (False, True) for chunk in ((1, 0) if back else (0, 1))]] * 2
    spans = timeline(orders, seconds, [0.25, 0.5]).spans
    assert spans[1][False, 0, 0][0] == 1.25  # rank 0 to 1
    assert spans[0][False, 0, 1][0] == 2.75  # and from the last one to the first
    assert spans[1][True, 0, 0][0] == spans[0][True, 0, 1][1] + 0.5


@pytest.mark.parametrize(("untied", "copies"), [(False, 1), (True, 0)])
@pytest.mark.parametrize("tensor", [1, 4])
def test_the_stages_parameters_are_the_models_and_a_copy_of_a_tied_embedding(tensor, untied, copies):
    shape = replace(GPT, untied=untied)
    parts = [
        StageShape(sum(one.layers for one in own), own[0].first, own[-1].last) for own in formulas.stages(shape, 4, 3)
    ]
    assert [part.layers for part in parts] == [6] * 4 and [part.first for part in parts] == [True, False, False, False]
    found = sum(formulas.parameters(shape, tensor, part) for part in parts)
    assert found == formulas.parameters(shape, tensor) + copies * 51200 * 1024 // tensor


def test_stages_are_cut_by_cost_and_chunks_are_equal():
    assert [own[0].layers for own in formulas.stages(GPT, 3)] == [
        9,
        9,
        6,
    ]  # the output layer costs as much as 3.7 layers
    assert formulas.stages(GPT, 2, 3)[1] == [
        StageShape(4, False, False),
        StageShape(4, False, False),
        StageShape(4, False),
    ]
    with pytest.raises(ValueError, match="24 layers are no 5 equal chunks on each of 2 stages"):
        formulas.stages(GPT, 2, 5)
