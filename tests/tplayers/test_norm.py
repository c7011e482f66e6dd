"""LayerNorm against torch's layer_norm, RMSNorm against its rms_norm."""

import pytest
import torch
import torch.nn.functional as F

from tplayers import LayerNorm, RMSNorm

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]

H = 8
SHAPES = [(H,), (3, H), (2, 3, H), (0, H)]


def expected(wholes, x, gradient, eps=1e-5):
    y = F.layer_norm(x, (H,), wholes["weight"], wholes["bias"], eps)
    grads = torch.autograd.grad(y, [x, *wholes.values()], gradient)
    return y.detach(), grads[0], dict(zip(wholes, grads[1:], strict=True))


@pytest.mark.parametrize("shape", SHAPES)
def test_layer_norm(group, random, close, shape):
    layer = LayerNorm(H, 1e-3, dtype=torch.float64)
    wholes = group.fill(layer)
    x, gradient = random(*shape).requires_grad_(), random(*shape, seed=1)
    y, x_grad, grads = expected(wholes, x, gradient, 1e-3)
    out = layer(x)
    out.backward(gradient)
    close(out, y)
    close(x.grad, x_grad)
    close(group.gradients(layer), grads)


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(group, random, close, shape):
    layer = RMSNorm(H, 1e-3, dtype=torch.float64)
    wholes = group.fill(layer)
    x, gradient = (random(*shape) + 0.5).requires_grad_(), random(*shape, seed=1)
    y = F.rms_norm(x, (H,), wholes["weight"], 1e-3)
    x_grad, grad = torch.autograd.grad(y, [x, wholes["weight"]], gradient)
    out = layer(x)
    out.backward(gradient)
    close(out, y.detach())
    close(x.grad, x_grad)
    close(group.gradients(layer), {"weight": grad})


def test_rms_norm_numerically(group, random):
    layer = RMSNorm(H, dtype=torch.float64)
    group.numerically_right(layer, group.fill(layer), random(3, H))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_of_halves_is_that_of_transformers(group, random, dtype):
    """Bit for bit forward; its gradients, of 4096 tokens, are those of the float64 norm but for one rounding."""
    layer = RMSNorm(H, dtype=dtype)
    group.fill(layer)
    x, gradient = random(64, 64, H).to(dtype).requires_grad_(), (random(64, 64, H, seed=1) + 0.3).to(dtype)
    wide = x.detach().float()
    theirs = layer.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(dtype)
    out = layer(x)
    out.backward(gradient)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out, theirs, rtol=eps, atol=0)
    exact = [t.detach().double().requires_grad_() for t in (x, layer.weight)]
    F.rms_norm(exact[0], (H,), exact[1], 1e-5).backward(gradient.double())
    torch.testing.assert_close(x.grad.double(), exact[0].grad, rtol=eps, atol=1e-4)
    torch.testing.assert_close(layer.weight.grad.double(), exact[1].grad, rtol=eps, atol=1e-2)


@pytest.mark.parametrize(
    "dtype, parameters",
    [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (torch.bfloat16, torch.float32)],
)
def test_half_gradients_are_rounded_once(group, random, dtype, parameters):
    """Of 4096 tokens, and to the parameters' dtype. torch's own backward adds up in half precision on the host."""
    layer = LayerNorm(H, dtype=parameters)
    group.fill(layer)
    wholes = {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}
    x, gradient = random(64, 64, H).to(dtype).requires_grad_(), (random(64, 64, H, seed=1) + 0.3).to(dtype)
    y, x_grad, grads = expected(wholes, x.detach().double().requires_grad_(), gradient.double())
    out = layer(x)
    out.backward(gradient)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.detach().double(), y, rtol=eps, atol=1e-4)
    torch.testing.assert_close(x.grad.double(), x_grad, rtol=eps, atol=1e-4)
    for name, p in layer.named_parameters():
        torch.testing.assert_close(p.grad.double(), grads[name], rtol=torch.finfo(p.dtype).eps, atol=1e-2)
