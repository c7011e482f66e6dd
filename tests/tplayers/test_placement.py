"""Placement: parts cover the global tensor once, and put together are it again."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tplayers import Constant, Normal, Placement, initialize, new_parameter, placement_of


@st.composite
def all_parts(draw):
    """The placements of all parts of a tensor; its view may cut its dimensions finer, as a fused QKV's does."""
    count = draw(st.integers(1, 4))
    finer = draw(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=3))
    which = draw(st.integers(0, len(finer) - 1))
    inner = draw(st.integers(0, len(finer[which]) - 1))
    finer[which][inner] *= count
    view = tuple(itertools.chain(*finer))
    shape = tuple(math.prod(sizes) for sizes in finer)
    dim = sum(map(len, finer[:which])) + inner
    dim -= draw(st.sampled_from([0, len(view)]))
    given_view = () if view == shape and draw(st.booleans()) else view
    return [Placement(shape, dim=dim, index=index, count=count, view=given_view) for index in range(count)]


@given(all_parts())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_parts_cover_the_tensor_exactly_once(placements):
    first = placements[0]
    whole = torch.arange(math.prod(first.shape)).view(first.shape)
    parts = [placement.part(whole) for placement in placements]
    assert sorted(torch.cat([part.flatten() for part in parts]).tolist()) == list(range(whole.numel()))
    assert torch.equal(first.assemble(parts), whole)
    for placement, part in zip(placements, parts, strict=True):
        assert part.shape == placement.local_shape == new_parameter(placement).shape
        assert len(placement.local_shape) == len(placement.shape)
        assert placement.sharded


@given(all_parts())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_part_view_and_start_say_where_a_part_lies(placements):
    """What a checkpoint in one file writes: a box of the view."""
    for placement in placements:
        whole = torch.arange(math.prod(placement.shape)).view(placement.shape)
        starts, sizes = placement.part_start, placement.part_view
        box = whole.view(placement.view)[tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))]
        assert torch.equal(box.reshape(placement.local_shape), placement.part(whole))


def test_replicated():
    placement = Placement((3, 4))
    whole = torch.arange(12).view(3, 4)
    assert not placement.sharded
    assert placement.local_shape == placement.part_view == placement.view == (3, 4)
    assert placement.part_start == (0, 0)
    assert torch.equal(placement.part(whole), whole)
    assert torch.equal(placement.assemble([whole, whole]), whole)


def test_fused_qkv_by_hand():
    """[q0 q1 q2 q3; k0 ...; v0 ...] over two ranks."""
    whole = torch.tensor([0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23])
    parts = [Placement((12,), dim=1, index=i, count=2, view=(3, 4)).part(whole) for i in range(2)]
    assert [part.tolist() for part in parts] == [[0, 1, 10, 11, 20, 21], [2, 3, 12, 13, 22, 23]]


def test_view_inside_a_later_dimension():
    """The parameter shrinks in the dimension that is split, which need not be the first."""
    placement = Placement((3, 4), dim=1, index=1, count=2, view=(3, 2, 2))
    assert placement.local_shape == (3, 2)
    assert placement.part(torch.arange(12).view(3, 4)).tolist() == [[2, 3], [6, 7], [10, 11]]


@pytest.mark.parametrize(
    "options, words",
    [
        ({"shape": (4, 3), "view": (4, 4)}, "cannot be viewed as"),
        ({"shape": (4, 3), "dim": 1, "count": 2}, "dimension 1 of .* does not divide into 2"),
        ({"shape": (3, 4), "view": (12,), "dim": 0, "count": 3}, "no shape like"),
    ],
)
def test_what_cannot_be_split_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        Placement(**options)


def test_wrong_global_shape_is_refused():
    with pytest.raises(ValueError, match=r"expected a global tensor of shape \(4, 2\), got \(2, 4\)"):
        Placement((4, 2), dim=0, count=2).part(torch.zeros(2, 4))


def test_part_does_not_change_with_the_module():
    """Moving or casting a module keeps the records of its parameters."""
    module = torch.nn.Module()
    module.weight = new_parameter(Placement((4, 2), Normal(1.0), dim=0, index=1, count=2))
    module.plain = torch.nn.Parameter(torch.zeros(3))
    record = module.weight.placement
    module.double().to("cpu").half().float()
    assert placement_of(module.weight) == record
    assert placement_of(module.plain) == Placement((3,))
    initialize(module, 3)
    assert torch.equal(module.weight, record.init.draw((4, 2), 3, "weight")[2:])
    assert torch.equal(module.plain, torch.zeros(3))


def test_initial_values_do_not_enter_comparison():
    assert Placement((2,), Constant(1.0)) == Placement((2,), Normal(0.1))
    assert Placement((2,), dim=0, count=2) != Placement((2,), dim=0, index=1, count=2)
