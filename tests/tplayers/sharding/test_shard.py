"""`tplayers.shard` of thirty networks, chosen before it was written, against torch on the whole field."""

import copy
import re

import pytest
import torch
from torch import nn

import tplayers
from commengine import CollectiveMismatch, Communicator
from tests.support.fields.comparison import cut, draw, joined
from tests.support.models.whole_unet import WholeUNet
from tests.support.sharding.comparison import Of, equals_whole, parameter, refusal, uneven
from tests.support.sharding.modules import MODULES

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]

#: those that are refused: the part, its line, why, and what would do
REFUSED = {
    "autoencoder of linear layers": r"function flatten \(.*segmentation.py:\d+\).*mixes points.*AdaptiveAvgPool2d",
    "VGG": r"function flatten \(.*backbones.py:\d+\): from \[batch, 3, 2, 2\] to \[batch, 12\].*AdaptiveAvgPool2d",
    "FNO's layer": r"function fft_rfft2 \(.*others.py:\d+\).*use tplayers.SpectralConv",
    "ViT": r"method reshape \(.*others.py:\d+\): from \[batch, 8, 4, 6\] to \[batch, 8, 24\].*FieldAttention",
    "non-local block": r"method view \(.*others.py:\d+\): from \[batch, 2, 8, 10\] .*FieldAttention",
    "early exit": r"control flow that depends on values \(.*others.py:\d+\).*torch.where",
}


@pytest.fixture
def comm(mpi_world):
    with Communicator(mpi_world, device="cpu") as comm:
        yield comm


def made(name: str) -> nn.Module:
    torch.manual_seed(3)
    module = MODULES[name].make().double()
    for one in module.modules():
        if isinstance(one, nn.Dropout):
            one.p = 0.0  # torch draws other masks
    return module


def test_there_are_thirty():
    assert len(MODULES) == 30
    assert len(REFUSED) <= 8


@pytest.mark.parametrize("name", [name for name in MODULES if name not in REFUSED])
def test_equals_the_module_on_the_whole_field(comm, name):
    equals_whole(made(name), comm, MODULES[name].channels, MODULES[name].shape)


@pytest.mark.sizes(1, 2)
@pytest.mark.parametrize("name", ["U-Net, transposed", "U-Net, 3 axes", "ResNet", "ASPP"])
def test_in_evaluation(comm, name):
    module = made(name)
    with torch.no_grad():
        module(draw(2, MODULES[name].channels, *MODULES[name].shape))  # running statistics
    equals_whole(module.eval(), comm, MODULES[name].channels, MODULES[name].shape)


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_by_name_on_every_rank(comm, name):
    text = refusal(made(name), comm, MODULES[name].channels, MODULES[name].shape)
    assert re.search(REFUSED[name], text), text


@pytest.mark.sizes(1, 2)
def test_weights_of_torch_load_and_go_back(comm):
    """In a strict load in both directions, by names alone; and the module that is sharded stays as it is."""
    module, other = made("U-Net, one pool"), made("U-Net, one pool")
    for one in other.parameters():
        nn.init.normal_(one, std=0.2, generator=torch.Generator().manual_seed(4))
    before = copy.deepcopy(module.state_dict())
    grid, field = uneven(comm, (20, 24))
    sharded = tplayers.shard(module, grid, field)  # two channels, as its first convolution has
    sharded.load_state_dict(other.state_dict())
    x = draw(3, 2, 20, 24)
    torch.testing.assert_close(joined(sharded(cut(x, field, grid)), sharded.output, grid), other(x), rtol=0, atol=1e-12)
    torch.optim.SGD(sharded.parameters(), lr=0.1).step()
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    module.load_state_dict(sharded.state_dict())


@pytest.mark.sizes(1, 2)
@pytest.mark.parametrize("shape", [(16, 12), (19, 17)])
def test_a_unet_has_the_bits_of_the_one_of_tplayers(comm, shape):
    grid, field = uneven(comm, shape)
    torch.manual_seed(1)
    whole = WholeUNet(1, 2, 2, width=4, depth=2, dtype=torch.float64)
    ours, theirs = tplayers.shard(whole, grid, field), tplayers.UNet(1, 2, grid, field, width=4, depth=2).double()
    theirs.load_state_dict(whole.state_dict())
    x = cut(draw(2, 1, *shape), field, grid)
    assert torch.equal(ours(x), theirs(x))
    assert "Blocks" not in ours.program


@pytest.mark.sizes(1, 2)
def test_modes_and_frozen_parameters_are_taken_over(comm):
    module = made("U-Net, transposed").train()
    module.inc.eval().requires_grad_(False)
    sharded = equals_whole(module, comm, 2, (22, 19))
    assert sharded.training
    assert not sharded.inc.double_conv[1].training
    assert not sharded.eval().down1.training


@pytest.mark.sizes(1, 2)
def test_training_follows_torch(comm):
    """Three steps of Adam on a classifier: the loss that every rank has is divided by the ranks."""
    module = made("DenseNet")
    grid, field = uneven(comm, (12, 15))
    sharded = tplayers.shard(module, grid, field)
    losses = []
    for net, x, share in ((module, draw(2, 2, 12, 15), 1), (sharded, cut(draw(2, 2, 12, 15), field, grid), grid.size)):
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
        losses.append([])
        for _ in range(3):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), torch.tensor([0, 2]))
            (loss / share).backward()
            optimizer.step()
            losses[-1].append(float(loss.detach()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)


def test_shared_modules_and_tied_parameters(comm):
    conv, head = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
    head.weight = conv.weight
    module = Of(lambda m, x: m.head(m.again(torch.tanh(m.conv(x)))), conv=conv, again=conv, head=head).double()
    sharded = equals_whole(module, comm, 2, (9, 11))
    assert sharded._modules["again"] is sharded._modules["conv"]
    assert sharded._modules["head"].weight is sharded._modules["conv"].weight


def test_parameters_and_layers_in_lists(comm):
    module = Of(lambda m, x: m.steps[1](m.steps[0](x)) * m.scales[0] + next(m.parameters()), p=parameter(4, 1, 1))
    module.conv = nn.Conv2d(4, 4, 1)
    module.scales, module.steps = [module.p], [module.conv, torch.tanh]
    equals_whole(module.double(), comm, 4, (9, 11))
    scales = nn.ParameterList([parameter(4, 1, 1), parameter(1, seed=5)])
    named = nn.ParameterDict({"a": parameter(4, 1, 1, seed=6)})
    module = Of(lambda m, x: x * m.scales[0] + m.named["a"] / m.scales[1], scales=scales, named=named)
    equals_whole(module.double(), comm, 4, (9, 11))


def test_a_condition_on_the_batch_is_asked_at_each_forward(comm):
    module = Of(lambda m, x: m.conv(x) * len(x) if x.shape[0] > 1 else -m.conv(x), conv=nn.Conv2d(2, 2, 3)).double()
    grid, field = uneven(comm, (9, 11))
    torch.manual_seed(1)
    nn.init.normal_(module.conv.weight)
    nn.init.zeros_(module.conv.bias)
    sharded = tplayers.shard(module, grid, field)
    for batch in (3, 1, 2):
        x = draw(batch, 2, 9, 11)
        torch.testing.assert_close(joined(sharded(cut(x, field, grid)), sharded.output, grid), module(x))


def test_a_layer_that_no_other_batch_has_is_refused_on_every_rank(comm):
    torch.manual_seed(1)
    module = Of(lambda m, x: m.b(x) if len(x) == 1 else m.a(x), a=nn.Conv2d(1, 1, 1), b=nn.Conv2d(1, 1, 1))
    grid, field = uneven(comm, (9, 11))
    sharded = tplayers.shard(module, grid, field)
    sharded(torch.ones(2, 1, *field.local_shape(grid.coords)))
    with pytest.raises(ValueError, match=r"this layer in 'b' \(.*test_shard.py:\d+\): its call depends on the batch"):
        sharded(torch.ones(1, 1, *field.local_shape(grid.coords)))


@pytest.mark.sizes(1, 2)
@pytest.mark.parametrize("used", [False, True])
def test_a_deep_copy_is_on_its_own(comm, used):
    module = made("DenseNet").eval()
    grid, field = uneven(comm, (12, 15))
    sharded = tplayers.shard(module, grid, field)
    x = cut(draw(2, 2, 12, 15), field, grid)
    expected = sharded(x) if used else None
    copied = copy.deepcopy(sharded)
    with torch.no_grad():
        for one in copied.parameters():
            one.mul_(0.5)
    copied(x).sum().backward()
    assert all(one.grad is None for one in sharded.parameters())
    assert expected is None or torch.equal(sharded(x), expected)
    module.load_state_dict(copied.state_dict())
    torch.testing.assert_close(copied(x), module(draw(2, 2, 12, 15)))


def test_parts_that_the_forward_does_not_use_stay_in_the_state_dict(comm):
    module = Of(lambda m, x: m.output(x), output=nn.Conv2d(1, 1, 1), auxiliary=nn.Conv2d(1, 3, 3), grid=parameter(2))
    equals_whole(module.double(), comm, 1, (6, 9))


def test_several_results(comm):
    module = Of(lambda m, x: (m.a(x), m.b(x).mean((2, 3))), a=nn.Conv2d(2, 1, 3, 2), b=nn.Conv2d(2, 3, 1)).double()
    sharded = equals_whole(module, comm, 2, (13, 12))
    assert sharded.output[0].shape == (6, 5)
    assert sharded.output[1] is None


def test_ranks_with_different_modules_get_an_error(comm):
    if comm.size == 1:
        pytest.skip("one rank has one module")
    grid, field = uneven(comm, (9, 12))
    torch.manual_seed(comm.rank)
    sharded = tplayers.shard(Of(lambda m, x: m.scale * x, scale=torch.rand(1)), grid, field, channels=1)
    with pytest.raises(CollectiveMismatch, match="scale"):
        sharded(torch.ones(1, 1, *field.local_shape(grid.coords)))
    function = (lambda m, x: x + 1) if comm.rank else (lambda m, x: x - 1)
    sharded = tplayers.shard(Of(function), grid, field, channels=1)
    with pytest.raises(CollectiveMismatch, match="program"):
        sharded(torch.ones(1, 1, *field.local_shape(grid.coords)))


@pytest.mark.sizes(1, 2)
def test_layers_of_tplayers_in_a_module_stay(comm):
    """What is refused has a rewrite that `shard` takes."""
    grid, field = uneven(comm, (8, 10))
    torch.manual_seed(0)
    attention = tplayers.FieldAttention(4, 2, grid, field, dtype=torch.float64)
    tplayers.initialize(attention, 1)
    module = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1).double(), attention, nn.Conv2d(4, 1, 1).double())
    sharded = tplayers.shard(module, grid, field)
    x = cut(draw(2, 2, 8, 10), field, grid)
    first = tplayers.FieldConv(2, 4, 3, grid, field, padding=1, dtype=torch.float64)
    last = tplayers.FieldConv(4, 1, 1, grid, field, dtype=torch.float64)
    first.load_state_dict(module[0].state_dict())
    last.load_state_dict(module[2].state_dict())
    torch.testing.assert_close(sharded(x), last(attention(first(x))))


def test_dropout_draws_the_same_numbers_on_all_ranks(comm):
    module = nn.Sequential(
        nn.Conv2d(1, 8, 1), nn.Dropout2d(0.5), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5)
    )
    grid, field = uneven(comm, (8, 9))
    torch.manual_seed(1)
    sharded = tplayers.shard(module, grid, field)
    with torch.no_grad():
        for tensor in sharded.parameters():
            tensor.fill_(0.5)
    tplayers.set_randomness(sharded, tplayers.Randomness(1, 0, [0, 1]))
    y = sharded(torch.ones(2, 1, *field.local_shape(grid.coords)))
    assert len({tuple(part) for part in comm.mpi.allgather(y.flatten().tolist())}) == 1
    assert {0.0, 4.0} == set(y.round().flatten().tolist())
