"""Attention over a context group against plain attention to the whole sequence, at shapes and masks that are drawn."""

from __future__ import annotations

import math
import random as python_random
from typing import Any

import pytest
import torch
from torch import Tensor

import tplayers
from commengine import Communicator, ProcessGrid
from tplayers import Randomness, SelfAttention
from tplayers.attention.rotary import frequencies, rotation
from tplayers.attention.self_attention import padding_bias, real_tokens
from tplayers.context.group import CONTEXT_METHODS, ContextGroup
from tplayers.rng import dropout_mask

CASES = 200
SITE = "attention"


@pytest.fixture(scope="module")
def contexts(groups: list[Communicator]) -> list[dict[tuple[str, bool], ContextGroup]]:
    """By method and mask: a context group of each of ``groups``."""
    return [
        {
            (method, causal): ContextGroup(comm, method, causal=causal, threaded=causal)
            for method in CONTEXT_METHODS
            for causal in (True, False)
        }
        for comm in groups
    ]


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def visible(s: int, causal: bool, padding: Tensor | None, b: int) -> Tensor:
    """Bool [b, s, s]: what each row looks at. Written from the words of `padding_bias`, element by element."""
    seen = torch.ones(b, s, s, dtype=torch.bool)
    real = torch.ones(b, s, dtype=torch.bool) if padding is None else real_tokens(padding, b, s)
    for sample in range(b):
        for row in range(s):
            columns = [c for c in range(s) if real[sample, c] and (c <= row or not causal)]
            if not columns:
                columns = [row] if causal else list(range(s))
            seen[sample, row] = False
            seen[sample, row, columns] = True
    return seen


def plain(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, kept: Tensor | None, p: float) -> Tensor:
    """Softmax of whole rows of scores, times the values."""
    times = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    scores = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).masked_fill(~seen[:, None], -torch.inf)
    weights = scores.softmax(-1)
    return (weights if kept is None else weights * kept / (1 - p)) @ v


def one_core(causal: bool, p: float, s: int) -> Any:
    """What `SelfAttention` gives to a group: attention on one rank."""

    def core(q: Tensor, k: Tensor, v: Tensor, drawn: Tensor | None, bias: Tensor | None) -> Tensor:
        seen = torch.ones(s, s, dtype=torch.bool).tril() if causal else torch.ones(s, s, dtype=torch.bool)
        if bias is not None:
            seen = bias[:, 0] == 0
        kept = None if drawn is None else dropout_mask(p, drawn, s, s)
        return plain(q, k, v, seen if seen.dim() == 3 else seen.expand(q.shape[0], s, s), kept, p)

    return core


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("method", [
    pytest.param(method, marks=pytest.mark.sizes(2, 4) if method != "ulysses" else pytest.mark.sizes(2, only=True))
    for method in CONTEXT_METHODS
])  # fmt: skip
@pytest.mark.parametrize("cases", [CASES // 2, pytest.param(CASES, marks=pytest.mark.long)])
def test_against_plain_attention(world, contexts, method, cases):
    """Odd chunks, samples of any length and with holes, groups that the ranks do not divide, dropout."""
    of_paddings = dict.fromkeys(("none", "lengths", "mask"), 0)
    cases = cases if world.size == 2 else cases // 4  # four ranks take turns on two cores
    for number in range(cases):
        drawn = python_random.Random(f"{method}{number}")
        third = world.size == 4 and number % 4 == 3  # of three ranks
        if third and len(contexts) == 1:
            continue
        groups = contexts[1 if third else 0]
        causal, size = drawn.random() < 0.5, groups["ring", True].comm.size
        context = groups[method, causal]
        b, d = drawn.randint(1, 3), 2 * drawn.randint(1, 5)
        of_kv, per = drawn.randint(1, 4), drawn.randint(1, 4)
        if method == "ulysses":
            of_kv, per = drawn.choice([(size, per), (of_kv, size), (2 * size, 1), (1, 2 * size), (3, 2 * size)])
        heads = of_kv * per
        s = size * (2 if causal else 1) * drawn.choice([1, 1, 3, 5, 7, 16])
        kind = drawn.choice(list(of_paddings))
        of_paddings[kind] += 1
        padding = {
            "none": None,
            "lengths": torch.tensor([drawn.randint(0, s) for _ in range(b)]),
            "mask": torch.tensor([[drawn.random() < 0.6 for _ in range(s)] for _ in range(b)]),
        }[kind]
        p = drawn.choice([0.0, 0.0, 0.3, 1e-12])
        keys = Randomness(1, number, range(b)).keys(SITE, range(heads)) if p else None
        scale = drawn.choice([1.0, 1.0, 30.0])
        wholes = [
            (scale if n < 2 else 1.0) * draw(b, h, s, d, seed=10 * number + n)
            for n, h in enumerate((heads, of_kv, of_kv))
        ]
        gradient = draw(b, heads, s, d, seed=10 * number + 5)
        expected = [whole.clone().requires_grad_() for whole in wholes]
        kept = None if keys is None else dropout_mask(p, keys, s, s)
        y = plain(*expected, visible(s, causal, padding, b), kept, p)
        y.backward(gradient)

        # slices of a larger tensor, as a layer's queries, keys and values are
        parts = [context.take(whole, 2).permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for whole in wholes]
        parts = [part.requires_grad_() for part in parts]
        bias = None if padding is None else padding_bias(padding, b, s, torch.float64, causal=causal)
        out = context.attention(*parts, keys, bias, dropout=p, core=one_core(causal, p, s))
        out.backward(context.take(gradient, 2))
        named = f"case {number}: {size} ranks, {causal=}, {b=}, {heads=}, {of_kv=}, {s=}, {d=}, {kind}, {p=}, {scale=}"
        for name, found, whole in zip(
            ("out", "q", "k", "v"), (out, *(x.grad for x in parts)), (y.detach(), *(x.grad for x in expected)),
            strict=True,
        ):  # fmt: skip
            torch.testing.assert_close(
                found.detach(), context.take(whole, 2), rtol=1e-10, atol=1e-10,
                msg=lambda text, of=f"{name} of {named}": f"{of}: {text}",
            )  # fmt: skip
    assert min(of_paddings.values()) > cases // 10


@pytest.mark.mpi
@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", CONTEXT_METHODS)
def test_lower_precision(contexts, method, dtype):
    """A float32 pass is right to 1e-5, and a bfloat16 one to what the rounding of the result costs."""
    for groups in contexts:
        context = groups[method, True]
        s, b, heads, d = 12 * context.comm.size, 2, 12, 8
        wholes = [draw(b, h, s, d, seed=n, dtype=dtype) for n, h in enumerate((heads, 12, 12))]
        expected = [whole.double().requires_grad_() for whole in wholes]
        seen = visible(s, True, None, b)
        y = plain(*expected, seen, None, 0.0)
        y.sum().backward()
        parts = [context.take(whole, 2).requires_grad_() for whole in wholes]
        out = context.attention(*parts, None, None, dropout=0.0, core=one_core(True, 0.0, s))
        assert out.dtype == dtype
        out.sum().backward()
        bound = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 4e-2}
        for found, whole in zip((out, *(x.grad for x in parts)), (y, *(x.grad for x in expected)), strict=True):
            torch.testing.assert_close(found.double(), context.take(whole.detach(), 2), **bound)


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("method", CONTEXT_METHODS)
def test_layer_within_a_grid(world, alone, close, method, causal, sequence_parallel):
    """SelfAttention of (tensor, context) = (2, 2), or (1, 2): rotary positions, grouped queries, dropout, recompute."""
    grid = ProcessGrid(world, tensor=world.size // 2, context=2)
    context = ContextGroup(grid.context, method, causal=causal)
    shards = grid.tensor.size if sequence_parallel else 1
    for recompute in (False, True):
        options = {
            "causal": causal, "query_groups": 4, "attention_dropout": 0.2, "recompute_core": recompute,
            "dtype": torch.float64,
        }  # fmt: skip
        split = SelfAttention(32, 8, grid.tensor, context=context, sequence_parallel=sequence_parallel, **options)
        whole = SelfAttention(32, 8, alone.comm, **options)
        for layer in (split, whole):
            tplayers.initialize(layer, 5)
        s, b = 16, 2
        turns = frequencies(4, 10000.0)
        positions = torch.arange(s)
        x, gradient = draw(s, b, 32, seed=1), draw(s, b, 32, seed=2)
        randomness = Randomness(3, 4, range(b))
        expected = x.clone().requires_grad_()
        y = whole(expected, randomness, None, None, rotation(positions, turns, torch.float64))
        y.backward(gradient)

        def own(tensor: Tensor) -> Tensor:
            return context.take(tensor, 0).chunk(shards)[grid.tensor.rank if sequence_parallel else 0].contiguous()

        mine = own(x).requires_grad_()
        turned = rotation(context.positions(s, x), turns, torch.float64)
        out = split(mine, randomness, None, None, turned)
        out.backward(own(gradient))
        close(out.detach(), own(y.detach()))
        close(mine.grad, own(expected.grad))
        if sequence_parallel:
            tplayers.sum_partial_gradients(split, grid.tensor)
        for name, placement in tplayers.placements(split).items():
            total = split.get_parameter(name).grad
            grid.context.all_reduce(total)
            close(total, placement.part(whole.get_parameter(name).grad))
    grid.close()


@pytest.mark.mpi
@pytest.mark.sizes(2, only=True)
def test_fused_dropout(world):
    """The ranks draw masks of their own for their heads; a method that never sees a whole row refuses."""
    for method in CONTEXT_METHODS:
        context = ContextGroup(world, method)
        with Communicator(world.mpi.Split(world.rank), name="one") as one:
            layer = SelfAttention(16, 4, one, context=context, attention_dropout=0.5, dropout_mask="fused")
            tplayers.initialize(layer, 1)
            x = draw(8, 2, 16, seed=1, dtype=torch.float32)[context.positions(8, torch.empty(0))]
            if method != "ulysses":
                with pytest.raises(ValueError, match="dropout_mask='fused' excludes context_method"):
                    layer(x, Randomness(1, 2, (3, 4)))
                continue
            found = [layer(x, Randomness(1, 2, (3, 4))) for _ in range(2)]
            assert torch.equal(*found)
            assert layer.rank == world.rank


@pytest.mark.mpi
@pytest.mark.sizes(2, only=True)
def test_refusals(world, alone):
    with pytest.raises(ValueError, match=r"context_method='rings' .*ulysses"):
        ContextGroup(world, "rings")
    context = ContextGroup(world)
    with pytest.raises(ValueError, match="causal=False differs"):
        SelfAttention(8, 2, alone.comm, causal=False, context=context)
    layer = SelfAttention(9, 3, alone.comm, context=context)
    words = r"a context group of 2 ranks does not divide attention_heads_of_a_rank=3; sizes that would work: \[1, 3\]"
    with pytest.raises(ValueError, match=words):
        layer(torch.zeros(2, 1, 9))
    cache = tplayers.KeyValueCache(1, 1, 3, 3, 4, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="excludes a context group"):
        layer.eval()(torch.zeros(2, 1, 9), cache=cache.layers[0])


@pytest.mark.mpi
@pytest.mark.sizes(2, only=True)
def test_blocks_have_one_derivative_alone(world):
    for method in ("ring", "gather"):
        context = ContextGroup(world, method)
        q, k, v = (draw(1, 2, 4, 2, seed=n).requires_grad_() for n in range(3))
        out = context.attention(q, k, v, None, None, dropout=0.0, core=one_core(True, 0.0, 8))
        (found,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiated"):
            found.sum().backward()


@pytest.mark.mpi
@pytest.mark.sizes(2)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("method", CONTEXT_METHODS)
def test_under_autocast(world, alone, method, dropout):
    """Products and messages are bfloat16, as on one rank; results and gradients agree to its rounding."""
    context = ContextGroup(world, method)
    split, whole = (SelfAttention(32, 4, alone.comm, context=one, attention_dropout=dropout) for one in (context, None))
    for layer in (split, whole):
        tplayers.initialize(layer, 5)
    x, gradient = (draw(16, 2, 32, seed=n, dtype=torch.float32) for n in (1, 2))
    turned = [
        rotation(at, frequencies(8, 10000.0), torch.float32) for at in (context.positions(16, x), torch.arange(16))
    ]
    found = []
    for layer, mine, turn, of in ((split, context.take(x, 0), turned[0], context), (whole, x, turned[1], None)):
        mine.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(mine, Randomness(1, 2, (3, 4)), None, None, turn)
        y.backward((gradient if of is None else of.take(gradient, 0)).to(y.dtype))
        found.append((y.detach(), mine.grad))
    assert found[0][0].dtype == found[1][0].dtype
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one.float(), context.take(other, 0).float(), rtol=3e-2, atol=3e-2)


@pytest.mark.mpi
@pytest.mark.sizes(2, only=True)
@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="torch 2.6: dynamo hides the error's words")
def test_a_graph_refuses(world, alone):
    layer = SelfAttention(8, 2, alone.comm, context=ContextGroup(world))
    tplayers.initialize(layer, 5)
    with pytest.raises(Exception, match="a context group does not compile"):
        torch.compile(layer, fullgraph=True, backend="eager")(torch.zeros(2, 1, 8))


@pytest.mark.mpi
@pytest.mark.sizes(2)
@pytest.mark.parametrize("method", CONTEXT_METHODS)
def test_a_group_of_one_rank_has_whole_sequences(alone, method):
    q, k, v = (draw(1, 4, 6, 2, seed=n) for n in range(3))
    context = ContextGroup(alone.comm, method)
    found = context.attention(q, k, v, None, None, dropout=0.0, core=one_core(True, 0.0, 6))
    seen = visible(6, True, None, 1)
    torch.testing.assert_close(found, plain(q, k, v, seen, None, 0.0), rtol=1e-12, atol=1e-12)
