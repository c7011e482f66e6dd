"""A model that all ranks hold, asked by rank 0 alone: the answers of the model, in order, and errors on all ranks."""

import numpy as np
import pytest

from commengine import ProcessGrid, UsageError
from tplayers import GPT, GPTConfig, generate, initialize
from trainers.data.tokenizer import Tokenizer
from trainers.scoring.passages import Passage
from trainers.scoring.scorer import score
from trainers.scoring.service import ModelService

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]

CONFIG = GPTConfig(1, 48, 12, 270, 24, init_method_std=0.3, make_vocab_size_divisible_by=276)


def gpt(comm):
    model = GPT(CONFIG, comm)
    initialize(model, 3)
    return model.eval()


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train_bpe(["to the dog " * 20], 270)


@pytest.fixture
def services(world, tokenizer):
    """A service for each layout of the ranks."""
    grids = [ProcessGrid(world, tensor=tensor) for tensor in {1, world.size, max(world.size // 2, 1)}]
    yield [ModelService(world, grid, gpt(grid.tensor), tokenizer, batch=3, seed=1) for grid in grids]
    for grid in grids:
        grid.close()


def serve_or(service, ask):
    """``ask()`` on rank 0; the other ranks serve."""
    if service.world.rank:
        service.serve()
    else:
        ask()


def asked(service, ask):
    """What ``ask`` returns on rank 0, while the other ranks serve; None there."""
    if service.world.rank:
        service.serve()
        return None
    found = ask()
    service.stop()
    return found


def test_rank_0_gets_the_scores_of_the_model(services, alone):
    generator = np.random.default_rng(0)
    passages = [
        Passage(generator.integers(0, 270, size).astype(np.int32), int(generator.integers(1, size)))
        for size in generator.integers(2, 25, 10)
    ]
    expected = score(gpt(alone), passages, alone, batch=10, predict=True)
    for service in services:
        found = asked(service, lambda service=service: [service.score(passages), service.score([])])
        if found is not None:
            assert found[0].nll.tolist() == pytest.approx(expected.nll.tolist(), rel=1e-5)
            assert found[0].predicted.tolist() == expected.predicted.tolist() and found[1].nll.tolist() == []
            assert not service.busy


def until_end(tokens, end):
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def test_rank_0_gets_the_texts_in_the_order_of_the_prompts(services, alone, tokenizer):
    """Prompts of different lengths that ask for different numbers of tokens, in several batches."""
    prompts = [tokenizer.encode("to the dog " * n) for n in (1, 3, 2, 1, 2, 3, 1)]
    counts = [4, 6, 4, 6, 4, 4, 4]
    how = [{"count": count, "stop": [], "sampling": {"temperature": 0.0}} for count in counts]
    model = gpt(alone)
    expected = [generate(model, [one], n)[0] for one, n in zip(prompts, counts, strict=True)]
    for service in services:
        found = asked(service, lambda service=service: service.generate(prompts, how))
        if found is not None:
            assert found == [until_end(tokens, tokenizer.eod) for tokens in expected]
            cut = expected[0][2]
    short = [{"count": 4, "stop": [], "sampling": {"temperature": 0.9, "top_k": 5}}]
    drawn = [asked(service, lambda service=service: service.generate(prompts[:1], short)) for service in services]
    assert len(set(map(str, drawn))) == 1 and (services[0].world.rank or cut)


def test_a_problem_of_rank_0_is_an_error_of_all_ranks(services):
    for service in services:
        with pytest.raises(UsageError, match="no such task"):
            serve_or(service, lambda service=service: service.stop("no such task"))


def test_an_error_in_a_request_is_one_of_all_ranks(services):
    """A sampling that does not exist; the service then tells that the ranks did not wait for rank 0."""
    how = [{"count": 1, "stop": [], "sampling": {"temperature": 1.0, "top_p": 7.0}}]
    for service in services:
        with pytest.raises(UsageError, match="top_p"):
            serve_or(service, lambda service=service: service.generate([[1]], how))
        assert service.busy or service.world.rank
