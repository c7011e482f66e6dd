"""The losses of vocabulary-parallel logits against torch's on the whole ones, and where these would overflow."""

import pytest
import torch
import torch.nn.functional as F

import commengine
import tplayers

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]

IGNORED = -100
WIDTH = 3  # columns of each rank


def reference(logits, target):
    flat = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), target.reshape(-1), reduction="none", ignore_index=IGNORED
    )
    return flat.view(target.shape)


class Case:
    """Whole logits with padding columns, and what torch says about the real ones."""

    def __init__(self, group, logits, target, padding=0, fill=0.0, weight=None):
        self.group = group
        leaf = logits.to(torch.float64, copy=True).requires_grad_()
        self.losses = reference(leaf, target)
        self.weight = torch.linspace(0.5, 1.5, target.numel()).double().view(target.shape)
        self.grad = F.pad(torch.autograd.grad(self.losses, leaf, self.weight)[0], (0, padding))
        self.losses = self.losses.detach()
        padded = F.pad(logits, (0, padding), value=fill)
        self.shard = group.mine(padded).requires_grad_()
        before = self.shard.detach().clone()
        vocab_size = logits.shape[-1] if padding else None
        self.found = tplayers.vocab_parallel_cross_entropy(self.shard, target, group.comm, vocab_size=vocab_size)
        self.found.backward(self.weight.to(self.found.dtype))
        assert torch.equal(torch.nan_to_num(before), torch.nan_to_num(self.shard.detach())), "logits overwritten"
        group.same(self.found)

    def check(self, rtol=1e-9, atol=1e-12, grad_rtol=None, grad_atol=None):
        torch.testing.assert_close(self.found.detach().double(), self.losses, rtol=rtol, atol=atol)
        grad_rtol, grad_atol = grad_rtol or rtol, grad_atol or atol
        mine = self.group.mine(self.grad)
        assert self.shard.grad.dtype == self.shard.dtype
        torch.testing.assert_close(self.shard.grad.double(), mine, rtol=grad_rtol, atol=grad_atol)


def targets(*shape, vocab, seed=5):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (2, 1, 3), (0,), (4, 0)])
def test_against_torch(group, random, shape):
    vocab = WIDTH * group.size
    case = Case(group, 3 * random(*shape, vocab), targets(*shape, vocab=vocab))
    assert case.found.shape == shape
    assert case.found.dtype == torch.float64
    case.check()


def test_every_target(group, random):
    vocab = WIDTH * group.size
    Case(group, random(vocab, vocab), torch.arange(vocab)).check()


def test_numerically(group, random):
    target = torch.tensor([0, IGNORED, WIDTH * group.size - 2, 1])

    def function(logits):
        shard = tplayers.scatter_to_tensor_parallel_region(logits, group.comm)
        return tplayers.vocab_parallel_cross_entropy(shard, target, group.comm, vocab_size=WIDTH * group.size - 1)

    assert torch.autograd.gradcheck(function, random(4, WIDTH * group.size).requires_grad_(), fast_mode=True)


@pytest.mark.parametrize("scale", [1e4, -1e4, 1e30])
def test_huge_logits_in_float32_do_not_overflow(group, random, scale):
    vocab = WIDTH * group.size
    logits = (random(6, vocab) * scale).float()
    logits[0] = scale  # all equal
    case = Case(group, logits, targets(6, vocab=vocab))
    assert case.found.isfinite().all()
    assert case.shard.grad.isfinite().all()
    case.check(rtol=1e-5, atol=1e-5)


def test_large_common_offset(group, random):
    """The maximum is subtracted before anything is rounded away: 1e4 more changes nothing beyond the input's ulp."""
    vocab = WIDTH * group.size
    Case(group, (random(6, vocab) + 1e4).float(), targets(6, vocab=vocab)).check(rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype, ulp", [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_halves_are_computed_in_float32(group, random, dtype, ulp):
    vocab = WIDTH * group.size
    case = Case(group, (3 * random(4, 5, vocab)).to(dtype), targets(4, 5, vocab=vocab))
    assert case.found.dtype == torch.float32
    case.check(rtol=1e-5, atol=1e-5, grad_rtol=1.01 * ulp, grad_atol=1e-6)


def test_ignored_labels(group, random):
    vocab = WIDTH * group.size
    target = targets(4, 5, vocab=vocab)
    target[0], target[2, 3] = IGNORED, IGNORED
    case = Case(group, random(4, 5, vocab), target)
    case.check()
    assert (case.found[0] == 0).all()
    assert (case.shard.grad[0] == 0).all()


def test_all_labels_ignored(group, random):
    case = Case(group, random(4, WIDTH * group.size), torch.full((4,), IGNORED))
    assert torch.equal(case.found.detach(), torch.zeros(4).double())
    assert torch.equal(case.shard.grad, torch.zeros_like(case.shard))


@pytest.mark.parametrize("fill", [0.0, 1e30, -1e30, torch.inf, -torch.inf, torch.nan])
def test_padding_neither_wins_nor_enters_the_sum(group, random, fill):
    vocab = WIDTH * group.size - 1
    Case(group, random(4, vocab).float(), targets(4, vocab=vocab), 1, fill).check(rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fill", [0.0, 1e30, torch.nan])
def test_ranks_with_nothing_but_padding(group, random, fill):
    vocab, padding = 2, WIDTH * group.size - 2
    case = Case(group, random(4, vocab) - 1e3, targets(4, vocab=vocab), padding, fill)
    case.check()
    if group.rank:
        assert torch.equal(case.shard.grad, torch.zeros_like(case.shard))


def test_layouts_that_are_not_contiguous(group, random, close):
    """What GPT.forward returns is a transposed view, and so are its labels."""
    vocab = WIDTH * group.size
    whole, target = random(4, 5, vocab), targets(4, 5, vocab=vocab)
    target[1, 2] = IGNORED
    leaf = whole.clone().requires_grad_()
    losses = reference(leaf, target)
    losses.sum().backward()
    shard = group.mine(whole).transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    found = tplayers.vocab_parallel_cross_entropy(shard, target.t().contiguous().t(), group.comm)
    found.sum().backward()
    close(found, losses)
    close(shard.grad, group.mine(leaf.grad))

    shard = group.mine(whole).movedim(-1, 0).contiguous().movedim(0, -1)
    close(tplayers.vocab_parallel_cross_entropy(shard, target, group.comm), losses.detach())


def test_backward_twice(group, random):
    target = targets(4, vocab=WIDTH * group.size)
    shard = group.mine(random(4, WIDTH * group.size)).requires_grad_()
    loss = tplayers.vocab_parallel_cross_entropy(shard, target, group.comm).sum()
    (first,) = torch.autograd.grad(loss, shard, retain_graph=True)
    first = first.clone()
    (second,) = torch.autograd.grad(loss, shard, retain_graph=True)
    assert torch.equal(first, second)


@pytest.mark.parametrize("overwrite", [False, True])
def test_products_with_the_hessian_are_torchs(group, overwrite):
    """Also of a square of the losses, of which the gradient depends on the losses; with padding and ignored targets."""
    width, columns = 5, 5 * group.size
    whole = torch.randn(4, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    way = torch.randn(4, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    target = torch.tensor([0, columns - 3, -100, 1])
    expected = F.cross_entropy(whole[:, : columns - 2], target, reduction="none").square().sum()
    (gradient,) = torch.autograd.grad(expected, whole, create_graph=True)
    (product,) = torch.autograd.grad((gradient * way).sum(), whole)
    mine = slice(group.rank * width, (group.rank + 1) * width)
    shard = whole.detach()[:, mine].clone().requires_grad_()
    losses = tplayers.vocab_parallel_cross_entropy(
        1.0 * shard, target, group.comm, vocab_size=columns - 2, overwrite=overwrite
    )
    (of_shard,) = torch.autograd.grad(losses.square().sum(), shard, create_graph=True)
    torch.testing.assert_close(of_shard, gradient[:, mine].detach())
    slope = tplayers.reduce_from_tensor_parallel_region((of_shard * way[:, mine]).sum(), group.comm)
    torch.testing.assert_close(torch.autograd.grad(slope, shard)[0], product[:, mine])


@pytest.mark.parametrize("token", [-1, 7, 10**12])
def test_target_outside_the_vocabulary(group, token):
    logits = torch.zeros(2, 8 // group.size)
    with pytest.raises(ValueError, match="outside 0 to 6"):
        tplayers.vocab_parallel_cross_entropy(logits, torch.tensor([0, token]), group.comm, vocab_size=7)


def test_shapes_that_do_not_fit(group):
    target = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"need a target \[2\], not \[3\]"):
        tplayers.vocab_parallel_cross_entropy(torch.zeros(2, 4), target, group.comm)
    for vocab_size in (0, -1, 4 * group.size + 1):
        with pytest.raises(ValueError, match="is not within"):
            tplayers.vocab_parallel_cross_entropy(torch.zeros(3, 4), target, group.comm, vocab_size=vocab_size)


@pytest.mark.parametrize("width", [1, 50])
def test_communication_does_not_depend_on_the_vocabulary(group, width):
    shard = torch.zeros(2, 5, width, requires_grad=True)
    with commengine.trace(group.comm) as log:
        losses = tplayers.vocab_parallel_cross_entropy(shard, torch.zeros(2, 5, dtype=torch.int64), group.comm)
        losses.sum().backward()
    events = [(event.operation, event.redop, event.elements) for event in log.events]
    assert events == [("all_reduce", "max", 2 * 5), ("all_reduce", "sum", 2 * 2 * 5)]


def test_overwrite_gives_the_same_once_and_says_so_the_second_time(group):
    vocabulary = WIDTH * group.comm.size
    logits = torch.randn(5, vocabulary, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    target = torch.tensor([0, vocabulary - 1, IGNORED, 1, vocabulary // 2])
    found = []
    for overwrite in (False, True):
        leaf = group.mine(logits).requires_grad_()
        own = leaf * 1.0
        losses = tplayers.vocab_parallel_cross_entropy(own, target, group.comm, overwrite=overwrite)
        (grad,) = torch.autograd.grad(losses.sum(), leaf, retain_graph=True)
        found.append((losses.detach(), grad))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(losses.sum(), leaf)


def test_overwritten_logits_that_something_saved_are_noticed(group):
    leaf = torch.randn(2, WIDTH, dtype=torch.float64).requires_grad_()
    own = leaf.exp()  # exp keeps its result for its backward
    target = torch.zeros(2, dtype=torch.int64)
    losses = tplayers.vocab_parallel_cross_entropy(own, target, group.comm, overwrite=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()


# The loss of a teacher -----------------------------------------------------------------------------------------------


def drawn_logits(seed, vocab, scale=3.0):
    return scale * torch.randn(5, 3, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 7.0])
@pytest.mark.parametrize("vocab", [16, 13, 3])
def test_distillation_is_torchs(group, temperature, vocab):
    """Whose mean of a batch is that over the rows. With 3 of 16 columns a rank has padding alone."""
    student, teacher = drawn_logits(1, 16).requires_grad_(), drawn_logits(2, 16)
    rows = [one[..., :vocab].reshape(-1, vocab) / temperature for one in (student, teacher)]
    truth = F.kl_div(F.log_softmax(rows[0], -1), F.softmax(rows[1], -1), reduction="batchmean") * temperature**2
    (expected,) = torch.autograd.grad(truth, student)
    mine = group.mine(student.detach()).requires_grad_()
    losses = tplayers.vocab_parallel_distillation_loss(
        mine, group.mine(teacher), group.comm, temperature=temperature, vocab_size=vocab
    )
    assert losses.shape == (5, 3) and bool((losses >= -1e-12).all())
    torch.testing.assert_close(group.same(losses).mean(), truth.detach(), rtol=1e-10, atol=1e-12)
    losses.mean().backward()
    torch.testing.assert_close(group.joined(mine.grad), expected, rtol=1e-10, atol=1e-12)


def test_distillation_of_equal_models_and_large_logits(group):
    """The loss is 0, and its gradient, where both are equal; no power overflows."""
    one = drawn_logits(3, 16, scale=1e4).requires_grad_()
    mine = group.mine(one.detach()).requires_grad_()
    losses = tplayers.vocab_parallel_distillation_loss(mine, mine, group.comm, temperature=2.0)
    assert not losses.any()
    losses.sum().backward()
    assert not mine.grad.any()
    other = tplayers.vocab_parallel_distillation_loss(mine, group.mine(drawn_logits(4, 16, scale=1e4)), group.comm)
    assert bool(other.isfinite().all()) and bool((other > 100).any())


def test_distillation_in_half_precision_is_computed_in_float32(group):
    student, teacher = (group.mine(drawn_logits(seed, 16)) for seed in (1, 2))
    expected = tplayers.vocab_parallel_distillation_loss(
        student.bfloat16().double(), teacher, group.comm, temperature=2.0
    )
    half = student.bfloat16().requires_grad_()
    found = tplayers.vocab_parallel_distillation_loss(half, teacher, group.comm, temperature=2.0)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.detach().double(), expected, rtol=1e-4, atol=1e-4)
    found.sum().backward()
    assert half.grad.dtype == torch.bfloat16


def test_the_angle_of_hidden_states_is_torchs():
    student, teacher = drawn_logits(1, 16).requires_grad_(), drawn_logits(2, 16)
    truth = F.cosine_embedding_loss(
        student.flatten(0, 1), teacher.flatten(0, 1), torch.ones(15, dtype=torch.float64), reduction="none"
    )
    losses = tplayers.cosine_distillation_loss(student, teacher)
    torch.testing.assert_close(losses.flatten(), truth, rtol=1e-10, atol=1e-12)
    expected, found = (torch.autograd.grad(one.sum(), student)[0] for one in (truth, losses))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    of_field = tplayers.cosine_distillation_loss(student.movedim(2, 1), teacher.movedim(2, 1), dim=1)
    assert torch.equal(of_field, losses)
    assert tplayers.cosine_distillation_loss(student.bfloat16(), teacher).dtype == torch.float32
    assert teacher.requires_grad_().grad is None and not losses.sum().isnan()
    with pytest.raises(ValueError, match="differ in shape"):
        tplayers.cosine_distillation_loss(student, teacher[:1])


def test_kept_outputs_are_part_of_the_graph():
    inner = torch.nn.Linear(3, 3, bias=False)
    model = torch.nn.Sequential(inner, torch.nn.Tanh())
    x = torch.randn(2, 3)
    with tplayers.kept_output(inner) as kept:
        model(x)
    model(x)
    (found,) = kept
    found.sum().backward()
    torch.testing.assert_close(inner.weight.grad, x.sum(0).expand(3, 3))


def test_bad_input_of_distillation(group):
    x = torch.zeros(2, 4)
    for temperature in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="temperature="):
            tplayers.vocab_parallel_distillation_loss(x, x, group.comm, temperature=temperature)
    with pytest.raises(ValueError, match="differ in shape"):
        tplayers.vocab_parallel_distillation_loss(x, x[:1], group.comm)
    with pytest.raises(ValueError, match="is not within the"):
        tplayers.vocab_parallel_distillation_loss(x, x, group.comm, vocab_size=4 * group.size + 1)
