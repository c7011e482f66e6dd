"""Buckets of gradients: when they are sent, in which order, what they sum to; the norm; clipping."""

import itertools
import math
import time
from fractions import Fraction

import pytest
import torch
from torch import nn

from commengine import Communicator, ProcessGrid, trace
from tests.support.exact import ALWAYS, NEVER
from tplayers import GPT, GPTConfig, Placement, Randomness, add_parameter, initialize, placements
from trainers.data.permutation import EpochPermutation
from trainers.data.samples import Samples
from trainers.data.stream import Source
from trainers.tasks.gpt import IGNORED, TokenBatches
from trainers.tasks.kinds import task_of
from trainers.training.clipping import clip, gradient_norm
from trainers.training.layout import Treatment
from trainers.training.reduction import GradientBuckets, GradientSegment

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]

WIDTH, SIZES = 6, [1, 42, 10_000]


class Branches(nn.Module):
    """Linear layers that the caller strings together in any order."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count)).double()

    def forward(self, x: torch.Tensor, order=None) -> torch.Tensor:
        for n in range(len(self.layers)) if order is None else order:
            x = torch.tanh(self.layers[n](x))
        return x.square().sum()


def inputs(count: int) -> torch.Tensor:
    return torch.randn(count, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def truth(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradient of the sum over all of ``x``, by autograd alone."""
    module = Branches()
    module(x.flatten(0, 1)).backward()
    return {name: p.grad for name, p in module.named_parameters()}


def buckets(module, world, overlap, size=42):  # a layer each
    return GradientBuckets(module, world, overlap=overlap, bucket_size=size)


def segments(module):
    placed = placements(module)
    return [GradientSegment(Treatment.of(placed[name]), p) for name, p in module.named_parameters()]


def step(module, gradients, microbatches, order=None):
    gradients.zero()
    for x in microbatches[:-1]:
        module(x, order).backward()
    with gradients.last_microbatch():
        module(microbatches[-1], order).backward()
    gradients.finish()


def assert_gradients(module, expected):
    for name, p in module.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_accumulated_and_reduced_equals_one_big_batch(world, overlap, size):
    module = Branches()
    gradients = buckets(module, world, overlap, size)
    x = inputs(3 * world.size)
    for scale in (1.0, 2.0):  # the second step starts from zero again
        mine = list(scale * x[3 * world.rank : 3 * world.rank + 3])
        step(module, gradients, mine)
        assert_gradients(module, truth(scale * x))
    gradients.remove()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_in_shared_memory_are_those_of_private_memory(mpi_world, dtype, shard, overlap):
    """Of buckets, of shares of buckets in place, and of rounded copies, in two steps: the same bits."""
    found = []
    for points in (NEVER, ALWAYS):
        with Communicator(mpi_world, switch_points=points, order="rank") as data:
            module = Branches().to(dtype)
            gradients = GradientBuckets(module, data, overlap=overlap, bucket_size=42, shard=shard)
            x = inputs(2 * data.size).to(dtype)
            sums = []
            for number in range(2):
                step(module, gradients, [x[data.rank + number]])
                sums += [bucket.reduced.clone() for bucket in gradients.buckets if bucket.gradients is not None]
            found.append(sums)
            assert data.size == 1 or sums
            gradients.remove()
            del module, gradients
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_buckets_are_of_the_size_asked_for_and_hold_every_gradient_once(world):
    if world.size == 1:
        pytest.skip("one rank keeps no buffers")
    module = Branches()  # 36 and 6 elements each
    for size, expected in ((1, [6, 36] * 4), (42, [42] * 4), (50, [48, 42, 42, 36]), (90, [90, 78]), (9999, [168])):
        gradients = buckets(module, world, False, size)
        gradients.zero()
        assert [bucket.gradients.numel() for bucket in gradients.buckets] == expected
        for p in module.parameters():
            p.grad.fill_(1.0)
        assert all(bool((bucket.gradients == 1).all()) for bucket in gradients.buckets)
        gradients.remove()


@pytest.mark.parametrize("overlap", [False, True])
def test_nothing_is_sent_before_the_last_microbatch(world, overlap):
    module = Branches()
    gradients = buckets(module, world, overlap)
    with trace(world) as log:
        gradients.zero()
        for x in inputs(3):
            module(x).backward()
        assert log.events == []
        with gradients.last_microbatch():
            module(inputs(1)[0]).backward()
        within = len(log.events)
        gradients.finish()
    expected = 0 if world.size == 1 else 4
    assert within == (expected if overlap else 0)
    assert [event.elements for event in log.events] == [42] * expected
    assert [event.operation for event in log.events] == ["all_reduce"] * expected
    assert all((event.stream is not None) is overlap for event in log.events)
    gradients.remove()


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_buckets_launch_by_index_however_gradients_arrive(world, order):
    """Autograd reaches the parameters in the reverse of their use. Each bucket has a shape of its own."""
    if world.size == 1:
        pytest.skip("one rank reduces nothing")
    torch.manual_seed(0)
    module = Branches()
    module.layers = nn.ModuleList(
        nn.Sequential(nn.Linear(WIDTH, n, dtype=torch.float64), nn.Linear(n, WIDTH, dtype=torch.float64))
        for n in (1, 2, 3, 4)
    )
    gradients = buckets(module, world, overlap=True, size=1)
    mine = order if world.rank % 2 == 0 else order[::-1]  # the ranks need not arrive in the same order
    with trace(world) as log:
        step(module, gradients, [inputs(1)[0]], mine)
    expected = [p.numel() for p in reversed(list(module.parameters()))]
    assert [event.elements for event in log.events] == expected
    gradients.remove()


def test_reduced_gradients_are_right_when_ranks_arrive_in_different_orders(world):
    orders = list(itertools.permutations(range(4)))
    expected: dict[str, torch.Tensor] = {}
    for rank in range(world.size):
        module = Branches()
        module(inputs(1)[0], orders[5 * rank]).backward()
        for name, p in module.named_parameters():
            expected[name] = expected.get(name, 0) + p.grad
    module = Branches()
    gradients = buckets(module, world, overlap=True)
    step(module, gradients, [inputs(1)[0]], orders[5 * world.rank])
    assert_gradients(module, expected)
    gradients.remove()


@pytest.mark.mpi(min_size=2)
def test_buckets_are_reduced_before_backward_has_ended(world):
    """The first layer's gradient, the last that backward computes, comes when all other buckets are done."""
    module = Branches()
    gradients = buckets(module, world, overlap=True)

    def wait_for_the_others(_):
        deadline = time.monotonic() + 30
        while not all(work.done() for work, _ in gradients._in_flight.values()):
            assert time.monotonic() < deadline, "not reduced while backward runs"

    module.layers[0].weight.register_hook(wait_for_the_others)
    x = inputs(world.size)
    gradients.zero()
    with trace(world) as log, gradients.last_microbatch():
        module(x[world.rank]).backward()
        ended = time.perf_counter()
    finished = [event.end for event in log.events if event.operation == "all_reduce" and 0 < event.end < ended]
    assert len(finished) >= len(gradients.buckets) - 1 >= 3
    assert all(event.wait_start is None for event in log.events)  # nobody has waited
    gradients.finish()
    assert_gradients(module, truth(x))
    gradients.remove()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("unused", [0, 2, 3])
def test_a_missing_gradient_is_named_and_does_not_hang(world, overlap, size, unused):
    module = Branches()
    gradients = buckets(module, world, overlap, size)
    order = [n for n in range(4) if n != unused]
    with pytest.raises(RuntimeError, match="no gradient") as caught:
        step(module, gradients, [inputs(1)[0]], order)
    message = str(caught.value)
    assert [n for n in range(4) if f"layers.{n}." in message] == [unused]
    assert f"layers.{unused}.weight" in message and f"layers.{unused}.bias" in message
    gradients.remove()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_gradient_of_an_earlier_microbatch_does_not_count_for_the_last(world, overlap):
    module = Branches()
    gradients = buckets(module, world, overlap)
    gradients.zero()
    module(inputs(1)[0]).backward()
    with gradients.last_microbatch():
        module(inputs(1)[0], [0, 1, 3]).backward()
    with pytest.raises(RuntimeError, match=r"layers\.2\."):
        gradients.finish()
    gradients.remove()


def test_zero_takes_gradients_back_that_were_set_to_none(world):
    module = Branches()
    gradients = buckets(module, world, overlap=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    x = inputs(world.size)
    for _ in range(2):
        step(module, gradients, [x[world.rank]])
        assert_gradients(module, truth(x))
        optimizer.zero_grad(set_to_none=True)
        assert module.layers[0].weight.grad is None
    next(module.parameters()).grad = torch.full((WIDTH, WIDTH), 1e9, dtype=torch.float64)  # another tensor
    step(module, gradients, [x[world.rank]])
    assert_gradients(module, truth(x))
    gradients.remove()


def test_removed_hooks_do_nothing(world):
    module = Branches()
    gradients = buckets(module, world, overlap=True)
    gradients.remove()
    with trace(world) as log, gradients.last_microbatch():
        module(inputs(1)[0]).backward()
    assert log.events == []


def test_clip_scales_all_gradients_by_the_same_factor(world):
    module = Branches()
    gradients = buckets(module, world, overlap=False)
    step(module, gradients, [inputs(1)[0]])
    before = {name: p.grad.clone() for name, p in module.named_parameters()}
    norm = torch.cat([grad.flatten() for grad in before.values()]).norm().item()
    for largest in (0.0, norm * 2):  # off; not reached
        clip(gradients.segments, norm, largest)
        assert_gradients(module, before)
    clip(gradients.segments, norm, norm / 4)
    for name, p in module.named_parameters():
        torch.testing.assert_close(p.grad, before[name] / 4, rtol=1e-5, atol=0)
    after = torch.cat([p.grad.flatten() for p in module.parameters()]).norm().item()
    assert after == pytest.approx(norm / 4, rel=1e-5) and after <= norm / 4
    gradients.remove()


# The whole model ------------------------------------------------------------------------------------------------

CONFIG = GPTConfig(
    2, 16, 4, 50, 8, hidden_dropout=0.0, attention_dropout=0.0, init_method_std=0.3, make_vocab_size_divisible_by=64
)


def gpt(comm):
    model = GPT(CONFIG, comm, dtype=torch.float64)
    initialize(model, 5)
    return model


def batch(count=4, seed=0):
    tokens = torch.randint(50, (count, 9), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:].clone()


def test_norm_is_that_of_the_assembled_gradient_at_every_split(world, alone):
    """Split parameters are summed over the group; replicated ones and the tied embedding count once."""
    tokens, labels = batch()
    whole = gpt(alone)
    whole(tokens, labels).mean().backward()
    every = torch.cat([p.grad.flatten() for p in whole.parameters()])
    expected = every.norm().item()
    assert gradient_norm(segments(whole), alone) == pytest.approx(expected, rel=1e-12)

    model = gpt(world)
    model(tokens, labels).mean().backward()
    assert gradient_norm(segments(model), world) == pytest.approx(expected, rel=1e-10)
    # It is no accident: leaving the sum out, or counting replicated ones on every rank, would show.
    kinds = dict.fromkeys((False, True), 0.0)
    for name, placement in placements(model).items():
        kinds[placement.sharded] += model.get_parameter(name).grad.square().sum().item()
    assert min(kinds.values()) > 1e-4 * expected**2


def test_norm_does_not_overflow_or_vanish(world):
    model = gpt(world)
    for scale in (1e-30, 1e30):
        for p in model.parameters():
            p.grad = torch.full_like(p, scale)
        count = sum(math.prod(placement.shape) for placement in placements(model).values())
        assert gradient_norm(segments(model), world) == pytest.approx(scale * count**0.5, rel=1e-9)
    for p in model.parameters():
        p.grad.zero_()
    assert gradient_norm(segments(model), world) == 0.0
    for p in (model.embedding.weight, model.final_norm.bias):  # one that is split, one that is not
        for value in (float("nan"), float("inf")):
            if world.rank == world.size - 1:
                p.grad.view(-1)[0] = value
            assert not math.isfinite(gradient_norm(segments(model), world))  # on every rank
        p.grad.zero_()
        assert gradient_norm(segments(model), world) == 0.0


@pytest.mark.parametrize("ignored", ["rank 0", "half of the others", "most"])
def test_a_rank_that_counts_no_token_leaves_the_mean_a_mean_over_tokens(world, alone, ignored):
    """What a step does: losses divided by the tokens of the global batch, not a mean of the ranks' means."""
    tokens, labels = batch(2 * world.size)
    if ignored == "rank 0" and world.size > 1:
        labels[:2] = IGNORED
    elif ignored == "half of the others":
        labels[2:, ::2] = IGNORED
    elif ignored == "most":
        labels[:, :] = IGNORED
        labels[-1, 3] = 7
    whole = gpt(alone)
    logits = whole(tokens)[..., :50].flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED)
    loss.backward()

    with ProcessGrid(world, tensor=1) as grid:
        model = gpt(grid.tensor)
        gradients = buckets(model, grid.data, overlap=True, size=500)
        mine = slice(2 * world.rank, 2 * world.rank + 2)
        counted = torch.tensor([int((labels[mine] != IGNORED).sum())])
        world.all_reduce(counted)
        gradients.zero()
        with gradients.last_microbatch():
            share = model(tokens[mine], labels[mine]).sum() / counted.item()
            share.backward()
        gradients.finish()
        total = share.detach().reshape(1)
        world.all_reduce(total)
        torch.testing.assert_close(total[0], loss.detach(), rtol=1e-10, atol=0)
        for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12, msg=name)
        gradients.remove()


class Holed(Samples):
    """Samples of which the trainer's own batches ignore some labels."""

    def __len__(self):
        return 64

    def __getitem__(self, n):
        return torch.randint(50, (9,), generator=torch.Generator().manual_seed(n)).numpy()


class HoledBatches(TokenBatches):
    """Global batches in which only the last sample has labels, and only some of them."""

    def _microbatch(self, numbers):
        found = super()._microbatch(numbers)
        for row, number in enumerate(numbers):
            found.labels[row, :: 2 if number % self.size == self.size - 1 else 1] = IGNORED
        return found


def test_the_trainers_step_divides_by_the_global_count(world):
    """Trainer.step with ranks that count nothing: the loss is that of the one sample that counts."""
    from trainers.data.corpus import Corpus
    from trainers.settings.commands import GPTSettings

    config = GPTSettings(
        num_layers=1, hidden_size=16, num_attention_heads=4, seq_length=8, vocab_size=50, hidden_dropout=0.0,
        attention_dropout=0.0, make_vocab_size_divisible_by=64, global_batch_size=4, mock_data=True,
    )  # fmt: skip
    corpus = Corpus((Source("holed", "holed", Fraction(1), Holed()),))
    trainer = task_of(config).new_trainer(world, corpus)
    words = {"vocab_size": 50, "unusable": ""}
    trainer.batches = HoledBatches(corpus.stream(config.seed), size=4, micro=1, data=trainer.grid.data, **words)
    last = torch.from_numpy(Holed()[EpochPermutation(64, config.seed)[3]])[None]
    with torch.no_grad():
        losses = trainer.model(last[:, :-1], last[:, 1:].contiguous(), Randomness(0, 0, (0,)))
    assert trainer.step().loss == pytest.approx(losses[0, 1::2].mean().item(), rel=1e-6)
    trainer.close()


# Partial gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("tensor", [1, 2])
def test_partial_gradients_are_summed_over_the_tensor_group_too(world, tensor, dtype, overlap, shard):
    """In one all-reduce, after that over the data group; the others are left alone. Small integers are exact."""
    if world.size % tensor:
        pytest.skip(f"{world.size} ranks do not form groups of {tensor}")
    with ProcessGrid(world, tensor=tensor) as grid:
        module = Branches().to(dtype)
        for n, (name, p) in enumerate(list(module.named_parameters())):
            owner, _, own = name.rpartition(".")
            add_parameter(module.get_submodule(owner), own, Placement(tuple(p.shape), partial=n % 3 == 0), dtype)
        initialize(module, 1)
        placed = placements(module)
        partial = {p: placed[name].partial for name, p in module.named_parameters()}
        options = {"overlap": overlap, "bucket_size": 90, "shard": shard}
        with pytest.raises(ValueError, match="needs tensor="):
            GradientBuckets(module, grid.data, **options)
        gradients = GradientBuckets(module, grid.data, tensor=grid.tensor, **options)
        found = [s for s in gradients.segments if s.treatment.partial]  # of a shard perhaps none
        gradients.zero()
        with gradients.last_microbatch(), trace(grid.tensor) as log:
            sum((p * (world.rank + 1) * n).sum() for n, p in enumerate(partial, 1)).backward()
            gradients.finish()
        assert [event.operation for event in log.events if tensor > 1] == ["all_reduce"] * (
            tensor > 1 and len(found) > 0
        )
        ranks = range(world.size)
        of_data = sum(rank + 1 for rank in ranks if rank % tensor == grid.tensor.rank)
        expected = {
            p: n * (sum(rank + 1 for rank in ranks) if partial[p] else of_data) for n, p in enumerate(partial, 1)
        }
        for bucket in gradients.buckets:
            layout = bucket.layout
            if not layout.flat:
                assert all(bool((p.grad == expected[p]).all()) for p in layout.names)
                continue
            whole = torch.zeros(layout.size, dtype=bucket.gradients.dtype)
            for p in layout.names:
                layout.view(whole, p).fill_(expected[p])
            assert torch.equal(bucket.reduced, whole[layout.mine])
        norm = sum(p.numel() * expected[p] ** 2 for p in partial if partial[p])
        shares = [grid.data] if shard else []
        assert gradient_norm(found, grid.tensor, shares) == pytest.approx(norm**0.5, rel=1e-6)
        gradients.remove()
