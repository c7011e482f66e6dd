"""Layers of torch in a sharded module: each kind with its options, and what is refused by name."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import tplayers
from commengine import CollectiveError, Communicator
from tests.support.fields.comparison import cut, draw, joined
from tests.support.sharding.comparison import Of, equals_whole, parameter, refusal, uneven

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]


@pytest.fixture
def comm(mpi_world):
    with Communicator(mpi_world, device="cpu") as comm:
        yield comm


class Named(nn.Conv2d):
    """torch's convolution with other defaults is torch's convolution."""

    def __init__(self, ins, outs):
        super().__init__(ins, outs, 3, padding=1, bias=False)

    def extra_repr(self):
        return "mine"


TAKEN = {
    "Conv2d": lambda: nn.Conv2d(4, 6, (3, 2), (2, 1), (1, 0), (1, 2), 2, padding_mode="reflect"),
    "Conv2d, same": lambda: nn.Conv2d(4, 2, (3, 5), padding="same", dilation=2, padding_mode="circular"),
    "ConvTranspose2d": lambda: nn.ConvTranspose2d(4, 2, 3, 2, 1, 1, groups=2, bias=False),
    "derived": lambda: Named(4, 2),
    "output_size": lambda: Of(
        lambda m, x: m.up(m.down(x), output_size=x.size()) * m.up(m.down(x), x.shape[2:]),
        down=nn.Conv2d(4, 3, 3, 2, 1),
        up=nn.ConvTranspose2d(3, 4, 3, 2, 1),
    ),
    "MaxPool2d": lambda: nn.MaxPool2d(3, 2, 1, ceil_mode=True),
    "AvgPool2d": lambda: nn.AvgPool2d((2, 3), 2, (1, 1), ceil_mode=True, count_include_pad=False),
    "AdaptiveAvgPool2d": lambda: nn.AdaptiveAvgPool2d((None, 5)),
    "AdaptiveMaxPool2d": lambda: nn.AdaptiveMaxPool2d((7, 4)),
    "Upsample": lambda: nn.Upsample(scale_factor=(2, 3), mode="bicubic"),
    "Upsample, to a size": lambda: nn.Upsample((18, 22), mode="bilinear", align_corners=True),
    "BatchNorm2d": lambda: nn.BatchNorm2d(4, eps=0.1, momentum=None),
    "BatchNorm2d, plain": lambda: nn.BatchNorm2d(4, affine=False, track_running_stats=False),
    "InstanceNorm2d": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    "GroupNorm": lambda: nn.GroupNorm(2, 4, affine=False),
    "LayerNorm": lambda: nn.LayerNorm([4, 9, 11]),
    "LayerNorm, plain": lambda: nn.LayerNorm([4, 9, 11], elementwise_affine=False),
    "ReflectionPad2d": lambda: nn.ReflectionPad2d((1, 0, 2, 3)),
    "CircularPad2d": lambda: nn.CircularPad2d(2),
    "ReplicationPad2d": lambda: nn.ReplicationPad2d(3),
    "ConstantPad2d": lambda: nn.ConstantPad2d((1, 2, -1, 1), 3.5),
    "PReLU": lambda: nn.PReLU(4),
    "activations": lambda: nn.Sequential(
        nn.Hardtanh(), nn.Softplus(2), nn.Softmax2d(), nn.GLU(1), nn.Threshold(0.1, 2)
    ),
    "Dropout of nothing": lambda: nn.Dropout(0.0, inplace=True),
    "PixelUnshuffle": lambda: nn.Sequential(nn.ZeroPad2d((1, 0, 0, 1)), nn.PixelUnshuffle(2)),
    "ChannelShuffle": lambda: nn.ChannelShuffle(2),
    "Unflatten": lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Flatten(1, 2)),
    "head": lambda: nn.Sequential(
        nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(True), nn.Dropout(0.0)
    ),
    "one pool twice": lambda: (lambda pool: nn.Sequential(pool, nn.Conv2d(4, 4, 1), pool))(nn.MaxPool2d(2, 1)),
    "one convolution twice": lambda: (lambda conv: nn.Sequential(conv, nn.Tanh(), conv))(nn.Conv2d(4, 4, 1)),
}


@pytest.mark.parametrize("name", TAKEN)
def test_equals_torchs_layer(comm, name):
    torch.manual_seed(2)
    equals_whole(nn.Sequential(TAKEN[name]()).double(), comm, 4, (9, 11), batch=3)


def hooked():
    layer = nn.Conv2d(4, 4, 1)
    layer.register_forward_hook(lambda *_: None)
    return nn.Sequential(layer)


def patched():
    layer = nn.ReLU()
    layer.forward = lambda x: x
    return nn.Sequential(layer)


class Standardised(nn.Conv2d):
    """A convolution with another weight."""

    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight - weight.mean(), bias)


class Called(nn.Sequential):
    def __call__(self, x):
        return super().__call__(2 * x)


class OwnTrain(nn.Module):
    def forward(self, x):
        return x + 1

    def train(self, mode=True):
        return super().train(False)


def two_sizes():
    return Of(lambda m, x: (m.conv(x), m.conv(x[:, :, 1:])), conv=nn.Conv2d(4, 4, 1))


REFUSED = {
    "attention": (lambda: Of(lambda m, x: m.a(x, x, x), a=nn.MultiheadAttention(4, 2)), "MultiheadAttention in 'a'"),
    "transformer": (lambda: nn.Sequential(nn.TransformerEncoderLayer(11, 1)), "in '0'.*use tplayers.FieldAttention"),
    "recurrence": (lambda: nn.Sequential(nn.GRU(11, 3)), "nn.GRU in '0'.*use convolutions"),
    "SyncBatchNorm": (lambda: nn.Sequential(nn.SyncBatchNorm(4)), "nn.SyncBatchNorm.*use nn.BatchNorm2d"),
    "Linear of space": (lambda: nn.Sequential(nn.Linear(11, 3)), "nn.Linear in '0'.*axes of space.*kernel size 1"),
    "LayerNorm of space": (lambda: nn.Sequential(nn.LayerNorm([9, 11])), "nn.LayerNorm.*axes of space.*GroupNorm"),
    "LocalResponseNorm": (lambda: nn.Sequential(nn.LocalResponseNorm(2)), "nn.LocalResponseNorm.*no layer of fields"),
    "axes": (lambda: nn.Sequential(nn.Conv1d(4, 4, 1)), "nn.Conv1d in '0'.*2 axes of space"),
    "channels": (lambda: nn.Sequential(nn.Conv2d(3, 4, 1)), r"takes 3 channels, and gets \[batch, 4.*channels="),
    "too few points": (lambda: nn.Sequential(nn.MaxPool2d(12)), "nn.MaxPool2d in '0'"),
    "indices": (lambda: nn.Sequential(nn.MaxPool2d(2, return_indices=True)), "return_indices"),
    "dropout in place": (lambda: nn.Sequential(nn.Dropout(0.5, inplace=True)), "nn.Dropout in '0'.*inplace"),
    "other dropout": (lambda: nn.Sequential(nn.AlphaDropout(0.5)), "nn.AlphaDropout"),
    "hooks": (hooked, "Conv2d '0': it has hooks"),
    "patched": (patched, "ReLU '0': its forward or its call is replaced"),
    "parametrized": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Conv2d(4, 4, 1))), "'0': it is parametr"),
    "one layer": (lambda: nn.Conv2d(4, 4, 1), "Conv2d alone: it is a layer; use the layer of tplayers"),
    "lazy": (lambda: nn.Sequential(nn.LazyConv2d(4, 1)), "open|hooks"),
    "another convolution": (lambda: nn.Sequential(Standardised(4, 4, 1)), r"conv2d in '0' \(.*test_layers.py:\d+"),
    "train": (OwnTrain, r"its train\(\) is its own"),
    "two decompositions": (two_sizes, r"nn.Conv2d in 'conv' \(.*fields in different blocks.*use a layer for each"),
    "two arguments": (lambda: Of(lambda m, x: m.b(x, 2), b=nn.Conv2d(4, 4, 2)), "one tensor"),
    "output_size": (lambda: Of(lambda m, x: m.b(x, (20, 22)), b=nn.ConvTranspose2d(4, 4, 2, 2)), "in 'b'.*output_pad"),
    "called in another way": (Called, "Called '': its forward or its call is replaced"),
    "shuffle of channels last": (lambda: Of(lambda m, x: m.n(x.movedim(1, 3)), n=nn.BatchNorm2d(11)), r"in 'n'.*needs"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_by_name(comm, name):
    make, pattern = REFUSED[name]
    text = refusal(make(), comm, 4, (9, 11))
    assert re.search(pattern, text), text


def test_what_has_no_channels_needs_them(comm):
    grid, field = uneven(comm, (9, 11))
    with pytest.raises(ValueError, match="channels="):
        tplayers.shard(nn.ReLU(), grid, field)
    assert tplayers.shard(nn.ReLU(), grid, field, channels=2).output == field
    with pytest.raises((ValueError, CollectiveError), match="needs a block"):
        tplayers.shard(nn.ReLU(), grid, field, channels=2)(torch.ones(1, 3, *field.local_shape(grid.coords)))
    with pytest.raises(TypeError, match="shard: grid must be"):
        tplayers.shard(nn.ReLU(), None, field)


def test_in_other_dtypes_and_batches(comm):
    torch.manual_seed(1)
    module = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    grid, field = uneven(comm, (9, 11))
    sharded = tplayers.shard(module, grid, field)
    for batch in (1, 5):
        x = draw(batch, 2, 9, 11)
        torch.testing.assert_close(sharded(cut(x.float(), field, grid)), module(x.float()))
    with torch.autocast("cpu", torch.bfloat16):
        assert sharded(cut(x.float(), field, grid)).dtype == torch.bfloat16
    torch.testing.assert_close(sharded.double()(cut(x, field, grid)), copy.deepcopy(module).double()(x))


def test_fields_of_different_blocks_are_brought_together(comm):
    """The blocks of a PixelShuffle are multiples of its factor; the ranks cut the field in another way."""
    module = Of(
        lambda m, x: m.up(m.down(x)) + x * m.p, down=nn.Conv2d(1, 4, 3, 2, 1), up=nn.PixelShuffle(2), p=parameter(1)
    )
    sharded = equals_whole(module.double(), comm, 1, (10, 12))
    if comm.size > 1:
        assert "Blocks" in sharded.program


def test_a_copy_of_a_sharded_module_is_on_its_own(comm):
    torch.manual_seed(1)
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    grid, field = uneven(comm, (9, 11))
    sharded = tplayers.shard(module, grid, field)
    x = draw(2, 1, 9, 11).float()
    first = joined(sharded(cut(x, field, grid)), sharded.output, grid)
    sharded.load_state_dict({name: 0 * tensor for name, tensor in sharded.state_dict().items()})
    torch.testing.assert_close(first, copy.deepcopy(module).train()(x))
