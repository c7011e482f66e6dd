"""MLP and TransformerBlock against the same functions of the global weights, in plain torch."""

import math

import pytest
import torch
import torch.nn.functional as F

from tplayers import MLP, TransformerBlock, placements

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]

H, HEADS, FFN = 8, 4, 16
S, B = 4, 2


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def plain_mlp(w, x, prefix=""):
    up = gelu(F.linear(x, w[prefix + "up.weight"], w[prefix + "up.bias"]))
    return F.linear(up, w[prefix + "down.weight"], w[prefix + "down.bias"])


def plain_block(w, x, causal):
    """The layer with torch's own multi-head attention, whose fused weight has the same order."""
    normed = F.layer_norm(x, (H,), w["attention_norm.weight"], w["attention_norm.bias"])
    mask = torch.ones(S, S, dtype=torch.bool).triu(1) if causal else None
    attention, _ = F.multi_head_attention_forward(
        normed, normed, normed, H, HEADS, w["attention.qkv.weight"], w["attention.qkv.bias"], None, None, False, 0.0,
        w["attention.projection.weight"], w["attention.projection.bias"], attn_mask=mask, need_weights=False,
    )  # fmt: skip
    x = x + attention
    return x + plain_mlp(w, F.layer_norm(x, (H,), w["mlp_norm.weight"], w["mlp_norm.bias"]), "mlp.")


def compare(group, close, layer, wholes, plain, x, gradient):
    x_expected = x.clone().requires_grad_()
    y = plain(wholes, x_expected)
    y.backward(gradient)
    x.requires_grad_()
    out = layer(x)
    close(group.same(out), y.detach())
    out.backward(gradient)
    close(group.same(x.grad), x_expected.grad)
    close(group.gradients(layer), {name: whole.grad for name, whole in wholes.items()})


@pytest.mark.parametrize("shape", [(H,), (3, H), (S, B, H), (0, B, H)])
def test_mlp(group, random, close, shape):
    layer = MLP(H, FFN, group.comm, dtype=torch.float64)
    compare(group, close, layer, group.fill(layer), plain_mlp, random(*shape), random(*shape, seed=1))


def test_mlp_numerically(group, random):
    layer = MLP(4, 8, group.comm, dtype=torch.float64)
    group.numerically_right(layer, group.fill(layer), random(2, 4))


@pytest.mark.parametrize("causal", [True, False])
def test_block(group, random, close, causal):
    layer = TransformerBlock(H, HEADS, FFN, group.comm, causal=causal, dtype=torch.float64)
    wholes = group.fill(layer)
    compare(
        group, close, layer, wholes, lambda w, x: plain_block(w, x, causal), random(S, B, H), random(S, B, H, seed=1)
    )


def test_block_numerically(group, random):
    layer = TransformerBlock(H, HEADS, FFN, group.comm, dtype=torch.float64)
    group.numerically_right(layer, group.fill(layer), random(3, 1, H))


def test_replicated_gradients_are_bit_identical_on_all_ranks(group, random):
    """Else replicated parameters would drift apart, and nothing brings them together again."""
    layer = TransformerBlock(H, HEADS, FFN, group.comm, dtype=torch.float64)
    group.fill(layer)
    x = random(S, B, H).float().double().requires_grad_()
    layer(x).square().sum().backward()
    replicated = [name for name, placement in placements(layer).items() if not placement.sharded]
    assert len(replicated) == 6
    for name in replicated:
        group.same(layer.get_parameter(name).grad)
    group.same(x.grad)
