"""The vocabulary-parallel embedding against torch's, alone and tied to the output layer."""

import pytest
import torch
import torch.nn.functional as F

from tplayers import VocabParallelEmbedding

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]

ROWS, WIDTH = 8, 3


@pytest.fixture
def embedding(group):
    return VocabParallelEmbedding(ROWS, WIDTH, group.comm, dtype=torch.float64)


TOKENS = {
    "every token, some often": torch.tensor([[0, 1, 2, 3, 7], [4, 5, 6, 7, 7]]),
    "transposed": torch.tensor([[0, 1, 2, 3, 7], [4, 5, 6, 7, 7]]).t(),
    "all on one rank": torch.tensor([7, 7, 7]),
    "one": torch.tensor(5),
    "none": torch.zeros(0, 4, dtype=torch.int64),
}


@pytest.mark.parametrize("name", TOKENS)
def test_against_torch(group, embedding, random, close, name):
    tokens = TOKENS[name]
    (whole,) = group.fill(embedding).values()
    gradient = random(*tokens.shape, WIDTH)
    expected = F.embedding(tokens, whole)
    expected.backward(gradient)

    found = embedding(tokens)
    assert torch.equal(group.same(found), expected)  # each row comes from one rank: nothing is rounded
    found.backward(gradient)
    close(group.gradients(embedding), {"weight": whole.grad})


def test_logits_with_a_bias(group, embedding, random, close):
    """The bias is split by vocabulary, as the table is."""
    (whole,) = group.fill(embedding).values()
    x, bias, gradient = random(4, WIDTH), random(ROWS, seed=1), random(4, ROWS, seed=2)
    x.requires_grad_()
    bias.requires_grad_()
    expected = x @ whole.t() + bias
    grads = torch.autograd.grad(expected, (bias, whole), gradient)

    mine = group.mine(bias.detach()).requires_grad_()
    found = embedding.logits(x, mine)
    close(group.joined(found), expected.detach())
    found.backward(group.mine(gradient))
    close(group.joined(mine.grad), grads[0])
    close(group.gradients(embedding), {"weight": grads[1]})


def test_tied_logits_and_lookup_both_contribute(group, embedding, random, close):
    tokens = TOKENS["transposed"]
    (whole,) = group.fill(embedding).values()
    mix = random(WIDTH, WIDTH, seed=3)
    gradient = random(*tokens.shape, ROWS, seed=4)
    x_expected = (F.embedding(tokens, whole) @ mix).tanh()
    x_expected.retain_grad()
    logits_expected = x_expected @ whole.t()
    logits_expected.backward(gradient)

    x = (embedding(tokens) @ mix).tanh()
    x.retain_grad()
    logits = embedding.logits(x)
    close(group.joined(logits), logits_expected.detach())
    logits.backward(group.mine(gradient))
    close(group.same(x.grad), x_expected.grad)
    close(group.gradients(embedding), {"weight": whole.grad})

    lookup_only = torch.autograd.grad((F.embedding(tokens, whole) @ mix).tanh().sum(), whole)[0]
    assert not torch.allclose(whole.grad, lookup_only)


def test_numerically(group, embedding):
    group.numerically_right(embedding, group.fill(embedding), TOKENS["transposed"])


@pytest.mark.parametrize("tokens", [[0, ROWS], [-1, 0], [0, -100], [2**40]])
def test_token_outside_the_table(embedding, tokens):
    with pytest.raises(ValueError, match=f"outside 0 to {ROWS - 1}"):
        embedding(torch.tensor(tokens))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_gradients_are_rounded_once(group, random, dtype):
    """Of a token that is read in 4096 places. torch's own backward adds up in half precision on the host."""
    embedding = VocabParallelEmbedding(ROWS, WIDTH, group.comm, dtype=dtype)
    group.fill(embedding)
    tokens = torch.arange(2**12).bitwise_and(ROWS - 1).masked_fill(torch.arange(2**12) % 3 > 0, ROWS - 1)
    gradient = (random(*tokens.shape, WIDTH) + 0.3).to(dtype)
    embedding(tokens).backward(gradient)
    expected = torch.zeros(ROWS, WIDTH, dtype=torch.float64).index_add_(0, tokens, gradient.double())
    found = torch.cat(group.ranks(embedding.weight.grad.double()))
    torch.testing.assert_close(found, expected, rtol=torch.finfo(dtype).eps, atol=1e-3)
