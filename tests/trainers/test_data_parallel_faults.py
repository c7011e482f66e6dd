"""DataParallel after failed backwards, with nested backwards, and with modules that change after its construction."""

import random
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from commengine import CollectiveError
from tests.support.training.failing import Fails
from trainers.data_parallel import DataParallel
from trainers.training.sharded_optimizer import ShardedOptimizer

pytestmark = [pytest.mark.mpi(min_size=2)]


def pair():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()


def drawn(world, rows=2):
    """The samples of all ranks, and this rank's."""
    x = torch.randn(world.size * rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    return x, x[world.rank * rows : (world.rank + 1) * rows]


def assert_gradients(net, expected):
    for (name, p), q in zip(net.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("then", ["no_sync", "no_samples"])
def test_a_failed_backward_leaves_nothing_to_a_step_without_a_backward(world, then):
    """Its buckets were sent early. They must be neither taken for the next ones, nor sent from within no_sync."""
    whole, x = drawn(world)
    net, expected = pair(), pair()
    with DataParallel(net, world, overlap=True, bucket_size=1) as replicas:
        with pytest.raises(ArithmeticError):
            net[1](Fails.apply(net[0](x))).sum().backward()
        net.zero_grad()
        if then == "no_sync":
            with replicas.no_sync():
                net(x).square().mean().backward()
                assert replicas.gradients._in_flight == {}
            net(x).square().mean().backward()
            (2 * expected(whole).square().mean()).backward()
        elif world.rank == 0:
            replicas.no_samples()
            ((1 - 1 / world.size) * expected(whole[2:]).square().mean()).backward()
        else:
            net(x).square().mean().backward()
            ((1 - 1 / world.size) * expected(whole[2:]).square().mean()).backward()
        assert_gradients(net, expected)


def test_a_backward_inside_another_one_is_an_error_and_the_next_one_is_right(world):
    whole, x = drawn(world)
    net, expected = pair(), pair()

    def loss(net, x, reentrant):
        a, b = net
        return checkpoint(lambda t: b(a(t)), a(x), use_reentrant=reentrant).square().mean()

    loss(expected, whole, False).backward()
    with DataParallel(net, world, overlap=True, bucket_size=1):
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            loss(net, x, True).backward()
        for _ in range(2):
            net.zero_grad()
            loss(net, x, False).backward()
            assert_gradients(net, expected)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda net: net[0].requires_grad_(True), r"no longer frozen: 0\.weight, 0\.bias"),
        (lambda net: net.append(nn.Linear(3, 3).double()), r"new or no longer frozen: 2\.weight, 2\.bias"),
        (lambda net: net.insert(1, nn.Linear(3, 3, bias=False).double()), r"new .*: 1\.weight"),
    ],
)
def test_parameters_that_come_later_are_an_error_on_every_rank(world, change, said):
    """They change on the last rank only. Their gradients would not be averaged, and replicas would part."""
    x = drawn(world)[1]
    net = pair()
    net[0].requires_grad_(False)
    last = world.rank == world.size - 1
    with DataParallel(net, world):
        net(x).sum().backward()
        if last:
            change(net)
        with pytest.raises(RuntimeError, match=said if last else "they have changed on another rank"):
            net(x).sum().backward()


class Buffered(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.layer = nn.Linear(3, 3).double()
        self.register_buffer("cache", first)
        self.next = None

    def forward(self, x):
        if self.next is not None:
            self.cache = self.next()
        return self.layer(x)


def test_expanded_buffers_are_made_equal(world):
    x = drawn(world)[1]
    net = Buffered(torch.full((1,), float(world.rank)).expand(5))
    with DataParallel(net, world):
        assert net.cache.tolist() == [0.0] * 5
        net.next = lambda: torch.full((1,), 3.0 + world.rank).expand(5)
        net(x).sum().backward()
        assert net.cache.tolist() == [3.0] * 5


def test_buffers_that_all_ranks_replace_alike_are_made_equal_and_may_be_none(world):
    x = drawn(world)[1]
    net = Buffered(torch.zeros(3))
    with DataParallel(net, world):
        for new in (lambda: torch.full((7,), float(world.rank)), lambda: None, lambda: torch.ones(2) * world.rank):
            net.next = new
            net(x).sum().backward()
            assert net.cache is None or not net.cache.any()


@pytest.mark.parametrize("other", [None, torch.zeros(5), torch.zeros(3, dtype=torch.float64)])
def test_buffers_that_one_rank_replaces_by_another_shape_are_an_error_on_every_rank(world, other):
    x = drawn(world)[1]
    net = Buffered(torch.zeros(3))
    net.next = lambda: other if world.rank == world.size - 1 else torch.ones(3)
    with DataParallel(net, world):
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"other shapes on other ranks: cache.*equal_buffers=False"):
                net(x).sum().backward()
        assert net.layer.weight.grad is not None


# An optimizer in the backward ---------------------------------------------------------------------------------------


def stepping(net):
    """Hooks that update a parameter as soon as it has its gradient, as PyTorch's tutorial has them."""
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in net.parameters() if p.requires_grad}

    def update(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in optimizers:
        p.register_post_accumulate_grad_hook(update)


@pytest.mark.parametrize("frozen", [0, 3], ids=["four", "one"])
@pytest.mark.parametrize("where", ["before", "after", "no_sync"])
@pytest.mark.parametrize("ranks", ["all", "the last"])
def test_an_optimizer_in_a_hook_is_an_error_on_every_rank(world, where, ranks, frozen):
    """Whether the hooks were there first, and with one trained parameter, too, the first of which nothing is known."""
    x = drawn(world)[1]
    net = pair()
    for p in [*net.parameters()][:frozen]:
        p.requires_grad_(False)
    here = ranks == "all" or world.rank == world.size - 1
    if where == "before" and here:
        stepping(net)
    with DataParallel(net, world, allow_unused=True) as replicas:
        if where != "before":
            net(x).sum().backward()
            if here:
                stepping(net)
        if where == "no_sync":
            with replicas.no_sync():
                net(x).sum().backward()
            for p in net.parameters():
                p._post_accumulate_grad_hooks.popitem() if here and p.requires_grad else None
        with pytest.raises(RuntimeError, match=rf"changed during the backward: {'.*1.bias' if here else 'on another'}"):
            net(x).sum().backward()


def test_hooks_that_change_no_parameter_and_steps_between_backwards_are_no_error(world):
    whole, x = drawn(world)
    net, expected = pair(), pair()
    seen = []
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm()))
    one, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (net, expected))
    with DataParallel(net, world) as replicas:
        for _ in range(3):
            with replicas.no_sync():
                net(x).square().mean().backward()
            with torch.no_grad():
                net[0].bias.mul_(0.5)
                expected[0].bias.mul_(0.5)
            net.zero_grad()
            net(x).square().mean().backward()
            expected(whole).square().mean().backward()
            assert_gradients(net, expected)
            one.step()
            other.step()
            other.zero_grad()
            net.zero_grad()
    assert len(seen) == 24


# Memory orders ------------------------------------------------------------------------------------------------------


class Pictures(nn.Module):
    """Parameters of 1, 2, 3, 4 and 5 dimensions."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.body = nn.Sequential(nn.Conv3d(2, 3, (2, 1, 3)), nn.Flatten(2), nn.Conv1d(3, 4, 2), nn.GELU())
        self.flat = nn.Conv2d(4, 2, (1, 3))
        self.head = nn.Linear(2, 3)
        self.double()

    def forward(self, x):
        return self.head(self.flat(self.body(x).unsqueeze(2)).mean(dim=(2, 3)))


def turned(one, order):
    """The values of ``one``, whose dimensions lie in memory in ``order``."""
    return one.permute(order).contiguous().permute([order.index(n) for n in range(one.dim())])


def drawn_orders(rng, net):
    """Matrices turned, channels_last, and orders that nothing has a name for, but none that torch itself refuses."""
    while True:
        for p in net.parameters():
            order = list(range(p.dim()))
            rng.shuffle(order)
            p.data = turned(p.data, order)
        try:
            torch.autograd.grad(net(torch.ones(1, 2, 3, 2, 6, dtype=torch.float64)).sum(), list(net.parameters()))
            return
        except RuntimeError as error:  # of its slow_conv2d, for one order in 50
            if "must be contiguous" not in str(error):
                raise


KINDS = {
    "AdamW": partial(torch.optim.AdamW, fused=True),
    "SGD": partial(torch.optim.SGD, momentum=0.9, fused=True),
    "Adam": partial(torch.optim.Adam, foreach=True),
}


@pytest.mark.parametrize("bucket_size", [1, 10**6])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sharded", [False, True])
def test_parameters_may_lie_in_another_order_on_each_rank(world, kind, sharded, bucket_size):
    """And may be laid out anew between two steps, on one rank. The truth has contiguous parameters and all samples."""
    drawn = torch.Generator().manual_seed(3)
    whole = torch.randn(2 * world.size, 2, 3, 2, 6, dtype=torch.float64, generator=drawn)
    x, rng = whole[2 * world.rank : 2 * world.rank + 2], random.Random(f"{kind} {bucket_size} {world.rank}")
    net, expected = Pictures(), Pictures()
    drawn_orders(rng, net)
    make = KINDS[kind]
    truth = make(expected.parameters(), lr=0.05)
    with DataParallel(net, world, bucket_size=bucket_size) as replicas:
        options = {"lr": 0.05, **make.keywords}
        optimizer = replicas.sharded(make.func, **options) if sharded else make.func(net.parameters(), **options)
        for step in range(4):
            if step == 2 and world.rank == 0 and (sharded or kind == "Adam"):  # torch's fused ones do not follow
                drawn_orders(rng, net)
            for one in (net, expected):
                one.zero_grad(set_to_none=step != 1)
            with replicas.no_sync():
                net(x[:1]).square().sum().backward()
            net(x[1:]).square().sum().backward()
            (expected(whole).square().sum() / world.size).backward()
            for (name, p), q in zip(net.named_parameters(), expected.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-10, msg=name)
            optimizer.step()
            truth.step()
            for (name, p), q in zip(net.named_parameters(), expected.parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9, msg=f"{name} after step {step}")


class Named(nn.Parameter):
    pass


class Marked(torch.Tensor):
    pass


class Wrapped(torch.Tensor):
    """It keeps its numbers in another tensor, as quantized and distributed tensors do."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        inner = [one.inner if isinstance(one, Wrapped) else one for one in args]
        found = func(*inner, **(kwargs or {}))
        return cls(found) if func is torch.ops.aten.detach.default else found


def small():
    torch.manual_seed(1)
    return nn.Linear(3, 2, bias=False).double()


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("make", [Named, lambda one: nn.Parameter(one.as_subclass(Marked))])
def test_parameters_of_another_class_that_holds_its_numbers(world, make, everywhere, sharded):
    whole, x = drawn(world)
    net, expected = small(), small()
    if everywhere or world.rank == 0:
        net.weight = make(net.weight.detach().t().contiguous().t())
    truth = torch.optim.AdamW(expected.parameters(), lr=0.1)
    with DataParallel(net, world) as replicas:
        kind = torch.optim.AdamW
        optimizer = replicas.sharded(kind, lr=0.1) if sharded else kind(net.parameters(), lr=0.1)
        for _ in range(2):
            net(x).square().mean().backward()
            expected(whole).square().mean().backward()
            assert_gradients(net, expected)
            for one in (optimizer, truth):
                one.step()
                one.zero_grad()
        assert torch.allclose(net.weight, expected.weight, rtol=1e-10)


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda one: one[:1].detach().expand(2, 3), r"has elements that share memory"),
        (lambda one: torch.arange(4.0).double().as_strided((2, 3), (1, 1)), r"has elements that share memory"),
        (lambda one: one.detach().to_sparse(), r"is sparse"),
        (lambda one: Wrapped(one.detach()), r"is a Wrapped, which implements"),
    ],
)
def test_parameters_that_cannot_be_shared_are_refused_on_every_rank(world, make, said, grad, everywhere):
    net = small().requires_grad_(grad)
    if everywhere or world.rank == world.size - 1:
        net.weight = nn.Parameter(make(net.weight), requires_grad=grad)
    net.register_parameter("other", nn.Parameter(torch.zeros(2)))
    with pytest.raises(CollectiveError, match="weight " + said):
        DataParallel(net, world)
    if grad:
        with pytest.raises(CollectiveError, match="0 " + said):
            ShardedOptimizer([net.weight], torch.optim.SGD, world, lr=0.1)
