"""LayerNorm and ParallelLayerNorm against torch's layer_norm, RMSNorm against its rms_norm."""

import pytest
import torch
import torch.nn.functional as F

import commengine
from tplayers import LayerNorm, ParallelLayerNorm, RMSNorm

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


@pytest.mark.filterwarnings("ignore:var_mean")  # of no tokens
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_parallel_layer_norm(group, random, close, shape, eps):
    layer = ParallelLayerNorm(H, group.comm, eps, dtype=torch.float64)
    wholes = group.fill(layer)
    whole, gradient = (3 * random(*shape) + 1).requires_grad_(), random(*shape, seed=1)
    y, x_grad, grads = expected(wholes, whole, gradient, eps)
    x = group.mine(whole.detach()).requires_grad_()
    out = layer(x)
    out.backward(group.mine(gradient))
    close(group.joined(out), y)
    close(group.joined(x.grad), x_grad)
    close(group.gradients(layer), grads)


def test_parallel_layer_norm_of_a_transposed_view(group, random, close):
    layer = ParallelLayerNorm(H, group.comm, dtype=torch.float64)
    wholes = group.fill(layer)
    whole, gradient = random(2, 3, H).requires_grad_(), random(2, 3, H, seed=1)
    y, x_grad, grads = expected(wholes, whole, gradient)
    x = group.mine(whole.detach()).permute(2, 1, 0).contiguous().permute(2, 1, 0).requires_grad_()
    out = layer(x)
    out.backward(group.mine(gradient).transpose(0, 1).contiguous().transpose(0, 1))
    close(out, group.mine(y))
    close(x.grad, group.mine(x_grad))
    close(group.gradients(layer), grads)


def test_parallel_layer_norm_numerically(group, random):
    layer = ParallelLayerNorm(H, group.comm, dtype=torch.float64)
    group.numerically_right(layer, group.fill(layer), random(2, H), "in out")


@pytest.mark.parametrize("offset", [0.0, 1e3, -1e4])
def test_large_mean_does_not_cancel_in_float32(group, random, offset):
    whole = (random(16, H) + offset).float()
    layer = ParallelLayerNorm(H, group.comm)
    with torch.no_grad():
        layer.weight.fill_(1)
        layer.bias.zero_()
    out = group.joined(layer(group.mine(whole)))
    truth = F.layer_norm(whole.double(), (H,))
    plain = (F.layer_norm(whole, (H,)).double() - truth).abs().max()
    assert (out.double() - truth).abs().max() <= max(4 * plain, 2e-6 * max(abs(offset), 1))


def test_ranks_of_very_different_mean(group, random):
    """The spread between the ranks' means is most of the variance."""
    whole = (random(4, H) + torch.arange(H) // (H // group.size) * 1e3).float()
    layer = ParallelLayerNorm(H, group.comm)
    with torch.no_grad():
        layer.weight.fill_(1)
        layer.bias.zero_()
    torch.testing.assert_close(
        group.joined(layer(group.mine(whole))), F.layer_norm(whole.double(), (H,)).float(), rtol=1e-4, atol=1e-4
    )


def test_bfloat16_is_as_good_as_torchs(group, random):
    """Statistics of bfloat16 must not be rounded to bfloat16."""
    whole, gradient = (random(64, H) + 8).bfloat16(), random(64, H, seed=1).bfloat16()

    def run(function, x, gradient):
        x = x.clone().requires_grad_()
        y = function(x)
        y.backward(gradient.to(y.dtype))
        return y.detach().double(), x.grad.double()

    truth = run(lambda x: F.layer_norm(x, (H,)), whole.double(), gradient)
    plain = run(lambda x: F.layer_norm(x, (H,)), whole, gradient)
    layer = ParallelLayerNorm(H, group.comm, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.fill_(1)
        layer.bias.zero_()
    found = [group.joined(part) for part in run(layer, group.mine(whole), group.mine(gradient))]
    for ours, theirs, exact in zip(found, plain, truth, strict=True):
        assert (ours - exact).abs().mean() < 1.5 * (theirs - exact).abs().mean()


def test_communication_is_two_numbers_a_token(group):
    layer = ParallelLayerNorm(H, group.comm)
    x = torch.zeros(3, 2, H // group.size, requires_grad=True)
    with commengine.trace(group.comm) as log:
        y = layer(x)
        forward = [(event.operation, event.elements) for event in log.events]
        log.events.clear()
        y.sum().backward()
        backward = [(event.operation, event.elements) for event in log.events]
    assert forward == [("all_gather", 2 * 6 * group.size)]
    assert backward == [("all_reduce", 2 * 6)]


def test_differentiating_twice_raises(group):
    x = torch.randn(4, H // group.size, requires_grad=True)
    layer = ParallelLayerNorm(H, group.comm)
    (gradient,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.square().sum().backward()


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
