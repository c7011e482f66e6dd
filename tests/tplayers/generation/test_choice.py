"""The choice from shards of the vocabulary: what is kept, how often it is drawn, and what the ranks send."""

import math
from collections import Counter

import pytest
import torch

import commengine
from tplayers import GPT, GPTConfig, Sampling, formulas, generate
from tplayers.generation.choice import TokenChooser
from tplayers.rng import stable_hash

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2)]

VOCAB, PADDED, ROWS = 90, 96, 5


def scores(seed=0, *, steps=None):
    """Logits [ROWS, VOCAB] with a few ties at the top, or of a few values only: the same on all ranks."""
    drawn = 3 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(seed))
    if steps is not None:
        drawn = (drawn * steps).round() / steps
    drawn[1] = 0.0  # all equal
    drawn[2, 7] = 40.0  # nearly all of the probability
    return drawn


def mine(whole, comm):
    """This rank's columns, with vocabulary padding that would win."""
    padded = torch.nn.functional.pad(whole, (0, PADDED - VOCAB), value=99.0)
    return padded.chunk(comm.size, dim=1)[comm.rank].clone()


def chooser(comm, sampling):
    return TokenChooser(comm, VOCAB, PADDED // comm.size, sampling, torch.device("cpu"))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 1e-6])
@pytest.mark.parametrize("top_k", [0, 1, pytest.param(3, marks=pytest.mark.sizes(1, 2)), 60, 89, 90, 1000])
def test_filters_are_those_of_transformers(group, top_k, top_p, temperature):
    process = pytest.importorskip("transformers.generation.logits_process", reason="the peer is transformers")
    whole = scores()
    held = torch.tensor([[1, 5, 89], [0, 2, 3], [7, 7, 7], [4, 60, 88], [9, 9, 10]])
    seen = torch.zeros(ROWS, PADDED, dtype=torch.bool).scatter_(1, held, True).chunk(group.size, dim=1)[group.rank]
    found = chooser(group.comm, Sampling(temperature, top_k, top_p, 1.7)).filtered(mine(whole, group.comm), seen)

    expected = process.RepetitionPenaltyLogitsProcessor(1.7)(held, whole.clone())
    expected = process.TemperatureLogitsWarper(temperature)(held, expected)
    if top_k:
        expected = process.TopKLogitsWarper(top_k)(held, expected)
    if top_p < 1:
        # Row 1 has only ties, of which transformers keeps some by their order in its sort.
        of_theirs = process.TopPLogitsWarper(top_p)(held, expected)
        expected[[0, 2, 3, 4]] = of_theirs[[0, 2, 3, 4]]
    found = group.joined(found)
    assert torch.all(found[:, VOCAB:] == -torch.inf)
    torch.testing.assert_close(found[:, :VOCAB], expected, rtol=0, atol=0)


@pytest.mark.parametrize("top_p", [0.9, 0.3, 0.999])
@pytest.mark.parametrize("top_k", [0, 17])
def test_tokens_of_equal_logits_are_kept_together(group, top_k, top_p):
    """Against the definition, on logits of which many are equal, as in bf16."""
    whole = scores(3, steps=2)
    found = group.joined(chooser(group.comm, Sampling(1.0, top_k, top_p)).filtered(mine(whole, group.comm)))
    for row in range(ROWS):
        logits = [float(x) for x in whole[row]]
        kept = [x for x in logits if not top_k or sum(y > x for y in logits) < top_k]
        total = math.fsum(math.exp(x) for x in kept)
        expected = {
            token for token, x in enumerate(logits)
            if x in kept and math.fsum(math.exp(y) for y in kept if y > x) < top_p * total
        }  # fmt: skip
        assert set((found[row] > -torch.inf).nonzero()[:, 0].tolist()) == expected


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_k=6), Sampling(1.0, top_p=0.8)])
def test_tokens_are_drawn_with_their_probabilities(group, sampling):
    """5,000 draws: every frequency within 5 standard deviations, and the same draws at every number of ranks."""
    draws, logits = 5_000, torch.tensor([*range(10)]).log().repeat(1, 9) * 1.5
    keys = torch.tensor([stable_hash("draw", n) for n in range(draws)])
    filtered = group.joined(chooser(group.comm, sampling).filtered(mine(logits, group.comm)))[0, :VOCAB]
    expected = filtered.double().softmax(dim=0)
    tokens, _ = chooser(group.comm, sampling).choose(mine(logits, group.comm).expand(draws, -1).clone(), keys)
    counts = Counter(tokens.tolist())
    assert all(expected[token] > 0 for token in counts)
    for token, p in enumerate(expected.tolist()):
        assert abs(counts[token] - draws * p) <= 5 * math.sqrt(draws * p * (1 - p)), token

    import mpi4py.MPI as MPI

    with commengine.Communicator(MPI.COMM_SELF) as one:
        alone, _ = chooser(one, sampling).choose(mine(logits, one).expand(draws, -1).clone(), keys)
    assert torch.equal(tokens, alone)


@pytest.mark.every_size
def test_greedy_takes_the_first_of_equal_ones(group):
    logits = torch.zeros(3, VOCAB)
    logits[1, [30, 70]] = 5.0
    logits[2, 89] = 1e-3
    tokens, best = chooser(group.comm, Sampling(0)).choose(mine(logits, group.comm), None)
    assert tokens.tolist() == [0, 30, 89]
    assert best.tolist() == pytest.approx([0, 5, 1e-3])


@pytest.mark.every_size
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("vocab_size", [64, 4096])
@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (20, 1.0), (0, 0.9), (20, 0.9)])
def test_a_token_communicates_what_the_formula_says(group, vocab_size, top_k, top_p):
    """Whatever the size of the vocabulary: no logits are gathered."""
    layers, hidden, rows = 2, 16, 3
    shape = GPTConfig(layers, hidden, 4, vocab_size, 16, make_vocab_size_divisible_by=64)
    model = GPT(shape, group.comm)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    found = []
    for count in (2, 3):
        with commengine.trace(group.comm) as log:
            generate(model, [[1, 2]] * rows, count, sampling=Sampling(1.0, top_k, top_p))
        found.append(Counter((event.operation, event.bytes) for event in log.events))
    (of_token := found[1]).subtract(found[0])
    of_formula = formulas.generation_collectives(
        formulas.TransformerShape(layers, hidden, 4, 16, vocab_size), rows, group.size, top_k=top_k, top_p=top_p
    )
    expected = Counter()
    for one in of_formula:
        expected[one.operation, one.size] += one.count
    assert +of_token == expected and not -of_token
