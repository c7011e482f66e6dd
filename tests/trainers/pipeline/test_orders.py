"""The orders in which the ranks of a pipeline compute: against a simulation, and against figures of the paper."""

import pytest

from tplayers.formulas import bubble, kept_microbatches, timeline
from trainers.pipeline.orders import Action, forwards, in_turn, order

SHAPES = [
    (stages, chunks, microbatches)
    for stages in range(1, 7)
    for chunks in (1, 2, 3, 4)
    for microbatches in range(1, 20)
    if chunks == 1 or microbatches >= stages
]


def seconds(stages, chunks):
    """A forward takes 1, a backward 2, of all chunks of a rank together."""
    return {
        (rank, back, chunk): (2.0 if back else 1.0) / chunks
        for rank in range(stages)
        for back in (False, True)
        for chunk in range(chunks)
    }


def test_every_order_ends_and_waits_no_longer_than_the_bubble():
    for stages, chunks, microbatches in SHAPES:
        orders = [order(stage, stages, microbatches, chunks) for stage in range(stages)]
        every = {Action(back, one, c) for back in (False, True) for one in range(microbatches) for c in range(chunks)}
        assert all(len(one) == len(every) and set(one) == every for one in orders)
        took = timeline(orders, seconds(stages, chunks)).seconds
        assert took == pytest.approx(3 * microbatches * (1 + bubble(stages, microbatches, chunks)))


def test_a_stage_keeps_as_many_microbatches_as_the_formula_says():
    for stages, chunks, microbatches in SHAPES:
        for stage in range(stages):
            kept = most = 0
            for action in order(stage, stages, microbatches, chunks):
                kept += -1 if action.backward else 1
                most = max(most, kept)
            bound = kept_microbatches(stage, stages, microbatches, chunks) * chunks
            assert most == bound


def test_backwards_have_the_order_of_the_microbatches():
    """Sums of gradients then have the order of a run without stages, and the same bits."""
    for stages, chunks, microbatches in SHAPES:
        for stage in range(stages):
            for chunk in range(chunks):
                made = order(stage, stages, microbatches, chunks)
                for back in (False, True):
                    found = [one.microbatch for one in made if one.chunk == chunk and one.backward == back]
                    assert found == list(range(microbatches))


def test_the_orders_of_figure_4():
    """Narayanan et al. 2021, Figure 4: four stages, eight micro-batches; above one chunk, below two."""
    first = "".join(f"{'b' if one.backward else 'f'}{one.microbatch + 1}" for one in order(0, 4, 8))
    assert first == "f1f2f3f4b1f5b2f6b3f7b4f8b5b6b7b8"
    last = "".join(f"{'b' if one.backward else 'f'}{one.microbatch + 1}" for one in order(3, 4, 8))
    assert last == "f1b1f2b2f3b3f4b4f5b5f6b6f7b7f8b8"
    begin = [(one.microbatch + 1, one.chunk) for one in order(0, 4, 8, 2)[:11]]
    assert begin == [*((one, 0) for one in range(1, 5)), *((one, 1) for one in range(1, 5)), (5, 0), (6, 0), (7, 0)]


def test_passes_without_backwards_end_with_any_number_of_microbatches():
    for stages in range(1, 6):
        for chunks in (1, 2, 3):
            for microbatches in range(1, 12):
                orders = [forwards(stages, microbatches, chunks)] * stages
                assert len(orders[0]) == microbatches * chunks
                timeline(orders, seconds(stages, chunks))


def test_interleaving_needs_a_microbatch_for_each_stage():
    with pytest.raises(ValueError, match="3 micro-batches are fewer than the 4 stages, which interleaving needs"):
        order(0, 4, 3, 2)


def test_an_action_says_what_it_is():
    assert str(Action(True, 3, 1)) == "backward of micro-batch 3, chunk 1"


def test_one_order_of_all_ranks_has_each_action_after_what_it_needs():
    for stages, chunks, microbatches in SHAPES:
        training = [order(stage, stages, microbatches, chunks) for stage in range(stages)]
        for orders in (training, [forwards(stages, microbatches, chunks)] * stages):
            found = in_turn(orders)
            for rank, actions in enumerate(orders):
                assert [action for of, action in found if of == rank] == actions
            done = set()
            for rank, (back, microbatch, chunk) in found:
                virtual, step = chunk * stages + rank, 1 if back else -1
                assert virtual == (stages * chunks - 1 if back else 0) or (back, microbatch, virtual + step) in done
                done.add((back, microbatch, virtual))
