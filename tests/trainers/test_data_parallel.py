"""DataParallel: its gradients are those of one rank with all samples; every rank hears of faults."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from commengine import CollectiveError, ProcessGrid, trace
from tests.support.small_models import VOCAB, S, made
from tests.support.training.failing import Fails
from tplayers import MLP, initialize, placements
from trainers.checks.replicas import checksum
from trainers.data_parallel import DataParallel

pytestmark = pytest.mark.mpi

EVERY_SIZE = pytest.mark.every_size
EACH = 3  # samples of a rank


class Net(nn.Module):
    """A small convolutional network, with parts that a caller may leave out."""

    def __init__(self, seed: int = 0, dtype=torch.float64) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.skipped = nn.Conv2d(4, 4, 1)
        self.head = nn.Linear(4, 3)
        self.register_buffer("constant", torch.linspace(0, 1, 7))
        self.to(dtype)

    def forward(self, x, *, skip=False, norm=False, again=False):
        x = self.conv(x).relu()
        x = self.norm(x) if norm else x
        if not skip:
            x = x + (checkpoint(self.skipped, x, use_reentrant=False) if again else self.skipped(x))
        return self.head(x.mean(dim=(2, 3)))


def samples(count, dtype=torch.float64):
    drawn = torch.Generator().manual_seed(5)
    return (
        torch.randn(count, 2, 5, 4, dtype=dtype, generator=drawn),
        torch.randn(count, 3, dtype=dtype, generator=drawn),
    )


def part(world, whole, each=EACH):
    return tuple(one[each * world.rank : each * (world.rank + 1)] for one in whole)


def used(net):
    """The parameters that get a gradient where the norm is left out."""
    for parameter in net.norm.parameters():
        parameter.requires_grad = False
    return net


def truth(whole, net=None, steps=1, make=None, **forward):
    """A net that was trained by torch alone on all samples; its gradients are those of the last step."""
    net = used(Net()) if net is None else net
    optimizer = None if make is None else make(net.parameters())
    for _ in range(steps):
        net.zero_grad()
        nn.functional.mse_loss(net(whole[0], **forward), whole[1]).backward()
        if optimizer is not None:
            optimizer.step()
    return net


def assert_same_gradients(net, expected, rtol=1e-12):
    for (name, p), q in zip(net.named_parameters(), expected.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=rtol, atol=rtol, msg=name)


def assert_equal_bits(world, tensors):
    mine = torch.tensor([checksum(tensor.contiguous()) for tensor in tensors])
    every = mine.new_empty(world.size, len(mine))
    world.all_gather(every, mine[None])
    assert all(row.equal(mine) for row in every)


@pytest.mark.parametrize(
    ("overlap", "bucket_size"), [(False, None), (False, 40), pytest.param(True, 40, marks=EVERY_SIZE), (True, 1)]
)
def test_training_equals_that_of_one_rank_with_all_samples(world, overlap, bucket_size):
    whole = samples(EACH * world.size)
    x, y = part(world, whole)

    def make(parameters):
        return torch.optim.AdamW(parameters, lr=1e-2)

    net = used(Net(seed=world.rank))  # the ranks begin differently, and rank 0 counts
    with DataParallel(net, world, overlap=overlap, bucket_size=bucket_size) as replicas:
        optimizer = make(net.parameters())
        for _ in range(4):
            optimizer.zero_grad()
            nn.functional.mse_loss(replicas(x), y).backward()
            optimizer.step()
    expected = truth(whole, steps=4, make=make)
    assert_same_gradients(net, expected, rtol=1e-9)
    for p, q in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
    assert_equal_bits(world, [*net.parameters(), *(p.grad for p in net.parameters() if p.grad is not None)])


@pytest.mark.parametrize("set_to_none", [True, False])
def test_every_way_to_clear_gradients_works_and_strides_are_the_parameters(world, set_to_none):
    whole = samples(EACH * world.size)
    x, y = part(world, whole)
    net = used(Net()).to(memory_format=torch.channels_last)
    with DataParallel(net, world) as replicas:
        for n in range(3):
            if n == 2:
                net.conv.weight.grad = None  # by hand
            net.zero_grad(set_to_none=set_to_none)
            nn.functional.mse_loss(replicas(x), y).backward()
        assert_same_gradients(net, truth(whole))
        assert net.conv.weight.grad.stride() == net.conv.weight.stride() != Net().conv.weight.stride()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_a_conversion_gives_other_memory_are_averaged(world, set_to_none):
    """``module.to`` converts the gradients that are there, too. Only the last rank does so."""
    whole = samples(2 * EACH * world.size)
    x, y = part(world, whole, 2 * EACH)
    net = used(Net())
    with DataParallel(net, world) as replicas:
        nn.functional.mse_loss(net(x), y).backward()
        if world.rank == world.size - 1:
            net.to(memory_format=torch.channels_last)
        net.zero_grad(set_to_none=set_to_none)
        with replicas.no_sync():
            (nn.functional.mse_loss(net(x[:EACH]), y[:EACH]) / 2).backward()
        (nn.functional.mse_loss(net(x[EACH:]), y[EACH:]) / 2).backward()
        assert_same_gradients(net, truth(whole))
        net.float()
        net.zero_grad()
        with pytest.raises(RuntimeError, match=r"converted from torch\.float64 on cpu to torch\.float32 on cpu"):
            nn.functional.mse_loss(net(x.float()), y.float()).backward()


@pytest.mark.every_size
@pytest.mark.parametrize("overlap", [False, True])
def test_ranks_with_other_numbers_of_samples_are_weighted(world, overlap):
    """Rank r has r samples: rank 0 none."""
    if world.size == 1:
        pytest.skip("one rank has all samples")
    first = world.rank * (world.rank - 1) // 2
    whole = samples(world.size * (world.size - 1) // 2)
    x, y = (one[first : first + world.rank] for one in whole)
    net = used(Net())
    with DataParallel(net, world, overlap=overlap) as replicas:
        weight = replicas.sample_weight(3 * len(x))  # 3 outputs each
        (nn.functional.mse_loss(net(x), y, reduction="sum") * weight).backward()
        assert_same_gradients(net, truth(whole))
        net.zero_grad()
        weight = replicas.sample_weight(3 * len(x))
        if len(x):
            (nn.functional.mse_loss(net(x), y, reduction="sum") * weight).backward()
        else:
            replicas.no_samples()
        assert_same_gradients(net, truth(whole))
        assert_equal_bits(world, [p.grad for p in net.parameters() if p.requires_grad])


def test_numbers_of_samples_that_make_no_mean_are_refused_on_all_ranks(world):
    with DataParallel(Net(), world) as replicas:
        for wrong in (0, -1, float("nan"), float("inf")):
            if wrong == 0 or world.rank == world.size - 1:
                with pytest.raises(ValueError, match="sample_weight"):
                    replicas.sample_weight(wrong)
            else:
                with pytest.raises(ValueError, match="sample_weight"):
                    replicas.sample_weight(4)
        assert replicas.sample_weight(4) == 1 / 4


@pytest.mark.parametrize("overlap", [False, True])
def test_accumulation_sends_nothing_before_the_last_backward(world, overlap):
    whole = samples(3 * EACH * world.size)
    mine = part(world, whole, 3 * EACH)
    net = used(Net())
    with DataParallel(net, world, overlap=overlap) as replicas, trace(replicas.grid.data) as log:
        for _ in range(2):
            net.zero_grad()
            weight = replicas.sample_weight(9 * EACH)
            log.events.clear()
            with replicas.no_sync():
                for n in range(2):
                    rows = slice(n * EACH, (n + 1) * EACH)
                    (nn.functional.mse_loss(net(mine[0][rows]), mine[1][rows], reduction="sum") * weight).backward()
            assert log.events == []
            (nn.functional.mse_loss(net(mine[0][2 * EACH :]), mine[1][2 * EACH :], reduction="sum") * weight).backward()
            reduced = [event for event in log.events if event.operation == "all_reduce" and event.dtype == "float64"]
            sent = sum(event.elements for event in reduced)
            assert sent == (0 if world.size == 1 else sum(p.numel() for p in net.parameters() if p.requires_grad))
        assert_same_gradients(net, truth(whole))


@pytest.mark.mpi(min_size=2)
def test_buckets_are_sent_while_the_backward_runs(world):
    """By order of events: the input layer's gradient comes after the head's bucket has been enqueued."""
    net = used(Net())
    x, y = samples(EACH)
    with DataParallel(net, world, overlap=True, bucket_size=1) as replicas:
        seen = []
        with trace(replicas.grid.data) as log:
            net.conv.weight.register_hook(lambda grad: seen.append(len(log.events)))
            nn.functional.mse_loss(net(x), y).backward()
        assert seen[0] >= 4  # the weights and biases of head and skipped
        assert len(log.events) >= seen[0] + 2


@pytest.mark.parametrize("overlap", [False, pytest.param(True, marks=EVERY_SIZE)])
def test_a_missing_gradient_is_an_error_on_every_rank_and_the_next_step_is_right(world, overlap):
    """Only the last rank leaves a layer out. The others would wait for its bucket."""
    whole = samples(EACH * world.size)
    x, y = part(world, whole)
    net = used(Net())
    with DataParallel(net, world, overlap=overlap, bucket_size=1):
        last = world.rank == world.size - 1
        with pytest.raises(RuntimeError, match=r"no gradient.*: skipped\.weight, skipped\.bias; allow_unused=True"):
            nn.functional.mse_loss(net(x, skip=last), y).backward()
        net.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        assert_same_gradients(net, truth(whole))


@pytest.mark.parametrize("overlap", [False, pytest.param(True, marks=EVERY_SIZE)])
def test_unused_parameters_may_be_allowed(world, overlap):
    """Every layer that a rank leaves out has gradient zero there; a layer that all leave out has none."""
    whole = samples(EACH * world.size)
    x, y = part(world, whole)
    net, expected = Net(), Net()
    with DataParallel(net, world, overlap=overlap, bucket_size=1, allow_unused=True) as replicas:
        for _ in range(2):
            net.zero_grad()
            expected.zero_grad()
            nn.functional.mse_loss(net(x, skip=world.rank == 0), y).backward()
            for rank in range(world.size):
                rows = slice(EACH * rank, EACH * (rank + 1))
                loss = nn.functional.mse_loss(expected(whole[0][rows], skip=rank == 0), whole[1][rows]) / world.size
                loss.backward()
            assert net.norm.weight.grad is None
            assert_same_gradients(net, expected)
        assert replicas.clip(0.0) > 0  # parameters without a gradient do not disturb it


def test_recomputed_layers_are_sent_once(world):
    whole = samples(EACH * world.size)
    x, y = part(world, whole)
    net = used(Net())
    with DataParallel(net, world, overlap=True, bucket_size=1):
        for _ in range(2):
            net.zero_grad()
            nn.functional.mse_loss(net(x, again=True), y).backward()
            assert_same_gradients(net, truth(whole))


def test_after_a_backward_that_failed_the_next_one_is_right(world):
    whole = samples(EACH * world.size)
    x, y = part(world, whole)
    net = used(Net())
    with DataParallel(net, world, overlap=True, bucket_size=1):
        handle = net.skipped.register_forward_hook(lambda module, args, out: Fails.apply(out))
        with pytest.raises(ArithmeticError):
            nn.functional.mse_loss(net(x), y).backward()
        handle.remove()
        for _ in range(2):
            net.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            assert_same_gradients(net, truth(whole))


def test_clipping_is_torchs_on_all_samples(world):
    whole = samples(EACH * world.size)
    x, y = part(world, whole)
    net, expected = used(Net()), truth(whole)
    norm = float(nn.utils.clip_grad_norm_(expected.parameters(), 0.05))
    with DataParallel(net, world) as replicas:
        nn.functional.mse_loss(net(x), y).backward()
        assert replicas.clip(0.05) == pytest.approx(norm, rel=1e-12) and norm > 0.05
    assert_same_gradients(net, expected, rtol=1e-5)  # torch adds 1e-6 to the norm, too


def test_buffers_become_those_of_the_first_replica(world):
    whole = samples(EACH * world.size)
    x, y = part(world, whole)
    net, alone = Net(), Net()
    with DataParallel(net, world, allow_unused=True) as replicas, trace(replicas.grid.data) as log:
        for _ in range(2):
            net.zero_grad()
            nn.functional.mse_loss(net(x, norm=True), y).backward()
        alone(whole[0][:EACH], norm=True)
        alone(whole[0][:EACH], norm=True)  # no optimizer step: the same values pass twice
        for (name, buffer), expected in zip(net.named_buffers(), alone.buffers(), strict=True):
            torch.testing.assert_close(buffer, expected, rtol=1e-12, atol=0, msg=name)
        assert_equal_bits(world, net.buffers())
        sent = [event.elements for event in log.events if event.operation == "broadcast"]
        assert sent == ([] if world.size == 1 else [15, 1] * 2)  # with the small constant; the count apart


def test_buffers_may_stay_apart(world):
    net = Net()
    x, y = part(world, samples(EACH * world.size))
    with DataParallel(net, world, allow_unused=True, equal_buffers=False):
        nn.functional.mse_loss(net(x, norm=True), y).backward()
    means = torch.empty(world.size, 4, dtype=torch.float64)
    world.all_gather(means, net.norm.running_mean[None])
    assert len({tuple(row.tolist()) for row in means}) == world.size


@pytest.mark.mpi(min_size=2)
def test_modules_that_differ_are_named_on_every_rank(world):
    last = world.rank == world.size - 1
    net = Net()
    with torch.no_grad():
        net.head.bias[1] += float(last)
    before = net.head.bias.detach().clone()
    with pytest.raises(CollectiveError, match=r"make_equal=False.*head\.bias"):
        DataParallel(net, world, make_equal=False)
    assert net.head.bias.equal(before)
    net = Net()
    if last:
        net.constant[2] = 5.0
    with pytest.raises(CollectiveError, match="constant"):
        DataParallel(net, world, make_equal=False)
    DataParallel(net, world).close()
    assert net.constant.equal(Net().constant)
    for change, said in (
        (lambda net: setattr(net, "head", nn.Linear(4, 2)), r"head\.weight .*\[2, 4\].*\[3, 4\]"),
        (lambda net: net.head.float(), r"head\.weight .*float32.*float64"),
        (lambda net: net.conv.weight.requires_grad_(False), r"conv\.weight .*frozen"),
        (lambda net: delattr(net, "norm"), r"norm\.weight is missing"),
        (lambda net: setattr(net, "more", nn.Linear(1, 1)), r"more\.weight .*missing"),
    ):
        net = Net()
        if last:
            change(net)
        with pytest.raises(CollectiveError, match=said):
            DataParallel(net, world)


def test_a_module_without_trained_parameters_and_sparse_gradients_are_refused(world):
    with pytest.raises(CollectiveError, match="no parameter"):
        DataParallel(Net().requires_grad_(False), world)
    with pytest.raises(CollectiveError, match=r"needs a commengine\.Communicator or ProcessGrid"):
        DataParallel(Net(), world.mpi)
    if world.size > 1:  # one rank sends nothing
        table = nn.Embedding(4, 3, sparse=True)
        with DataParallel(table, world), pytest.raises(RuntimeError, match="weight: its gradient is sparse"):
            table(torch.tensor([1])).sum().backward()


def test_two_groups_train_at_once_and_two_modules_on_one_group(world):
    """Sub-communicators; and a generator whose loss goes through another replicated module."""
    part_of = world.split(world.rank % 2, name="half")
    try:
        whole = samples(EACH * part_of.size)
        x, y = part(part_of, whole)
        first, second = used(Net(world.rank % 2)), nn.Linear(3, 3).double()
        nn.init.constant_(second.weight, 0.25 + world.rank % 2)
        nn.init.zeros_(second.bias)
        with DataParallel(first, part_of, overlap=True), DataParallel(second, part_of):
            nn.functional.mse_loss(second(first(x)), y).backward()
        both = nn.Sequential(used(Net(world.rank % 2)), copy.deepcopy(second))
        both.zero_grad()
        truth(whole, both)
        assert_same_gradients(nn.Sequential(first, second), both)
    finally:
        part_of.close()


@pytest.mark.every_size
def test_tensor_groups_hold_a_replica_together(world, alone):
    """Shards of a tplayers layer between layers of torch: the same gradients and norm at every layout."""

    class Mixed(nn.Module):
        def __init__(self, comm):
            super().__init__()
            torch.manual_seed(world.rank)  # equal after DataParallel
            self.enter = nn.Linear(4, 8).double()
            self.mlp = MLP(8, 16, comm, dtype=torch.float64)
            initialize(self, 3)

        def forward(self, x):
            return self.mlp(self.enter(x)).sum(-1)

    x = torch.randn(4 * world.size, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for tensor in (size for size in (1, 2, 4) if world.size % size == 0):
        with ProcessGrid(world, tensor) as grid:
            net = Mixed(grid.tensor)
            with DataParallel(net, grid) as replicas:
                reference = Mixed(alone)
                reference.enter.load_state_dict(net.enter.state_dict())
                reference(x[None]).square().mean().backward()
                net(x.chunk(grid.data.size)[grid.data.rank][None]).square().mean().backward()
                norm = replicas.clip(0.0)
        every = torch.cat([p.grad.flatten() for p in reference.parameters()])
        assert norm == pytest.approx(every.norm().item(), rel=1e-10)
        torch.testing.assert_close(net.enter.weight.grad, reference.enter.weight.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.every_size
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_llama_whose_ranks_share_heads_of_keys(world, alone, sequence_parallel):
    """At every layout the gradients of one rank with all samples, each of them and their norm."""
    tokens = torch.randint(VOCAB, (4 * world.size, S + 1), generator=torch.Generator().manual_seed(2))
    plain = {"dtype": torch.float64, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    whole = made("llama", alone, **plain)
    whole(tokens[:, :-1], tokens[:, 1:]).mean().backward()
    expected = {name: p.grad for name, p in whole.named_parameters()}
    norm = torch.cat([gradient.flatten() for gradient in expected.values()]).norm().item()
    for tensor in (size for size in (1, 2, 4) if world.size % size == 0):
        with ProcessGrid(world, tensor) as grid:
            net = made("llama", grid.tensor, sequence_parallel=sequence_parallel, **plain)
            with DataParallel(net, grid) as replicas:
                mine = tokens.chunk(grid.data.size)[grid.data.rank]
                net(mine[:, :-1], mine[:, 1:]).mean().backward()
                assert replicas.clip(0.0) == pytest.approx(norm, rel=1e-10)
            placed = placements(net)
            for name, p in net.named_parameters():
                torch.testing.assert_close(p.grad, placed[name].part(expected[name]), rtol=1e-10, atol=1e-13, msg=name)


def test_autocast_and_a_gradient_scaler_work_and_an_overflow_on_one_rank_skips_the_step_on_all(world):
    x, y = part(world, samples(EACH * world.size, torch.float32))
    net = used(Net(dtype=torch.float32))
    with DataParallel(net, world, overlap=True) as replicas:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(replicas(x).float(), y)
        loss.backward()
        optimizer.step()
        assert_equal_bits(world, net.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for overflows in (False, True):
            before = net.head.weight.detach().clone()
            optimizer.zero_grad()
            factor = float("inf") if overflows and world.rank == world.size - 1 else 1.0
            scaler.scale(nn.functional.mse_loss(replicas(x), y) * factor).backward()
            scaler.unscale_(optimizer)
            replicas.clip(10.0)
            scaler.step(optimizer)
            scaler.update()
            assert net.head.weight.equal(before) == overflows
        assert scaler.get_scale() == 2.0
        assert_equal_bits(world, net.parameters())


@pytest.mark.every_size
def test_autocast_around_a_model_that_a_tensor_group_holds(world, alone):
    """Its gradients are as near to float32 as those of one rank that has the whole batch."""
    tokens = torch.randint(VOCAB, (4 * world.size, S + 1), generator=torch.Generator().manual_seed(4))
    plain = {"hidden_dropout": 0.0, "attention_dropout": 0.0}

    def gradients(net, mine, enabled):
        net.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            loss = net(mine[:, :-1], mine[:, 1:]).mean()
        loss.backward()
        return {name: p.grad.clone() for name, p in net.named_parameters()}

    whole = made("gpt", alone, **plain)
    expected, rounded = (gradients(whole, tokens, enabled) for enabled in (False, True))

    for tensor in (size for size in (2, 4) if world.size % size == 0):
        with ProcessGrid(world, tensor) as grid:
            net = made("gpt", grid.tensor, **plain)
            with DataParallel(net, grid):
                found = gradients(net, tokens.chunk(grid.data.size)[grid.data.rank], True)
            errors = torch.zeros(2)
            for name, placement in placements(net).items():
                truth, half = (placement.part(each[name]) for each in (expected, rounded))
                errors += torch.stack([(found[name] - truth).square().sum(), (half - truth).square().sum()])
            assert errors[0].sqrt() <= 1.5 * errors[1].sqrt()


def test_modules_in_half_precision_get_gradients_in_half_precision(world):
    whole = samples(EACH * world.size, torch.float32)
    x, y = part(world, whole)
    net = used(Net(dtype=torch.bfloat16))
    with DataParallel(net, world):
        nn.functional.mse_loss(net(x.bfloat16()).float(), y).backward()
    expected = truth(whole, used(Net(dtype=torch.float32)))
    for p, q in zip(net.parameters(), expected.parameters(), strict=True):
        if q.grad is not None:
            assert p.grad.dtype == torch.bfloat16
            torch.testing.assert_close(p.grad.float(), q.grad, rtol=0.1, atol=0.02)
    assert_equal_bits(world, [p.grad for p in net.parameters() if p.grad is not None])


def test_close_takes_the_hooks_off(world):
    net = used(Net())
    replicas = DataParallel(net, world)
    replicas.close()
    x, y = part(world, samples(EACH * world.size))
    nn.functional.mse_loss(net(x), y).backward()  # sends nothing: the grid is closed
    assert net.head.weight.grad is not None
