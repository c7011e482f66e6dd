"""A step on a layout: what a stage has adds up to the whole, and counts and bytes are those of the papers."""

from collections import Counter
from dataclasses import replace

import pytest

from tplayers.formulas import KeptTensors, StageShape, StepLayout, StepModel, TransformerShape, equal_buckets

SHAPE = TransformerShape(6, 64, 8, 32, 128)
LAYOUT = StepLayout(tensor=2, data=4, micro_batch=3, micro_batches=5, context=2, method="ring")


def moved(found):
    """How often each kind of collective runs, by group."""
    counts = Counter()
    for group, one in found:
        counts[group, one.operation, one.part, one.phase, one.size, one.ranks] += one.count
    return counts


@pytest.mark.parametrize("model", ["gpt", "bert"])
def test_the_stages_of_a_pipeline_have_together_what_the_whole_model_has(model):
    step = StepModel(replace(SHAPE, experts=4, ffn=64) if model == "gpt" else
                     replace(SHAPE, model=model), replace(LAYOUT, expert=2 if model == "gpt" else 1))  # fmt: skip
    parts = [StageShape(2, True, False), StageShape(3, False, False), StageShape(1, False, True)]
    summed = sum((moved(step.of_microbatch(part)) for part in parts), Counter())
    assert summed == moved(step.of_microbatch()) and {group for group, *_ in summed} >= {"tensor", "context"}
    assert not any(one.part == "loss" for part in parts[:2] for _, one in step.of_microbatch(part))
    assert not any(one.part == "embedding" for part in parts[1:] for _, one in step.of_microbatch(part))


def test_a_layer_has_two_all_reduces_each_way_of_b_s_h_elements():
    """Shoeybi et al. 2019, section 3; in half precision, with half of each sequence on a context rank."""
    of_layers = [one for group, one in StepModel(SHAPE, LAYOUT).of_microbatch() if (group, one.part) == (
        "tensor", "layers")]  # fmt: skip
    assert {(one.operation, one.phase): one.count for one in of_layers} == {
        ("all_reduce", "forward"): 12, ("all_reduce", "backward"): 12
    }  # fmt: skip
    assert {one.size for one in of_layers} == {2 * 3 * 16 * 64}


def test_gradients_are_summed_over_all_that_have_the_parameter():
    step = StepModel(SHAPE, replace(LAYOUT, expert=2), element_bytes=2, gradient_bytes=4)
    ((group, one),) = step.of_gradients(1000)
    assert (group, one.ranks, one.size, one.operation) == ("replicas", 8, 4000, "all_reduce")
    ((group, one),) = step.of_gradients(1000, experts=True)
    assert (group, one.ranks) == ("expert_replicas", 4) and step.of_gradients(0) == []
    zero1 = replace(step, layout=replace(LAYOUT, zero1=True, context=1))
    found = [(group, one.operation, one.size) for group, one in zero1.of_gradients(1000, equal_buckets(1000, 400))]
    assert [name for _, name, _ in found] == ["reduce_scatter", "all_gather"] * 3 and found[0][0] == "data"
    assert sum(size for *_, size in found[::2]) == pytest.approx(4000)
    assert equal_buckets(0, 10) == [0] and equal_buckets(30, 10) == [10, 10, 10]


def test_the_first_stage_keeps_most_and_all_stages_share_the_parameters():
    """A stage keeps min(p - i, m) micro-batches (Narayanan et al. 2021, section 2.2); 18 bytes a parameter."""
    step = StepModel(replace(SHAPE, vocab=2), replace(LAYOUT, pipeline=3, context=1))
    parts = [StageShape(2, number == 0, number == 2) for number in range(3)]
    uses = step.memory(KeptTensors(hidden_dropout=False, scores="none"), parts)
    kept = [use["activations"] for use in uses]
    assert kept[1] / 2 == pytest.approx(kept[0] / 3, rel=0.01) and kept == sorted(kept, reverse=True)
    per_layer = (12 * 64**2 + 13 * 64) / 2
    assert uses[1]["parameters and optimizer"] == pytest.approx(18 * 2 * per_layer, rel=0.02)
    assert step.layout.ranks == 24 and step.layout.batch == 60
