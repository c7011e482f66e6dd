"""Every layer on split fields against torch's on the whole field, in cases that hypothesis draws."""

import math

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st
from torch import nn

import tplayers
from commengine import CartesianGrid, Communicator, Decomposition
from tests.support.fields.comparison import draw, equals_torchs
from tests.support.fields.second_derivatives import equals_torchs_twice, tangents_equal_torchs

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSE = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
MAX = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
AVG = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}
ADAPTIVE_MAX = {1: nn.AdaptiveMaxPool1d, 2: nn.AdaptiveMaxPool2d, 3: nn.AdaptiveMaxPool3d}
ADAPTIVE_AVG = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}
BATCH = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
INSTANCE = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}
#: the grids of a number of ranks
GRIDS = {
    1: [(1,), (1, 1), (1, 1, 1)],
    2: [(2,), (2, 1), (1, 2), (1, 2, 1), (1, 1, 2)],
    3: [(3,), (1, 3), (3, 1), (3, 1, 1)],
    4: [(4,), (2, 2), (4, 1), (1, 4), (2, 1, 2), (1, 2, 2)],
}


@pytest.fixture(scope="module")
def comms(mpi_world):
    """Communicators of 1 to 4 ranks, as far as there are so many, and a stream of each; None outside of them."""
    with Communicator(mpi_world, device="cpu") as world:
        parts = {n: world.split(0 if world.rank < n else None) for n in range(1, world.size)}
        parts[world.size] = world
        streams = {n: comm and comm.new_stream() for n, comm in parts.items()}
        yield parts, streams
        for part in parts.values():
            if part is not None and part is not world:
                part.close()


@st.composite
def cases(draw_, ranks):
    """(number of ranks, shape of the grid, block sizes, kind of layer, numbers for it)."""
    shape = draw_(st.sampled_from(GRIDS[ranks]))
    axes = len(shape)
    most = {1: 9, 2: 6, 3: 4}[axes]
    blocks = tuple(tuple(draw_(st.integers(1, most)) for _ in range(p)) for p in shape)
    kind = draw_(
        st.sampled_from(
            ["conv"] * 4
            + ["transpose"] * 2
            + ["max", "avg", "up", "batch", "group", "layer", "adaptive", "adaptive", "instance", "instance"]
        )
    )

    def each(low, high):
        return tuple(draw_(st.integers(low, high)) for _ in shape)

    case = {
        "kernel": each(1, 5 if axes < 3 else 3), "stride": each(1, 3), "dilation": each(1, 3), "padding": each(0, 4),
        "more": each(0, 2), "groups": draw_(st.sampled_from([1, 1, 2])), "bias": draw_(st.booleans()),
        "mode": draw_(st.sampled_from(["zeros", "zeros", "reflect", "replicate", "circular"])),
        "same": draw_(st.sampled_from([False, False, True])), "linear": draw_(st.booleans()),
        "batch": draw_(st.integers(1, 2)), "channels_last": draw_(st.booleans()),
        "overlap": draw_(st.booleans()),
    }  # fmt: skip
    return shape, blocks, kind, case


class ImpossibleLayer(Exception):
    """torch refuses the drawn layer, or its result is not defined."""


def possible(condition):
    if not condition:
        raise ImpossibleLayer


def pair(kind, case, grid, field, stream):
    """The layer and torch's; None where torch has no such layer."""
    axes, f64 = len(grid.shape), torch.float64
    kernel, stride, dilation, padding = (case[name] for name in ("kernel", "stride", "dilation", "padding"))
    groups, bias, mode = case["groups"], case["bias"], case["mode"]
    if kind == "conv":
        if case["same"]:
            stride, padding = (1,) * axes, "same"
            wide = [math.ceil(d * (k - 1) / 2) for k, d in zip(kernel, dilation, strict=True)]
        else:
            wide = padding
        if mode in ("reflect", "circular"):
            possible(all(w <= n - (mode == "reflect") for w, n in zip(wide, field.shape, strict=True)))
        options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "bias": bias}
        options |= {"padding_mode": mode, "dtype": f64}
        possible(
            case["same"]
            or all(n + 2 * p > d * (k - 1) for n, p, d, k in zip(field.shape, padding, dilation, kernel, strict=True))
        )
        ours = tplayers.FieldConv(2, 4, kernel, grid, field, **options, overlap_stream=stream)
        return ours, CONV[axes](2, 4, kernel, **options)
    if kind == "transpose":
        possible(all(m < max(s, d) for m, s, d in zip(case["more"], stride, dilation, strict=True)))
        options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "bias": bias}
        options |= {"output_padding": case["more"], "dtype": f64}
        ours = tplayers.FieldConvTranspose(4, 2, kernel, grid, field, **options)
        return ours, TRANSPOSE[axes](4, 2, kernel, **options)
    if kind in ("max", "avg"):
        padding = tuple(min(p, k // 2) for p, k in zip(padding, kernel, strict=True))
        if kind == "max":
            # torch's result for a window without any input is -inf, with a gradient that goes anywhere
            possible(all(not p or d <= n for p, d, n in zip(padding, dilation, field.shape, strict=True)))
            options = {"stride": stride, "padding": padding, "dilation": dilation, "ceil_mode": case["same"]}
            return tplayers.FieldMaxPool(kernel, grid, field, **options), MAX[axes](kernel, **options)
        possible(axes < 3 or all(n >= k for n, k in zip(field.shape, kernel, strict=True)))  # torch's AvgPool3d asks so
        options = {"stride": stride, "padding": padding, "ceil_mode": case["same"], "count_include_pad": bias}
        return tplayers.FieldAvgPool(kernel, grid, field, **options), AVG[axes](kernel, **options)
    if kind == "adaptive":
        size = tuple(None if k == 2 else k + s for k, s in zip(kernel, stride, strict=True))
        size = size[0] or field.shape[0] if axes == 1 else size  # torch's of one axis takes no None
        if bias:
            return tplayers.FieldAdaptiveMaxPool(size, grid, field), ADAPTIVE_MAX[axes](size)
        return tplayers.FieldAdaptiveAvgPool(size, grid, field), ADAPTIVE_AVG[axes](size)
    if kind == "up":
        mode = "linear" if case["linear"] else "nearest"
        theirs = nn.Upsample(scale_factor=tuple(map(float, stride)), mode=LINEAR[axes] if case["linear"] else mode)
        return tplayers.FieldUpsample(stride, grid, field, mode=mode), theirs
    if kind in ("batch", "instance"):
        possible((case["batch"] if kind == "batch" else 1) * field.points() > 1)
        momentum = None if case["linear"] else 0.3
        options = {"affine": bias, "track_running_stats": case["same"], "momentum": momentum, "dtype": f64}
        ours = tplayers.FieldBatchNorm if kind == "batch" else tplayers.FieldInstanceNorm
        ours, theirs = ours(4, grid, field, **options), (BATCH if kind == "batch" else INSTANCE)[axes](4, **options)
    elif kind == "group":
        options = {"affine": bias, "dtype": f64}
        ours, theirs = tplayers.FieldGroupNorm(groups, 4, grid, field, **options), nn.GroupNorm(groups, 4, **options)
    else:
        options = {"elementwise_affine": bias, "dtype": f64}
        ours = tplayers.FieldLayerNorm(4, grid, field, **options)
        theirs = nn.LayerNorm([4, *field.shape], **options)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(3))
    return ours, theirs


def one_case(comms, streams, drawn):
    """Compare, and return whether the ranks had enough points for the layer; None: torch has no such layer."""
    shape, blocks, kind, case = drawn
    comm = comms[math.prod(shape)]
    field = Decomposition(blocks)
    if comm is None:
        return True
    grid = CartesianGrid(comm, shape)
    torch.manual_seed(5)
    try:
        ours, theirs = pair(kind, case, grid, field, streams[grid.size] if case["overlap"] else None)
    except ImpossibleLayer:
        return None
    except ValueError as error:
        if "output" not in str(error):
            raise
        return False  # too few points: on every rank, or the ranks would not agree on the number of cases
    channels = {"conv": 2}.get(kind, 4)
    whole = draw(case["batch"], channels, *field.shape)
    if case["channels_last"] and whole.dim() > 3:
        whole = whole.to(memory_format=torch.channels_last if whole.dim() == 4 else torch.channels_last_3d)
    equals_torchs(ours, theirs, whole, grid)
    if not case["overlap"] or kind != "conv":
        equals_torchs_twice(ours, theirs, whole, grid)
        if kind in ("conv", "transpose", "max", "avg", "up", "adaptive"):
            tangents_equal_torchs(ours, theirs, whole, grid)
    return True


def sizes(comms):
    """The numbers of ranks to run on: all, and one less, so that four ranks test grids of three, too."""
    return [n for n in comms[0] if n in GRIDS and n >= max(comms[0]) - 1]


def run(comms, world, ranks, examples):
    """Rank 0 draws the cases: hypothesis draws others on ranks that have imported other modules."""
    compared = []

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],  # no shrinking, in which a rank that did not fail would have no part
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(ranks))
    def one(drawn):
        world.bcast(drawn)
        done = one_case(*comms, drawn)
        if done is None:
            reject()
        compared.append(done)

    if world.rank == 0:
        try:
            one()
        finally:
            world.bcast(None)
        assert sum(compared) >= 0.8 * examples
    else:
        while (drawn := world.bcast(None)) is not None:
            one_case(*comms, drawn)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using padding='same'")  # of torch's layer
def test_layers_equal_torchs(comms, mpi_world):
    """On more than half of the ranks: jobs of fewer ranks have the others."""
    for ranks in sizes(comms):
        if 2 * ranks > mpi_world.size:
            run(comms, mpi_world, ranks, 24 if ranks < 3 else 12)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_layers_equal_torchs_in_500_cases(comms, mpi_world):
    for ranks in sizes(comms):
        run(comms, mpi_world, ranks, 500)
