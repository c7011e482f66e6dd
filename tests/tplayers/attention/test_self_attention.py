"""SelfAttention against plain multi-head attention, and the order of its heads over TP sizes."""

import math

import pytest
import torch
import torch.nn.functional as F

import tplayers
from tplayers import ColumnParallelLinear, Randomness, SelfAttention

H, HEADS, D = 8, 4, 2
S, B = 5, 2


REAL = torch.tensor([[True] * 3 + [False] * 2, [True] * S])
PADDINGS = {
    "none": None,
    "lengths": torch.tensor([3, 5]),
    "mask": REAL,
    "holes": torch.tensor([[1, 0, 1, 1, 0]] * 2) == 1,
}


def plain_attention(wholes, x, causal, real=None):
    """Head by head, from the global weights: rows of the fused weight are [queries; keys; values], by head."""
    wq, wk, wv = wholes["qkv.weight"].chunk(3)
    bq, bk, bv = wholes["qkv.bias"].chunk(3)
    contexts = []
    for head in range(HEADS):
        rows = slice(head * D, (head + 1) * D)
        q, k, v = (x @ w[rows].t() + b[rows] for w, b in ((wq, bq), (wk, bk), (wv, bv)))  # [s, b, d]
        scores = torch.einsum("sbd,tbd->bst", q, k) / math.sqrt(D)
        if causal:
            later = torch.arange(S)[None, :] > torch.arange(S)[:, None]
            scores = scores + torch.where(later, -torch.inf, 0.0)
        if real is not None:
            scores = scores.masked_fill(~real[:, None, :], -torch.inf)
        contexts.append(torch.einsum("bst,tbd->sbd", torch.softmax(scores, -1), v))
    return F.linear(torch.cat(contexts, -1), wholes["projection.weight"], wholes["projection.bias"])


@pytest.mark.mpi
@pytest.mark.sizes(1, 2)
@pytest.mark.parametrize("recompute_core", [False, True])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("dropout", [0.0, 1e-12])  # the fused core, and the one that could drop (nothing, here)
@pytest.mark.parametrize("causal", [True, False])
def test_against_plain(group, random, close, causal, dropout, padding, recompute_core):
    layer = SelfAttention(
        H, HEADS, group.comm, causal=causal, attention_dropout=dropout, recompute_core=recompute_core,
        dtype=torch.float64,
    )  # fmt: skip
    wholes = group.fill(layer)
    x, gradient = random(S, B, H), random(S, B, H, seed=1)
    x_expected = x.clone().requires_grad_()
    given = PADDINGS[padding]
    real = REAL if padding == "lengths" else given
    y = plain_attention(wholes, x_expected, causal, real)
    y.backward(gradient)

    x.requires_grad_()
    out = layer(x, Randomness(0, 0, tuple(range(B))), given)
    close(group.same(out), y.detach())
    out.backward(gradient)
    close(group.same(x.grad), x_expected.grad)
    close(group.gradients(layer), {name: whole.grad for name, whole in wholes.items()})


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dropout, mask", [(0.0, "position"), (0.5, "position"), (0.5, "fused")])
def test_what_padding_holds_does_not_matter(ranks_of, dtype, causal, dropout, mask):
    """Bit for bit, with scores of either sign and any size; a sample that is all padding gives no NaN."""
    layer = SelfAttention(
        H, HEADS, *ranks_of(1), causal=causal, attention_dropout=dropout, dropout_mask=mask, dtype=dtype
    )
    tplayers.initialize(layer, 3)
    x = torch.randn(S, B, H, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = []
    for size in (0.0, 1.0, -300.0):
        filled = x.clone()
        filled[3:, 0] *= size
        filled.requires_grad_()
        y = layer(filled, Randomness(1, 2, (3, 4)), torch.tensor([3, 5]))
        real = torch.cat((y[:3, 0], y[:, 1]))
        found.append((real, torch.autograd.grad(real.sum(), filled)[0]))
    for real, gradient in found:
        assert torch.equal(real, found[0][0]) and torch.equal(gradient[:3], found[0][1][:3])
        assert (gradient[3:, 0] == 0).all() and (gradient != 0).any()
    x.requires_grad_()
    y = layer(300 * x, Randomness(1, 2, (3, 4)), torch.tensor([0, 1]))
    y.float().sum().backward()
    assert y.isfinite().all() and x.grad.isfinite().all()


@pytest.mark.mpi
@pytest.mark.every_size
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_numerically(group, random, dropout):
    layer = SelfAttention(H, HEADS, group.comm, attention_dropout=dropout, dtype=torch.float64)
    wholes = group.fill(layer)
    forward, randomness = layer.forward, Randomness(0, 0, (3, 8))
    layer.forward = lambda x: forward(x, randomness)
    group.numerically_right(layer, wholes, random(3, 2, H))


@pytest.mark.mpi
@pytest.mark.every_size
def test_dropout_is_the_same_at_every_tp_size(group, alone, random, close):
    """With dropout, the split layer computes what the whole one does: masks follow the global head."""
    split, whole = (
        SelfAttention(H, HEADS, side.comm, attention_dropout=0.4, dtype=torch.float64) for side in (group, alone)
    )
    alone.load(whole, group.fill(split))
    randomness = Randomness(7, 3, (11, 5))
    xs = [random(S, B, H).requires_grad_() for _ in range(2)]
    y, expected = split(xs[0], randomness), whole(xs[1], randomness)
    close(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    close(xs[0].grad, xs[1].grad)
    close(group.gradients(split), alone.gradients(whole))
    assert not torch.allclose(y, split(xs[0], Randomness(7, 4, (11, 5))))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 1e-12])
def test_numerically_where_a_row_has_no_real_token(ranks_of, causal, dropout):
    """A sample of padding alone, and one whose first tokens are padding, with right gradients on both paths."""
    layer = SelfAttention(H, HEADS, *ranks_of(1), causal=causal, attention_dropout=dropout, dtype=torch.float64)
    tplayers.initialize(layer, 3)
    real = torch.tensor([[False] * S, [False, False, True, True, False]])
    x = torch.randn(S, B, H, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: layer(x, Randomness(1, 2, (3, 4)), real), x, fast_mode=True)
    if not causal:
        nothing = layer(x, Randomness(1, 2, (3, 4)), torch.tensor([0, S]))
        torch.testing.assert_close(nothing, layer(x, Randomness(1, 2, (3, 4))), rtol=1e-9, atol=1e-12)


@pytest.mark.mpi
@pytest.mark.every_size
def test_future_does_not_matter(group, random):
    layer = SelfAttention(H, HEADS, group.comm, dtype=torch.float64)
    group.fill(layer)
    x = random(S, B, H)
    changed = x.clone()
    changed[3:] += 1
    one, two = layer(x), layer(changed)
    assert torch.equal(one[:3], two[:3])
    assert not torch.allclose(one[3:], two[3:])


def test_heads_survive_every_change_of_tp(ranks_of):
    """1 -> 2 -> 4 -> 1, and each rank's rows are [its queries; its keys; its values]."""

    def placements(size):
        return [tplayers.placements(ColumnParallelLinear(H, 3 * H, r, blocks=3))["weight"] for r in ranks_of(size)]

    whole = torch.arange(3 * H * H).view(3 * H, H)
    for size in (1, 2, 4, 2, 1):
        parts = [placement.part(whole) for placement in placements(size)]
        for rank, part in enumerate(parts):
            per_rank = HEADS // size * D
            first = rank * per_rank
            rows = [block * H + first + row for block in range(3) for row in range(per_rank)]
            assert torch.equal(part, whole[rows])
        whole = placements(size)[0].assemble(parts)
    assert torch.equal(whole, torch.arange(3 * H * H).view(3 * H, H))


def test_training_with_dropout_needs_randomness(ranks_of):
    layer = SelfAttention(H, HEADS, *ranks_of(1), attention_dropout=0.1, site="layers.3.attention")
    with pytest.raises(ValueError, match=r"dropout at layers\.3\.attention: .* needs randomness=tplayers\.Randomness"):
        layer(torch.zeros(S, B, H))
    layer.eval()
    layer(torch.zeros(S, B, H))
