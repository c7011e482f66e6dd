"""Placement: parts cover the global tensor once, and put together are it again."""

import copy
import itertools
import math
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tplayers import (
    ColumnParallelLinear,
    Constant,
    LayerNorm,
    Normal,
    Placement,
    RowParallelLinear,
    add_parameter,
    initialize,
    placements,
)
from tplayers.placement import unfilled_parameters


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
        add_parameter(module := torch.nn.Module(), "weight", placement)
        assert part.shape == placement.local_shape == module.weight.shape
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


@st.composite
def all_padded_parts(draw):
    """The placements of all parts of a tensor that is padded in dimensions from ``dim`` on, within one of its own."""
    before, after = (tuple(draw(st.lists(st.integers(1, 3), max_size=2))) for _ in range(2))
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda found: max(found) > 1)))
    padded = tuple(size + draw(st.integers(0, 3)) for size in sizes)
    total = padded[0] if padded == sizes else math.prod(padded)
    count = draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
    shape, split = (*before, math.prod(sizes), *after), {"dim": len(before), "count": count}
    view, more = (*before, *sizes, *after), (*before, *padded, *after)
    return [Placement(shape, index=index, view=view, padded=more, **split) for index in range(count)]


@pytest.mark.slow
@given(all_padded_parts())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_padded_parts_are_those_of_the_tensor_with_zeros(placements):
    first = placements[0]
    dim, sizes = first.dim, first.padded or first.view
    whole = torch.arange(1, math.prod(first.shape) + 1).view(first.shape)
    filled = torch.zeros(sizes, dtype=whole.dtype)
    filled[tuple(map(slice, first.view))] = whole.view(first.view)
    outer = math.prod(sizes[:dim])
    expected = filled.view(outer, -1).chunk(first.count, dim=1)
    parts = [placement.part(whole) for placement in placements]
    for placement, part, other in zip(placements, parts, expected, strict=True):
        assert part.shape == placement.local_shape and math.prod(placement.part_view) == part.numel()
        assert torch.equal(part.reshape(outer, -1), other)
        runs = sorted((place, place + number) for _, place, number in placement.runs())
        assert sum(end - start for start, end in runs) * outer == int((part != 0).sum())
    assert torch.equal(first.assemble(parts), whole)
    assert first.sharded


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
        ({"shape": (5, 4), "padded": (6, 4)}, r"\(5, 4\) cannot be padded to \(6, 4\): only dimensions from None on"),
        ({"shape": (5, 4), "dim": 1, "padded": (6, 4)}, "cannot be padded to .*: only dimensions from 1 on may grow"),
        ({"shape": (5, 4), "dim": 0, "padded": (4, 4)}, r"cannot be padded to \(4, 4\)"),
        ({"shape": (5, 4), "dim": 0, "padded": (6,)}, r"cannot be padded to \(6,\)"),
        ({"shape": (5, 4), "dim": 0, "padded": (7, 4), "count": 3}, "dimensions 0 and later of .* do not divide"),
    ],
)
def test_what_cannot_be_split_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        Placement(**options)


def test_wrong_global_shape_is_refused():
    with pytest.raises(ValueError, match=r"expected a global tensor of shape \(4, 2\), got \(2, 4\)"):
        Placement((4, 2), dim=0, count=2).part(torch.zeros(2, 4))


# The module has the records ---------------------------------------------------------------------------------------


def layers(comm):
    """A sharded, a replicated and a partial parameter of ours, and one of somebody else's."""
    return torch.nn.ModuleDict(
        {"up": ColumnParallelLinear(4, 6, comm, blocks=3), "norm": LayerNorm(6, sequence_parallel=True),
         "down": RowParallelLinear(6, 4, comm, bias=False), "theirs": torch.nn.Linear(4, 2)}
    )  # fmt: skip


def assigned(module):
    """As `load_state_dict(assign=True)` leaves it: every parameter is another object."""
    module.load_state_dict({name: p.detach().clone() for name, p in module.named_parameters()}, assign=True)
    return module


def overwritten(module):
    """As conversions are to be done in a torch to come."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        return module.half().float()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


KEEPING = {
    "cast": lambda module: module.double().to("cpu").half().float(),
    "overwritten": overwritten,
    "emptied": lambda module: module.to_empty(device="cpu"),
    "assigned": assigned,
    "copied": copy.deepcopy,
    "copied twice": lambda module: copy.deepcopy(assigned(copy.deepcopy(module))),
    "set": lambda module: setattr(module["up"], "weight", torch.nn.Parameter(torch.zeros(3, 4))) or module,
}


@pytest.mark.parametrize("change", KEEPING)
def test_records_outlive_parameters(ranks_of, change):
    """And so do initial values, which are those of the whole tensor's part."""
    _, second = ranks_of(2)
    module = layers(second)
    records = placements(module)
    partial = {name for name, placement in records.items() if placement.partial}
    assert {name for name, placement in records.items() if placement.sharded} == {"up.weight", "up.bias", "down.weight"}
    assert partial == {"norm.weight", "norm.bias"} and records["theirs.weight"] == Placement((2, 4))
    changed = KEEPING[change](module)
    found = placements(changed)
    assert found == records and list(found) == [name for name, _ in changed.named_parameters()]
    assert {name for name, placement in found.items() if placement.partial} == partial
    initialize(changed, 3)
    for name, placement in list(records.items())[:-2]:
        whole = placement.init.draw(placement.shape, 3, name)
        assert torch.equal(changed.get_parameter(name), placement.part(whole)), name


@pytest.mark.mpi(min_size=2)
def test_a_copy_has_the_communicator_of_its_original(group, random):
    """As for an average of a model's weights: `copy.deepcopy` is collective over nobody."""
    stream = group.comm.new_stream()
    layer = ColumnParallelLinear(4, 4 * group.size, group.comm, overlap_stream=stream, dtype=torch.float64)
    wholes = group.fill(layer)
    other = copy.deepcopy(layer)
    assert other.comm is layer.comm and other.overlap_stream is stream and other.weight is not layer.weight
    x, y = (random(3, 4).requires_grad_() for _ in range(2))
    layer(x).sum().backward()
    other(y).sum().backward()
    assert torch.equal(group.same(x.grad), y.grad)
    torch.testing.assert_close(x.grad, (torch.ones(3, 4 * group.size).double() @ wholes["weight"]).detach())


def test_a_tied_parameter_has_the_record_that_one_of_its_modules_has(ranks_of):
    ours = ColumnParallelLinear(4, 6, ranks_of(2)[0], bias=False)
    theirs = torch.nn.Linear(4, 3, bias=False)
    theirs.weight = ours.weight
    module = torch.nn.ModuleList([theirs, ours])
    assert placements(module) == {"0.weight": placements(ours)["weight"]}
    other = RowParallelLinear(8, 3, ranks_of(2)[0], bias=False)
    other.weight = ours.weight
    with pytest.raises(ValueError, match=r"2\.weight: is shared with a parameter that is placed otherwise"):
        placements(torch.nn.ModuleList([theirs, ours, other]))
    within = torch.nn.Module()
    for name in ("one", "other"):
        add_parameter(within, name, Placement((4,)))
    within.other = within.one
    assert placements(within) == {"one": Placement((4,))}


def test_a_parameter_that_is_not_what_its_record_says_is_named(ranks_of):
    """A parametrization would see a part and take it for the whole."""
    module = layers(ranks_of(2)[0])
    torch.nn.utils.parametrizations.weight_norm(module["down"])
    with pytest.raises(ValueError, match=r"down\.weight: has a placement and is no parameter any more"):
        initialize(module, 1)
    module = layers(ranks_of(2)[0])
    module["up"].weight = torch.nn.Parameter(torch.zeros(6, 4))
    with pytest.raises(
        ValueError, match=r"up\.weight: is \[6, 4\]; by its placement a rank holds \[3, 4\] of \[6, 4\]"
    ):
        placements(module)


def test_initial_values_do_not_enter_comparison():
    assert Placement((2,), Constant(1.0)) == Placement((2,), Normal(0.1))
    assert Placement((2,), dim=0, count=2) != Placement((2,), dim=0, index=1, count=2)


# New parameters hold NaN, unless a reader is about to fill them ----------------------------------------------------


def is_filled(shape=(3, 4)):
    """Whether a new parameter is written to: memory that was freed with other values is given again."""
    for _ in range(8):
        torch.ones(shape)
    return bool(new_parameter(shape, torch.float32).isnan().all())


def new_parameter(shape, dtype):
    module = nn.Module()
    add_parameter(module, "weight", Placement(shape), dtype)
    return module.weight


def test_a_parameter_is_filled_outside_of_the_block_alone(monkeypatch):
    assert is_filled()
    with unfilled_parameters():
        assert not is_filled()
        found = []
        other = threading.Thread(target=lambda: found.append(is_filled()))
        other.start()
        other.join()
        assert found == [True]  # the block is of one thread
        assert new_parameter((2, 5), torch.bfloat16).shape == (2, 5)
        assert new_parameter((2, 5), torch.bfloat16).dtype == torch.bfloat16
    assert is_filled()
    with pytest.raises(KeyError), unfilled_parameters():
        raise KeyError
    assert is_filled()


def test_a_layer_that_is_made_in_the_block_has_its_placement(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "fill_", lambda *_: pytest.fail("a parameter was filled"))
    with unfilled_parameters():
        module = nn.Module()
        add_parameter(module, "weight", Placement((4, 2)))
        assert module.weight.shape == (4, 2) and module.weight.requires_grad
        assert LayerNorm(8).weight.shape == (8,)
