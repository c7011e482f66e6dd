"""MLP and TransformerBlock against the same functions of the global weights, in plain torch."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.support.small_models import block
from tplayers import MLP, SwiGLU, placements

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]

H, HEADS, FFN = 8, 4, 16
S, B = 4, 2


def gelu(x, form="tanh"):
    if form == "erf":
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def plain_mlp(w, x, prefix="", form="tanh"):
    up = gelu(F.linear(x, w[prefix + "up.weight"], w[prefix + "up.bias"]), form)
    return F.linear(up, w[prefix + "down.weight"], w[prefix + "down.bias"])


def plain_block(w, x, causal, placement="pre", form="tanh", real=None):
    """The layer with torch's own multi-head attention, whose fused weight has the same order."""

    def norm(x, name):
        return F.layer_norm(x, (H,), w[f"{name}_norm.weight"], w[f"{name}_norm.bias"])

    def attention(x):
        return F.multi_head_attention_forward(
            x, x, x, H, HEADS, w["attention.qkv.weight"], w["attention.qkv.bias"], None, None, False, 0.0,
            w["attention.projection.weight"], w["attention.projection.bias"], need_weights=False,
            attn_mask=torch.ones(S, S, dtype=torch.bool).triu(1) if causal else None,
            key_padding_mask=None if real is None else ~real,
        )[0]  # fmt: skip

    if placement == "post":
        x = norm(x + attention(x), "attention")
        return norm(x + plain_mlp(w, x, "mlp.", form), "mlp")
    x = x + attention(norm(x, "attention"))
    return x + plain_mlp(w, norm(x, "mlp"), "mlp.", form)


def compare(group, close, layer, wholes, plain, x, gradient, *more):
    x_expected = x.clone().requires_grad_()
    y = plain(wholes, x_expected)
    y.backward(gradient)
    x.requires_grad_()
    out = layer(x, *more)
    close(group.same(out), y.detach())
    out.backward(gradient)
    close(group.same(x.grad), x_expected.grad)
    close(group.gradients(layer), {name: whole.grad for name, whole in wholes.items()})


@pytest.mark.parametrize("form", ["tanh", "erf"])
@pytest.mark.parametrize("shape", [(H,), (3, H), (S, B, H), (0, B, H)])
def test_mlp(group, random, close, shape, form):
    layer = MLP(H, FFN, group.comm, gelu=form, dtype=torch.float64)
    compare(
        group, close, layer, group.fill(layer), lambda w, x: plain_mlp(w, x, "", form), random(*shape),
        random(*shape, seed=1),
    )  # fmt: skip


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(H,), (S, B, H), (0, B, H)])
def test_swiglu(group, random, close, shape, bias):
    layer = SwiGLU(H, FFN, group.comm, bias=bias, dtype=torch.float64)

    def plain(w, x):
        gate, up = F.linear(x, w["gate_up.weight"], w.get("gate_up.bias")).split(FFN, -1)
        return F.linear(gate * torch.sigmoid(gate) * up, w["down.weight"], w.get("down.bias"))

    compare(group, close, layer, group.fill(layer), plain, random(*shape), random(*shape, seed=1))


def test_mlp_numerically(group, random):
    layer = MLP(4, 8, group.comm, dtype=torch.float64)
    group.numerically_right(layer, group.fill(layer), random(2, 4))


@pytest.mark.parametrize("causal", [True, False])
def test_block(group, random, close, causal):
    form = {} if causal else {"gelu": "tanh"}
    layer = block(group.comm, H, HEADS, FFN, encoder=not causal, dtype=torch.float64, **form)
    wholes = group.fill(layer)
    compare(
        group, close, layer, wholes, lambda w, x: plain_block(w, x, causal), random(S, B, H), random(S, B, H, seed=1)
    )


@pytest.mark.parametrize("recompute", [None, "full", "selective"])
@pytest.mark.parametrize("placement", ["pre", "post"])
def test_block_of_an_encoder(group, random, close, placement, recompute):
    """With padding, and GELU by erf; whatever is recomputed."""
    options = {"norm_placement": placement, "recompute": recompute, "dtype": torch.float64}
    layer = block(group.comm, H, HEADS, FFN, encoder=True, **options)
    real = torch.tensor([[True] * S, [True] * 3 + [False] * (S - 3)])
    compare(
        group, close, layer, group.fill(layer), lambda w, x: plain_block(w, x, False, placement, "erf", real),
        random(S, B, H), random(S, B, H, seed=1), None, real,
    )  # fmt: skip


def test_block_numerically(group, random):
    layer = block(group.comm, H, HEADS, FFN, dtype=torch.float64)
    group.numerically_right(layer, group.fill(layer), random(3, 1, H))


def test_replicated_gradients_are_bit_identical_on_all_ranks(group, random):
    """Else replicated parameters would drift apart, and nothing brings them together again."""
    layer = block(group.comm, H, HEADS, FFN, dtype=torch.float64)
    group.fill(layer)
    x = random(S, B, H).float().double().requires_grad_()
    layer(x).square().sum().backward()
    replicated = [name for name, placement in placements(layer).items() if not placement.sharded]
    assert len(replicated) == 6
    for name in replicated:
        group.same(layer.get_parameter(name).grad)
    group.same(x.grad)
