"""Layers under torch.autocast: torch's dtypes, gradients as exact as on one rank, and no trap of its cache of casts."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tplayers
from commengine import CartesianGrid, Communicator
from tests.support.models.llama import VOCAB as LLAMA_VOCAB
from tests.support.models.llama import S, by_our_names, ours, theirs
from tests.support.small_models import VOCAB, arguments, made, total
from tplayers import ColumnParallelLinear, RowParallelLinear

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2)]

OPTIONS = [{"recompute": "selective"}, {"sequence_parallel": True, "recompute": "full"}, {"attention_dropout": 0.0}]


def half(dtype=torch.bfloat16, **options):
    return torch.autocast("cpu", dtype, **options)


def gradients(model, kind, group, dtype=None, *, inside=False):
    """The global gradients of a step, without autocast for ``dtype=None``. inside: of a backward under autocast."""
    inputs, named = arguments(kind)
    model.zero_grad()
    with half(dtype, enabled=dtype is not None):
        loss = total(model(*inputs, **named)) / 24
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    tplayers.sum_partial_gradients(model, group.comm)
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    return group.gradients(model)


def error(found, truth):
    """The distance of all gradients together, relative to their length."""
    one, other = (torch.cat([each[name].reshape(-1) for name in sorted(each)]) for each in (found, truth))
    return float((one - other).norm() / other.norm())


@pytest.mark.some(5)
@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", ["gpt", "llama", "bert", "post-LN bert at positions"])
def test_gradients_are_as_near_to_float32_as_on_one_rank(group, alone, kind, options):
    whole, split = (made(kind, each.comm, **options) for each in (alone, group))
    truth = gradients(whole, kind, alone)
    for dtype in (torch.bfloat16, torch.float16):
        found = gradients(split, kind, group, dtype)
        assert error(found, truth) <= 1.5 * error(gradients(whole, kind, alone, dtype), truth)
        again = gradients(split, kind, group, dtype, inside=True)
        torch.testing.assert_close(again, found, rtol=0, atol=0)


@pytest.mark.every_size
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_canonical_shards_have_the_same_bits_on_every_number_of_ranks(mpi_world, group, alone, sequence_parallel):
    found = []
    for comm in (mpi_world, alone.comm.mpi):
        with Communicator(comm, order="tree") as tree:
            model = made("gpt", tree, sequence_parallel=sequence_parallel)
            tplayers.use_canonical_shards(model, tree, 4)
            inputs, named = arguments("gpt")
            with half():
                losses = model(*inputs, **named)
            losses.sum().backward()
            found.append((losses.detach(), (group if comm is mpi_world else alone).gradients(model)))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@pytest.mark.parametrize("case", ["all heads, llama3", "biases of q, k, v"])
def test_a_llama_is_as_exact_as_transformers(group, case):
    transformers = pytest.importorskip("transformers", reason="the independent peer is transformers' Llama")
    config = ours(case)
    peer, model = theirs(case, transformers, exact=False), tplayers.GPT(config, group.comm)
    group.load(model, by_our_names({name: p.detach() for name, p in peer.named_parameters()}, config))
    data = torch.randint(LLAMA_VOCAB, (2, S + 1), generator=torch.Generator().manual_seed(3))
    of_theirs, of_ours = [], []
    for enabled in (False, True):
        with half(enabled=enabled):
            logits = peer(input_ids=data[:, :-1]).logits
            losses = F.cross_entropy(logits.float().transpose(1, 2), data[:, 1:])
        peer.zero_grad()
        losses.backward()
        of_theirs.append(by_our_names({name: p.grad.clone() for name, p in peer.named_parameters()}, config))
        with half(enabled=enabled):
            losses = model(data[:, :-1], data[:, 1:])
        model.zero_grad()
        losses.mean().backward()
        of_ours.append(group.gradients(model))
    assert error(of_ours[1], of_theirs[0]) <= 1.5 * error(of_theirs[1], of_theirs[0])


def test_a_backward_of_a_float32_part_may_run_under_autocast(group, random):
    layer = tplayers.MLP(8, 16, group.comm)
    tplayers.initialize(layer, 1)
    x = random(4, 8).float().requires_grad_()
    leaves = (x, *layer.parameters())
    expected = torch.autograd.grad(layer(x).square().sum(), leaves)
    with half():
        with half(enabled=False):
            loss = layer(x).square().sum()
        found = torch.autograd.grad(loss, leaves)
    for half_, whole in zip(found, expected, strict=True):  # torch's own products are then in half precision
        torch.testing.assert_close(half_, whole, rtol=0, atol=0.03 * float(whole.abs().max()))


@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="torch 2.6: autocast keeps a cast without a graph")
def test_a_weight_that_is_used_twice_gets_both_gradients_after_a_pass_without_any(group, random):
    """A cast that was made without a graph must not be the one that a later use finds."""
    up, down = (kind(8, 8, group.comm) for kind in (ColumnParallelLinear, RowParallelLinear))
    tplayers.initialize(nn.ModuleList([up, down]), 1)
    x = random(4, 8).float()
    found = []
    for enabled in (False, True):
        up.zero_grad(), down.zero_grad()
        with half(enabled=enabled):
            if group.size > 1:  # plain F.linear has this trap itself
                with torch.no_grad():
                    down(up(x))
            loss = down(up(down(up(x)))).float().square().sum() * 1e6
        loss.backward()
        found.append([p.grad for layer in (up, down) for p in layer.parameters()])
    for half_, whole in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(half_, whole, rtol=0.05, atol=0.03 * float(whole.abs().max()))


class OfPoints(nn.MultiheadAttention):
    def forward(self, x):
        points = x.flatten(2).transpose(1, 2)
        return super().forward(points, points, points)[0].transpose(1, 2).view(x.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_layers_give_the_dtypes_of_torchs(group, dtype):
    comm, grid = group.comm, CartesianGrid(group.comm, (group.size, 1))
    field = grid.decompose((2 * group.size, 4))
    flat, block = (4, 16), (2, 4, 2, 4)
    pairs = [
        (ColumnParallelLinear(16, 16, comm), nn.Linear(16, 16), flat),
        (RowParallelLinear(16 * comm.size, 16, comm), nn.Linear(16, 16), flat),
        (tplayers.ReplicatedLinear(16, 16), nn.Linear(16, 16), flat),
        (tplayers.LayerNorm(16), nn.LayerNorm(16), flat),
        (tplayers.RMSNorm(16), nn.LayerNorm(16), flat),
        (tplayers.MLP(16, 16, comm), nn.Linear(16, 16), flat),
        (tplayers.SwiGLU(16, 16, comm), nn.Linear(16, 16), flat),
        (tplayers.FieldConv(4, 4, 3, grid, field, padding=1), nn.Conv2d(4, 4, 3, padding=1), block),
        (tplayers.FieldConvTranspose(4, 4, 2, grid, field, stride=2), nn.ConvTranspose2d(4, 4, 2), block),
        (tplayers.FieldAttention(4, 2, grid, field), OfPoints(4, 2, batch_first=True), block),
        (tplayers.FieldBatchNorm(4, grid, field), nn.BatchNorm2d(4), block),
        (tplayers.FieldGroupNorm(2, 4, grid, field), nn.GroupNorm(2, 4), block),
        (tplayers.FieldInstanceNorm(4, grid, field, affine=True), nn.InstanceNorm2d(4, affine=True), block),
        (
            tplayers.FieldUpsample(2, grid, field, mode="linear", align_corners=True),
            nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
            block,
        ),
    ]
    if dtype == torch.float64:  # torch's own need parameters in float64, too
        pairs = [(mine.double(), torchs.double(), shape) for mine, torchs, shape in pairs]
    for mine, torchs, shape in pairs:
        tplayers.initialize(mine, 1)
        x = torch.ones(shape, dtype=dtype).requires_grad_()
        with half():
            y = mine(x)
            assert y.dtype == torchs(x).dtype, type(mine)
        y.float().sum().backward()
        assert [p.grad.dtype for p in (x, *mine.parameters())] == [dtype, *(p.dtype for p in mine.parameters())]


def test_other_layers_of_fields_and_data_movement_compute_what_they_do_without_autocast(group):
    grid = CartesianGrid(group.comm, (group.size, 1))
    field = grid.decompose((4 * group.size, 4))
    x = torch.arange(2 * 2 * 4 * 4.0).view(2, 2, 4, 4).requires_grad_()
    for function in (
        tplayers.FieldAvgPool(2, grid, field),
        tplayers.FieldMaxPool(2, grid, field),
        tplayers.FieldUpsample(2, grid, field, mode="linear"),
        tplayers.SpectralConv(2, 2, 2, grid, field),
        lambda x: tplayers.halo_exchange(x, grid, 1, decomposition=field),
        lambda x: tplayers.all_reduce(x, group.comm),
        lambda x: tplayers.copy_to_tensor_parallel_region(x, group.comm),
    ):
        if isinstance(function, nn.Module):
            tplayers.initialize(function, 1)
        expected = function(x)
        with half():
            found = function(x)
        assert torch.equal(found, expected)
        ((gradient,), (wanted,)) = (torch.autograd.grad(y.square().sum(), x) for y in (found, expected))
        assert torch.equal(gradient, wanted)


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_generation(group, kind):
    """Texts of different lengths, with and without the cache of keys and values."""
    model = made(kind, group.comm, attention_dropout=0.0, hidden_dropout=0.0).eval()
    prompts = [[1, 2, 3], [4], [5, 6]]
    with half():
        found = tplayers.generate(model, prompts, 4)
    assert [len(text) for text in found] == [4] * 3
    assert all(0 <= token < VOCAB for text in found for token in text)
