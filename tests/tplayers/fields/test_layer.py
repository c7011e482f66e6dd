"""What all layers on split fields share: bad input raises on every rank, gradients are summed once."""

import pytest
import torch

import commengine
import tplayers
from commengine import CartesianGrid, CollectiveError, CollectiveMismatch, Communicator, Decomposition
from tests.support.fields.comparison import close, cut, draw, same_bits

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def grid(mpi_world):
    with Communicator(mpi_world, device="cpu") as comm:
        yield CartesianGrid(comm, (1, comm.size))


def test_a_decomposition_that_does_not_fit_the_grid(grid):
    with pytest.raises(ValueError, match=rf"does not fit a grid of \[1, {grid.size}\] ranks"):
        tplayers.FieldConv(1, 1, 3, grid, Decomposition(((8,), (2,) * (grid.size + 1))))
    with pytest.raises(ValueError, match="a rank has no points of the input"):
        tplayers.FieldConv(1, 1, 3, grid, Decomposition(((8,), (0,) * grid.size)))


def test_arguments_in_another_order(grid):
    field = grid.decompose((8, 8 * grid.size))
    with pytest.raises(TypeError, match="FieldConv: grid must be a CartesianGrid, not Decomposition"):
        tplayers.FieldConv(1, 1, 3, field, grid)
    with pytest.raises(TypeError, match=r"FieldMaxPool: input must be a Decomposition, such as .*, not tuple"):
        tplayers.FieldMaxPool(2, grid, (8, 8))
    with pytest.raises(TypeError, match=r"UNet: input must be a Decomposition, .* not tuple"):
        tplayers.UNet(1, 1, grid, (8, 8))


def test_a_field_that_is_too_small_for_one_output(grid):
    field = Decomposition(((4,), (4,) * grid.size))
    message = r"some ranks would have no output: .* smaller kernel"
    with pytest.raises(ValueError, match=message):
        tplayers.FieldConv(1, 1, (4, 1), grid, field, dilation=2)
    with pytest.raises(ValueError, match=message):
        tplayers.FieldConvTranspose(1, 1, 1, grid, field, padding=2)


def test_ranks_that_would_have_no_output(grid):
    field = Decomposition(((4,), (2,) * grid.size))
    with pytest.raises(ValueError, match="would have no output"):
        tplayers.FieldConv(1, 1, (1, 2 * grid.size if grid.size > 1 else 3), grid, field)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"padding": 4, "padding_mode": "reflect"}, "too few for padding='reflect' of width 4"),
        ({"padding_mode": "mirror"}, "'mirror' must be one of zeros, circular, reflect, replicate"),
        ({"padding": "same", "stride": 2}, "'same' with stride 1"),
        ({"stride": 0}, "stride=0 must be whole numbers of at least 1"),
        ({"dilation": (1, 1, 1)}, "one value, or one for each of the 2 axes"),
        ({"groups": 3}, "groups=3 must divide in_channels=2 and out_channels=2"),
        ({"output": Decomposition(((4,), (1,)))}, "must cut"),
    ],
)
def test_arguments_of_a_convolution(grid, arguments, message):
    field = Decomposition(((4,), (4,) * grid.size))
    with pytest.raises(ValueError, match=message):
        tplayers.FieldConv(2, 2, 1, grid, field, **arguments)


def test_arguments_of_other_layers(grid):
    field = grid.decompose((8, 8 * grid.size))
    with pytest.raises(ValueError, match="at most half of kernel_size=2"):
        tplayers.FieldMaxPool(2, grid, field, padding=2)
    with pytest.raises(ValueError, match="smaller than the stride or the dilation"):
        tplayers.FieldConvTranspose(1, 1, 3, grid, field, stride=2, output_padding=2)
    with pytest.raises(ValueError, match="mode='cubic' must be one of nearest, nearest-exact, linear"):
        tplayers.FieldUpsample(2, grid, field, mode="cubic")
    with pytest.raises(ValueError, match="num_groups=3 must divide"):
        tplayers.FieldGroupNorm(3, 4, grid, field)


@pytest.mark.mpi(min_size=2)
def test_a_block_of_another_shape_on_one_rank_raises_on_all(grid):
    field = grid.decompose((8, 8 * grid.size))
    layer = tplayers.FieldConv(2, 2, 3, grid, field, padding=1)
    tplayers.initialize(layer, 1)
    block = torch.zeros(1, 2, 8, 7 if grid.rank == 0 else 8)
    with pytest.raises(
        CollectiveError, match=r"rank 0: FieldConv needs a block \[batch, 2, 8, 8\], not \[1, 2, 8, 7\]"
    ):
        layer(block)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda x: x[0], r"needs a block \[batch, 2, 8, 8\], not \[2, 8, 8\]"),
        (lambda x: x.long(), "needs a real field, not torch.int64"),
        (lambda x: x.double(), "has parameters of torch.float32, and the field is torch.float64: convert one of them"),
        (lambda x: x.numpy(), r"needs a torch.Tensor, not ndarray: torch.from_numpy"),
    ],
)
def test_the_same_mistake_on_all_ranks_is_one_sentence(grid, wrong, message):
    layer = tplayers.FieldConv(2, 2, 3, grid, grid.decompose((8, 8 * grid.size)), padding=1)
    tplayers.initialize(layer, 1)
    kind = CollectiveError if grid.size > 1 else ValueError
    with pytest.raises(kind, match=f"^FieldConv {message}"):
        layer(wrong(torch.zeros(1, 2, 8, 8)))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda rank: {"out_channels": 2 + rank}, r"weight float32 \[2, 2, 3, 3\].*weight .*\[3, 2, 3, 3\]"),
        (lambda rank: {"kernel_size": 3 + 2 * rank, "padding": 1 + rank}, r"\[2, 2, 3, 3\].*\[2, 2, 5, 5\]"),
        (lambda rank: {"dilation": 1 + rank, "padding": 1 + rank}, r"dilation=\(1, 1\).*dilation=\(2, 2\)"),
        (lambda rank: {"padding_mode": ("zeros", "circular")[rank > 0]}, "'zeros'.*'circular'"),
    ],
)
def test_a_layer_with_other_arguments_on_one_rank_raises_on_all(grid, arguments, message):
    given = {"out_channels": 2, "kernel_size": 3, "padding": 1} | arguments(min(grid.rank, 1))
    layer = tplayers.FieldConv(2, grid=grid, input=grid.decompose((8, 8 * grid.size)), **given)
    tplayers.initialize(layer, 1)
    with pytest.raises(CollectiveMismatch, match=f"the ranks disagree: .*{message}"):
        layer(torch.zeros(1, 2, 8, 8))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["seed", "value", "mode", "running mean"])
def test_other_parameters_or_buffers_on_one_rank_raise_on_all(grid, kind):
    field = grid.decompose((8, 8 * grid.size))
    conv, norm = tplayers.FieldConv(2, 2, 3, grid, field, padding=1), tplayers.FieldBatchNorm(2, grid, field)
    net, last = torch.nn.Sequential(conv, norm), grid.size - 1
    tplayers.initialize(net, grid.rank if kind == "seed" else 1)
    message = "FieldConv: (weight|bias) .* with one seed on all ranks, or load the same state dict"
    with torch.no_grad():
        if kind == "value" and grid.rank == last:
            conv.bias[1] += 1e-7
        if kind == "running mean":
            norm.running_mean[0] = float(grid.rank == last)
            message = "FieldBatchNorm: running_mean "
    if kind == "mode":
        norm.train(grid.rank != last)
        message = "training=True.*training=False"
    for _ in range(2):  # a check that failed is made again
        with pytest.raises(CollectiveMismatch, match=message):
            net(torch.zeros(1, 2, 8, 8))


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, only=True)
@pytest.mark.parametrize("knows", [0, 1])
def test_a_layer_that_is_new_to_one_rank_alone_is_an_error_on_both(mpi_world, knows):
    with Communicator(mpi_world, device="cpu", timeout=20) as world:
        grid = CartesianGrid(world, (2,))
        first, other = (tplayers.FieldConv(1, 1, 3, grid, grid.decompose((8,)), padding=1) for _ in range(2))
        tplayers.initialize(torch.nn.Sequential(first, other), 1)
        x = torch.ones(1, 1, 4)
        first(x)
        with pytest.raises(CollectiveError, match=r"a call that is known|exchange: "):
            (first if world.rank == knows else other)(x)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("name", "arguments", "option", "values"),
    [
        ("FieldMaxPool", (3,), "padding", ((0, 0), (1, 1))),
        ("FieldAvgPool", (3,), "count_include_pad", (True, False)),
        ("FieldAvgPool", (3,), "ceil_mode", (True, False)),
        ("FieldUpsample", (2,), "padding_mode", ("replicate", "circular")),
        ("FieldUpsample", (2,), "align_corners", (True, False)),
        ("FieldGlobalPool", (), "mode", ("avg", "max")),
        ("FieldInstanceNorm", (1,), "eps", (1e-5, 1e-3)),
    ],
)
def test_an_option_that_one_rank_has_otherwise_raises_on_all(grid, name, arguments, option, values):
    """The blocks of the result are the same, so only the layer's attributes tell it."""
    given = {option: values[grid.rank > 0]} | ({"mode": "linear"} if name == "FieldUpsample" else {})
    layer = getattr(tplayers, name)(*arguments, grid=grid, input=grid.decompose((9, 9 * grid.size)), **given)
    tplayers.initialize(layer, 1)
    first, other = (f"{option}={value}".replace("(", r"\(").replace(")", r"\)") for value in values)
    with pytest.raises(CollectiveMismatch, match=f"the ranks disagree: .*{first}.*{other}"):
        layer(torch.zeros(1, 1, 9, 9))


@pytest.mark.mpi(min_size=2)
def test_other_batches_or_dtypes_on_one_rank_raise_on_all(grid):
    field = grid.decompose((8, 8 * grid.size))
    for shape, dtype in (((grid.rank + 1, 2, 8, 8), torch.float32), ((1, 2, 8, 8), torch.float64)):
        layer = tplayers.FieldMaxPool(3, grid, field, stride=1, padding=1)
        kind = torch.float32 if grid.rank else dtype
        with pytest.raises(CollectiveMismatch, match="the ranks disagree"):
            layer(torch.zeros(shape, dtype=kind))


@pytest.mark.mpi(min_size=2)
def test_a_gradient_that_one_rank_alone_wants_raises_on_all(grid):
    """The others would not run the backward, and it would wait for them."""
    field = grid.decompose((8, 8 * grid.size))
    layer = tplayers.FieldConv(2, 2, 3, grid, field, padding=1)
    tplayers.initialize(layer, 1)
    with pytest.raises(CollectiveMismatch, match=r"requires_grad=(True|False).*requires_grad=(True|False)"):
        layer(torch.zeros(1, 2, 8, 8, requires_grad=grid.rank == 0))
    x = torch.zeros(1, 2, 8, 8, requires_grad=grid.rank == 0)
    with torch.no_grad():
        assert layer(x).shape == x.shape  # no rank runs a backward


@pytest.mark.mpi(min_size=2)
def test_a_checked_transfer_compares_whether_gradients_are_wanted(mpi_world):
    with Communicator(mpi_world, device="cpu", checked=True) as comm:
        checked = CartesianGrid(comm, (comm.size,))
        x = torch.zeros(1, 4, requires_grad=comm.rank == 0)
        with pytest.raises(CollectiveMismatch, match="the ranks disagree"):
            tplayers.halo_exchange(x, checked, 1, decomposition=checked.decompose((4 * comm.size,)))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64])
def test_a_field_that_is_not_real_is_refused_on_every_rank(grid, dtype):
    field = grid.decompose((8, 8 * grid.size))
    for layer in (tplayers.FieldConv(2, 2, 3, grid, field), tplayers.FieldMaxPool(2, grid, field)):
        with pytest.raises((ValueError, CollectiveError), match=f"needs a real field, not {dtype}"):
            layer(torch.zeros(1, 2, 8, 8, dtype=dtype))


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # of torch's layer
@pytest.mark.parametrize(("kernel", "padding"), [(2, 0), (4, 1), ((4, 2), "same"), (3, 0)])
def test_a_result_may_be_changed_in_place(grid, kernel, padding):
    """As torch's: where a rank computes more outputs than its own, the result is no view of them."""
    field = grid.decompose((8, 8 * grid.size))
    torch.manual_seed(1)
    theirs = torch.nn.Conv2d(2, 3, kernel, padding=padding, dtype=torch.float64)
    layer = tplayers.FieldConv(2, 3, kernel, grid, field, padding=padding, dtype=torch.float64)
    layer.load_state_dict(theirs.state_dict())
    whole = draw(1, 2, *field.shape).requires_grad_()
    x = cut(whole.detach(), field, grid).requires_grad_()
    y = torch.nn.functional.relu_(theirs(whole))
    out = torch.nn.functional.relu_(layer(x))
    y.sum().backward(), out.sum().backward()
    close(out, cut(y, layer.output, grid))
    close(x.grad, cut(whole.grad, field, grid))
    close(layer.weight.grad, theirs.weight.grad)


@pytest.mark.mpi(min_size=2)
def test_later_a_rank_looks_at_its_own_block_only(grid):
    field = grid.decompose((8, 8 * grid.size))
    layer = tplayers.FieldMaxPool(2, grid, field)
    layer(torch.zeros(1, 2, 8, 8))
    with commengine.trace(grid.comm) as log:
        layer(torch.zeros(1, 2, 8, 8))
        with pytest.raises(ValueError, match=rf"rank {grid.rank}: FieldMaxPool needs a block"):
            layer(torch.zeros(1, 2, 8))
    assert not log.events


@pytest.mark.mpi(min_size=2)
def test_one_all_reduce_for_all_parameters_and_none_for_frozen_ones(grid):
    field = grid.decompose((8, 8 * grid.size))
    layer = tplayers.FieldConv(2, 3, 3, grid, field, padding=1)
    tplayers.initialize(layer, 1)
    x = cut(draw(1, 2, *field.shape), field, grid).float()
    layer(x).sum().backward()
    with commengine.trace(grid.comm) as log:
        layer(x).sum().backward()
        layer.requires_grad_(False)
        layer(x.requires_grad_()).sum().backward()
    sizes = [(event.operation, event.elements) for event in log.events]
    assert sizes[1] == ("all_reduce", 3 * 2 * 9 + 3)
    assert [name for name, _ in sizes] == ["exchange", "all_reduce", "exchange", "exchange"]
    same_bits(layer.weight.grad, grid)


def test_halves_and_states(grid):
    """bfloat16 fields work, and the state dict goes to torch's layer and back."""
    field = grid.decompose((8, 8 * grid.size))
    layer = torch.nn.Sequential(
        tplayers.FieldConv(2, 4, 3, grid, field, padding=1), tplayers.FieldBatchNorm(4, grid, field),
        tplayers.FieldGroupNorm(2, 4, grid, field),
    )  # fmt: skip
    tplayers.initialize(layer, 1)
    assert all(torch.isfinite(p).all() for p in layer.parameters())
    whole = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.GroupNorm(2, 4))
    whole.load_state_dict(layer.state_dict())
    layer.bfloat16()
    x = cut(draw(2, 2, *field.shape), field, grid).bfloat16().requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    assert y.dtype == x.grad.dtype == layer[0].weight.grad.dtype == torch.bfloat16
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())


@pytest.mark.mpi(min_size=2)
def test_a_layer_of_ones_own_has_the_gradients_of_the_whole_field(grid):
    """As docs/fields.md says: `replicated` gives the parameters to compute with."""
    field = grid.decompose((8, 8 * grid.size))
    whole = draw(1, 2, *field.shape)
    weight = torch.linspace(-1, 1, 2, dtype=whole.dtype, requires_grad=True)
    (used,) = tplayers.fields.replicated(grid.comm, weight)
    (cut(whole, field, grid) * used.view(1, 2, 1, 1)).square().sum().backward()
    expected = torch.linspace(-1, 1, 2, dtype=whole.dtype, requires_grad=True)
    (whole * expected.view(1, 2, 1, 1)).square().sum().backward()
    close(weight.grad, expected.grad)
    same_bits(weight.grad, grid)


#: by name: arguments before the grid, and others
COMPILED = {
    "FieldConv": ((2, 2, 3), {"dtype": torch.float64}),
    "FieldBatchNorm": ((2,), {"dtype": torch.float64}),
    "FieldInstanceNorm": ((2,), {"track_running_stats": True, "dtype": torch.float64}),
    "SpectralConv": ((2, 2, 2), {"dtype": torch.float64}),
    "FieldMaxPool": ((3,), {"ceil_mode": True, "padding": 1}),
    "FieldAvgPool": ((3,), {"ceil_mode": True, "padding": 1}),
    "FieldAdaptiveAvgPool": ((5,), {}),
    "FieldAdaptiveMaxPool": ((5,), {}),
    "FieldGlobalPool": ((), {"mode": "max"}),
    "FieldUpsample": ((2,), {"mode": "linear", "align_corners": True}),
    "UNet": ((2, 2), {"depth": 1, "width": 2, "dtype": torch.float64}),
}


@pytest.mark.some(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name != "UNet" else pytest.param(name, marks=pytest.mark.long) for name in COMPILED]
)
def test_the_compiler_takes_a_layer_before_its_first_call(mpi_world, name):
    """It runs between graphs, and compares the ranks' layers as without the compiler."""
    with Communicator(mpi_world, device="cpu", timeout=60) as comm:
        compare_compiled(comm, name)


def compare_compiled(comm, name):
    torch._dynamo.reset()
    (arguments, options), grid = COMPILED[name], CartesianGrid(comm, (comm.size,))
    layer = getattr(tplayers, name)(*arguments, grid, grid.decompose((5 * comm.size,)), **options)
    tplayers.initialize(layer, 1)
    x = torch.randn(2, 2, 5, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(lambda x: layer(x.cos()).sin(), backend="aot_eager")
    found = compiled(x)
    assert all(one._compared == (comm.size > 1) for one in layer.modules() if hasattr(one, "_compared"))
    expected = layer(x.cos()).sin()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x) for y in (found, expected)))


@pytest.mark.mpi(min_size=2)
def test_the_first_call_may_be_one_of_torch_func(grid):
    layer, x = (
        tplayers.FieldConv(1, 1, 3, grid, grid.decompose((4, 4 * grid.size)), dtype=torch.float64),
        draw(1, 1, 4, 4),
    )
    tplayers.initialize(layer, 1)
    _, tangent = torch.func.jvp(layer, (x,), (x,))
    close(tangent, layer(x) - layer(torch.zeros_like(x)))
