"""Functions and methods that a sharded module calls: equal to torch's on the whole field, or refused by name."""

import copy
import random
import re
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from commengine import Communicator
from tests.support.fields.comparison import draw
from tests.support.sharding.comparison import Of, equals_whole, parameter, refusal

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]


@pytest.fixture
def comm(mpi_world):
    with Communicator(mpi_world, device="cpu") as comm:
        yield comm


def residual_in_place(m, x):
    y = m.conv(x)
    kept = y
    y += x
    y *= 2
    return torch.cat((kept, y.relu_()), 1)


def coordinates(m, x):
    h, w = x.shape[2:]
    ys = torch.linspace(-1, 1, h, dtype=torch.float64).view(1, 1, h, 1).expand(1, 1, h, w)
    return torch.cat((x, ys.expand_as(x[:, :1])), 1) + torch.arange(w) / w


def by_size(m, x):
    b, c, h, w = x.size()
    assert (h, w) == (9, 11) and x.dim() == 4
    total = x * (h * w) / x.shape[0] + c + b
    return total.view(b, c, *x.shape[2:]) if x.shape == total.shape else x


def squeeze_excite_1x1(m, x):
    return x * m.gate(F.adaptive_avg_pool2d(x, 1)).sigmoid()


def positions(m, x):
    return x.pow(2) * m.p + m.p[:, :, :1].mean() + m.channel.view(1, -1, 1, 1).softmax(1)


def channels_last(m, x):
    x = x.movedim(1, -1)
    x = F.layer_norm(x, (4,), m.weight, None)
    return (F.linear(x, m.matrix) * m.weight + x[..., :1]).permute(0, 3, 1, 2)


def parts_of_channels(m, x):
    first, *_ = x.unbind(1)
    reverse = torch.cat(x.chunk(2, 1)[::-1], dim=1)
    return reverse * torch.cat(torch.split(x, [1, 3], dim=1), 1) + first.unsqueeze(1) + x[:, 1:3].sum(1, keepdim=True)


def pools(m, x):
    ours = F.max_pool2d(x, 3, 2, 1, 1, True) + F.avg_pool2d(x, 3, 2, 1, True, False)
    return ours * F.max_pool2d(x, kernel_size=2, ceil_mode=True)


def other_blocks(m, x):
    y = F.pixel_shuffle(m.down(x), 2)
    return y[:, :, :9, :11] + x[:, :1] * y[:, :, 1:, 1:]


def unshuffled(m, x):
    x = x[:, :, 1:, 1:]
    return F.pixel_unshuffle(x, 2) + F.avg_pool2d(x, 2).mean(1, True)


def groups(m, x):
    shuffled = x.view(x.shape[0], 2, 2, *x.shape[2:]).transpose(1, 2).reshape(-1, 4, 9, 11)
    return shuffled + x.unflatten(1, (2, 2)).flatten(1, 2)


def resampled(m, x):
    y = F.interpolate(x, size=(7, 9), mode="bilinear")
    return F.interpolate(torch.sin(y), size=x.shape[-2:], mode="bilinear", align_corners=True) + x


def interpolated(m, x):
    x = F.max_pool2d(x, 2)
    y = F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=True)
    return y[:, :, 1:] + F.interpolate(x, size=(8, 10))[..., :7, :]


def means(m, x):
    y = x - x.mean(dim=(-1, -2), keepdim=True) + x.mean((1, 2, 3), keepdim=True)
    return y * x.amax((2, 3))[..., None, None] + x.sum((2, 3)).view(-1, 4, 1, 1)


def masks(m, x):
    """Booleans through all that moves, pads, counts and joins points."""
    mask = m.conv(x) > 0
    y = x * F.pad(mask, (1, 1, 0, 2), value=True)[..., 2:, 1:-1] * torch.roll(mask, (1, -2), (2, 3)).flip(3)
    y = y / (1 + mask.sum((2, 3), keepdim=True)) + mask.sum((1, 2, 3)).view(-1, 1, 1, 1) * mask.amax(
        (2, 3), keepdim=True
    )
    return y + torch.cat([mask[:, :2], m.down(x)[:, :2].gt(0).any(1, True).sum() > mask[:, 2:]], 1) + mask.sum()


def integers(m, x):
    """Short integers, which float64 has exactly; and long ones where nothing but their places changes."""
    short = (3 * x).to(torch.int32)
    y = x * F.max_pool2d(short, 3, 1, 1) + F.pad(short, (1, 2, 0, 0), mode="replicate")[..., 2:-1]
    y = y + F.interpolate(short.abs().to(torch.uint8), scale_factor=2)[:, :, ::2, ::2]
    return y * torch.roll((3 * x).long(), 2, 3)


def shaped_in_place(m, x):
    y = x * 1
    kept = y
    y.cumsum_(1).unsqueeze_(2).squeeze_(2)
    y.swapdims_(1, 1)
    mask = (x > 0).any(1).unsqueeze_(1)
    return kept * mask


def by_type(m, x):
    if isinstance(x, nn.Parameter | list) or not torch.is_tensor(x):
        return x
    return x * 2 if isinstance(x, torch.Tensor) else x + 1


def modulo(m, x):
    x %= 2
    return x


TAKEN = {
    "condition of the batch": lambda m, x: x if x.shape[0] > 1 else -x,
    "operator in place": modulo,
    "dtype and device": lambda m, x: x.float().to(x.dtype) + torch.ones(len(x), 1, 9, 1, device=x.device),
    "zeros of both signs": lambda m, x: torch.atan2(x * 0.0, x) + torch.atan2(x * -0.0, x),
    "a function in a branch": lambda m, x: x.add(1) if x.is_floating_point() and x.ndim == 4 else x.T,
    "sizes for a program": lambda m, x: x * float(x.shape[0]) / x.numel(),
    "pointwise": lambda m, x: F.leaky_relu(x, 0.1) * torch.sin(x).clamp(-0.5, 0.5) - 3 / (2 + x**2) + (-x).exp().neg(),
    "methods": lambda m, x: x.sub(1).tanh().add(x, alpha=2).abs().sqrt().to(torch.float64).contiguous(),
    "where": lambda m, x: torch.where(x > 0, x, 0.1 * x).masked_fill(x > 2, 0.5),
    "of channels": lambda m, x: x.softmax(dim=1) + F.normalize(x) + x.cumsum(-3) + F.glu(x, 1).mean(1, True),
    "statistics of channels": lambda m, x: x.mean(1, True) * x.max(dim=1).values.unsqueeze(1) + x.std(1, keepdim=True),
    "channel that vanishes": lambda m, x: x.amax(1) * x[:, 0] + x.sum(dim=1),
    "means": means,
    "means of all": lambda m, x: x.sum() * x / x.abs().mean(),
    "pooled": lambda m, x: F.adaptive_max_pool2d(x, 1).flatten(1).log_softmax(-1).unsqueeze(2),
    "squeeze and excitation": squeeze_excite_1x1,
    "parts of channels": parts_of_channels,
    "slices of channels": lambda m, x: x[:, 1:3] * x[:, 0, None] + x[..., :, :][:, -1:] + x[:, ::2],
    "crops": lambda m, x: x[:, :, 1:-1, 2:] + x[..., :-2, :-2],
    "strides": lambda m, x: x[:, :2, ::2, 1::3] + F.avg_pool2d(x[:, 2:], 1, (2, 1))[..., 1::3],
    "whole slices": lambda m, x: x[:, :, : x.shape[2], : x.size(3)] + x[:, 0:4],
    "rolls": lambda m, x: torch.roll(x, (1, -12), (2, 3)) + x.roll(2, 1) + x.roll(0, 2).add_(1) + x,
    "flips": lambda m, x: torch.flip(x, (3,)) + x.flip(2, 3) * x.flip([1]) - x.flip(-1),
    "pads": lambda m, x: F.pad(F.pad(x, (1, 2)), (0, 0, 3, 1), mode="reflect") * F.pad(x, (1, 2, 2, 2), value=1.5),
    "pads of channels": lambda m, x: (
        F.pad(x, (0, 1, -1, 0, 2, 1)) + F.pad(x[:, :, 1:], [0, 1, 0, 0, 0, 3], "constant", 2)
    ),
    "no pad": lambda m, x: F.pad(x, (0, 0, 0, 0)).add_(1) + x,
    "pools": pools,
    "other blocks": other_blocks,
    "unshuffled": unshuffled,
    "groups": groups,
    "channels last": channels_last,
    "parameters": positions,
    "coordinates": coordinates,
    "sizes": by_size,
    "in place": residual_in_place,
    "in place, of shapes": shaped_in_place,
    "in place, of copies": lambda m, x: torch.cat([one.clone().mul_(2) + one for one in x.chunk(2, dim=1)], 1),
    "interpolation": interpolated,
    "interpolation to sizes": resampled,
    "types": by_type,
    "masks": masks,
    "integers": integers,
    "prelu": lambda m, x: F.prelu(x, m.channel),
    "dense of all": lambda m, x: x + (F.adaptive_avg_pool2d(x, 1).flatten(1) @ m.matrix)[:, :, None, None],
}


def children():
    torch.manual_seed(5)
    return {
        "conv": nn.Conv2d(4, 4, 3, padding=1),
        "down": nn.Conv2d(4, 4, 3, 2, 1),
        "gate": nn.Sequential(nn.Conv2d(4, 2, 1), nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.Conv2d(2, 4, 1)),
        "p": parameter(1, 4, 9, 11),
        "channel": parameter(4),
        "weight": parameter(4),
        "matrix": parameter(4, 4),
    }


@pytest.mark.parametrize("name", TAKEN)
def test_equals_torch(comm, name):
    equals_whole(Of(TAKEN[name], **children()).double(), comm, 4, (9, 11), batch=3)


def no_grad(m, x):
    with torch.no_grad():
        y = m.conv(x)
    return x + y


def autocast(m, x):
    with torch.autocast("cpu"):
        return m.conv(x)


def assigned(m, x):
    x[:, 0] = 0
    return x


def view_in_place(m, x):
    y = x * 1
    z = y[:, :, 1:]
    y.add_(1)
    return z


def crop_in_place(m, x):
    y = x * 1
    y[:, :, 1:].mul_(2)
    return y


def contiguous_in_place(m, x):
    y = x * 1
    y.contiguous().mul_(2)
    return y


def gradient_wanted(m, x):
    y = x * 1
    y.requires_grad = True
    return y


def kept_as_attribute(m, x):
    m.memory = x * 2
    return m.memory


def kept_in_a_list(m, x):
    m.kept = [x]
    return x


def kept_in_a_buffer(m, x):
    m.average = 0.9 * m.average + x.mean()
    return x - m.average


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class Constant(Straight):
    @staticmethod
    def forward(ctx, x):
        return torch.ones(1, dtype=torch.float64)


def by_mode(m, x):
    return m.conv(x) if m.training else x


#: the function, and what the error says
REFUSED = {
    "unknown": (lambda m, x: torch.special.bessel_j0(x), r"function special_bessel_j0 \(.*test_functions.py:\d+\)"),
    "random": (lambda m, x: x + torch.randn_like(x), "function randn_like"),
    "random, beside": (lambda m, x: x + torch.randn(4, 1, 1, dtype=torch.float64), "draws random numbers.*nn.Dropout"),
    "random of Python": (lambda m, x: x + random.random(), "draws random numbers"),
    "random of NumPy": (lambda m, x: x + float(np.random.rand()), "draws random numbers"),  # noqa: NPY002
    "dropout": (lambda m, x: F.dropout(x, 0.5), "function dropout.*nn.Dropout"),
    "item": (lambda m, x: x * x.mean().item(), "method item"),
    "condition": (lambda m, x: x if x.mean() > 0 else -x, "control flow"),
    "loop": (lambda m, x: sum(one for one in x), "a loop over a tensor"),
    "sum of integers": (
        lambda m, x: x.long().sum((2, 3)),
        r"int64 \(.*test_functions.py:\d+\).*FieldGlobalPool.*double",
    ),
    "pads of integers": (lambda m, x: F.pad(x.long(), (1, 1)), r"torch.int64 \(.*:\d+\): FieldPad needs real"),
    "means of integers": (lambda m, x: F.avg_pool2d(x.int(), 2), r"torch.int32 \(.*:\d+\): FieldAvgPool needs real"),
    "convolution of a mask": (lambda m, x: m.conv(x > 0), r"torch.bool in 'conv' \(.*:\d+\): FieldConv needs real"),
    "norm of a mask": (lambda m, x: m.gate[1]((x > 0)[:, :2]), r"torch.bool in 'gate.1' .*FieldBatchNorm needs real"),
    "softmax of space": (lambda m, x: x.softmax(-1), "method softmax.*axis of space"),
    "one axis": (lambda m, x: x - x.mean(2, keepdim=True), "method mean.*axes of space"),
    "std of space": (lambda m, x: x / x.std((2, 3), keepdim=True), "method std.*axes of space"),
    "index": (lambda m, x: x[:, :, 0], "getitem.*one point of an axis of space"),
    "sample": (lambda m, x: x[0], "getitem.*part of the batch"),
    "mask": (lambda m, x: x[x > 0], "getitem.*index must be numbers and slices"),
    "transpose": (lambda m, x: x.transpose(2, 3), "method transpose.*order of the axes"),
    "flatten": (lambda m, x: x.flatten(2), "method flatten.*mixes points"),
    "batch into channels": (lambda m, x: x.reshape(-1, 2, 9, 11), "method reshape.*samples"),
    "points into channels": (lambda m, x: x.reshape(-1, 9, 4, 11), "method reshape.*mixes points"),
    "cat of space": (lambda m, x: torch.cat((x, x), 2), "function cat.*axis of space"),
    "split of space": (lambda m, x: x.chunk(2, 3), "method chunk.*axis of space"),
    "matmul": (lambda m, x: x @ x.transpose(1, 2), "transpose|matmul"),
    "einsum": (lambda m, x: torch.einsum("bchw,cd->bdhw", x, m.matrix), "function einsum.*kernel size 1"),
    "fft": (lambda m, x: torch.fft.fft2(x).real, "fft_fft2.*SpectralConv"),
    "unfold": (lambda m, x: F.unfold(x, 3), "function unfold.*FieldAttention in windows"),
    "attention": (lambda m, x: F.scaled_dot_product_attention(x, x, x), "scaled_dot_product_attention.*FieldAttention"),
    "functional convolution": (lambda m, x: F.conv2d(x, m.conv.weight), "function conv2d.*nn.Conv2d as a layer"),
    "interpolation": (lambda m, x: F.interpolate(x, scale_factor=1.5), "interpolate.*not whole numbers"),
    "antialias": (lambda m, x: F.interpolate(x, scale_factor=2, mode="bilinear", antialias=True), "antialias"),
    "last axis": (lambda m, x: x + m.last, "method add"),
    "no_grad": (no_grad, "no_grad, torch.autocast"),
    "autocast": (autocast, "no_grad, torch.autocast"),
    "assignment": (assigned, "assignment to a part"),
    "in place, of what has a crop": (view_in_place, "method add_.*in place"),
    "in place, of a crop": (crop_in_place, "method mul_.*in place"),
    "in place, perhaps of a copy": (contiguous_in_place, "method mul_.*in place"),
    "in place, of a parameter": (lambda m, x: x + m.channel.mul_(2).sum(), "method mul_.*in place"),
    "in place, of a parameter's shape": (lambda m, x: x + m.channel.unsqueeze_(1).sum(), "unsqueeze_.*in place"),
    "autograd Function": (
        lambda m, x: Straight.apply(x),
        "the autograd Function Straight|an autograd Function, or",
    ),  # as torch up to 2.13, or from 2.14 on, calls it
    "autograd Function of nothing": (lambda m, x: x + Constant.apply(x), "a tensor that needs gradients.*no param"),
    "autograd Function of nothing, returned": (lambda m, x: Constant.apply(x), "forward of Of.* returns a Tensor"),
    "result of another kind": (lambda m, x: types.SimpleNamespace(y=x), "forward of Of.* returns a SimpleNamespace"),
    "recomputation": (lambda m, x: checkpoint(m.conv, x, use_reentrant=False), "torch.utils.checkpoint"),
    "recomputation as a Function": (
        lambda m, x: checkpoint(m.conv, x, use_reentrant=True),
        "CheckpointFunction|torch.utils.checkpoint",
    ),  # as torch up to 2.13, or from 2.14 on, has it
    "mode": (by_mode, "other things in training"),
    "kept": (kept_as_attribute, "Of '': its forward keeps a tensor"),
    "kept in a list": (kept_in_a_list, "keeps a tensor"),
    "kept in a buffer": (kept_in_a_buffer, "keeps a tensor"),
    "attribute of a tensor": (gradient_wanted, "assignment to the attribute requires_grad"),
    "bytes": (lambda m, x: x.view(torch.int64).double(), "method view.*dtype"),
    "index of a tensor": (lambda m, x: torch.arange(9.0)[x.long()], "test_functions.py"),
    "size of a tensor": (lambda m, x: torch.arange(9.0).expand(x), "function|method|forward"),
    "attribute": (lambda m, x: x.T, "attribute T"),
    "out": (lambda m, x: torch.add(x, x, out=x), "out= is in place"),
    "squeeze": (lambda m, x: x.squeeze(), "method squeeze"),
    "divisor": (lambda m, x: F.avg_pool2d(x, 2, divisor_override=3), "divisor_override"),
    "indices": (lambda m, x: F.max_pool2d(x, 2, return_indices=True), "indices"),
    "indices, adaptive": (lambda m, x: F.adaptive_max_pool2d(x, 1, return_indices=True), "indices"),
    "an error of Python": (lambda m, x: x * {}[x.dim()], r"forward of Of \(.*test_functions.py:\d+\): KeyError: 4"),
    "two fields": (lambda m, x: x + F.interpolate(x, scale_factor=2), "method add.*broadcast"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_by_name(comm, name):
    function, pattern = REFUSED[name]
    children_ = children()
    module = Of(function, **children_, last=parameter(9)).double()
    module.register_buffer("average", torch.zeros((), dtype=torch.float64))
    before = copy.deepcopy(module.state_dict())
    text = refusal(module, comm, 4, (9, 11))
    assert re.search(pattern, text), text
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


def test_shard_leaves_torch_as_it_was(comm):
    apply, call = vars(torch.autograd.Function)["apply"], nn.Module.__call__
    refusal(Of(lambda m, x: Straight.apply(x)), comm, 4, (9, 11))
    x = draw(2).requires_grad_()
    Straight.apply(x).sum().backward()
    assert vars(torch.autograd.Function)["apply"] is apply
    assert nn.Module.__call__ is call
    assert x.grad.tolist() == [2, 2]
    assert isinstance(nn.Conv2d(1, 1, 1).weight, nn.Parameter)
