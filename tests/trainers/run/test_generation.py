"""Text from a model: the same at every TP size, never a padding token, greedy where asked to be."""

import pytest
import torch

from tplayers import GPT, GPTConfig, initialize
from trainers.run.generation import generate

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]

VOCAB, PADDED, POSITIONS = 50, 64, 12


def gpt(comm, **options):
    config = GPTConfig(2, 32, 4, VOCAB, POSITIONS, init_method_std=0.3, make_vocab_size_divisible_by=PADDED, **options)
    model = GPT(config, comm)
    initialize(model, 9)
    return model


@pytest.mark.parametrize("options", [{}, {"temperature": 0}, {"temperature": 2.0, "top_k": 1000}, {"top_k": 1}])
def test_the_same_text_at_every_tensor_size(world, alone, options):
    expected = generate(gpt(alone), [3, 1, 4], 20, seed=1, **options)
    found = generate(gpt(world), [3, 1, 4], 20, seed=1, **options)
    assert found == expected
    assert world.mpi.allgather(found) == [found] * world.size
    assert len(found) == 20 and set(found) <= set(range(VOCAB))


def test_the_same_text_from_shards_of_the_sequence(world, alone):
    """At every length, also those that the tensor group does not divide."""
    for count in (3, 20):
        expected = generate(gpt(alone), [3, 1, 4], count, seed=1, temperature=0)
        assert generate(gpt(world, sequence_parallel=True), [3, 1, 4], count, seed=1, temperature=0) == expected


def test_greedy_takes_the_argmax_of_the_models_logits(world, alone):
    """Also past the last position, where the prompt is read from its end; and top_k=1 is the same."""
    whole, tokens = gpt(alone).eval(), [3, 1, 4]
    with torch.no_grad():
        for _ in range(20):
            tokens.append(int(whole(torch.tensor([tokens[-POSITIONS:]]))[0, -1, :VOCAB].argmax()))
    assert generate(gpt(world), [3, 1, 4], 20, seed=1, temperature=0) == tokens[3:]
    assert generate(gpt(world), [3, 1, 4], 20, seed=1, top_k=1) == tokens[3:]
    assert len(set(tokens[3:])) > 1


def test_padding_is_never_generated(world):
    """Padding columns that would win by far, on whichever rank holds them."""
    model = gpt(world)
    first = world.rank * PADDED // world.size
    with torch.no_grad():
        hidden = model.eval().hidden_states(torch.tensor([[3, 1, 4]]))[-1, 0]
        padding = torch.arange(first, first + PADDED // world.size) >= VOCAB
        model.embedding.weight[padding] = 100 * hidden
        logits = model(torch.tensor([[3, 1, 4]]))[0, -1]
    assert world.mpi.allreduce(int((logits > 100).sum())) == PADDED - VOCAB
    for options in ({"temperature": 0}, {"temperature": 5.0, "top_k": 1000}):
        assert max(generate(model, [3, 1, 4], 8, seed=1, **options)) < VOCAB


def test_a_prompt_longer_than_the_positions_is_read_from_its_end(world):
    prompt = [(7 * n) % VOCAB for n in range(30)]
    found = generate(gpt(world), prompt, 5, seed=4)
    assert found == generate(gpt(world), prompt[-POSITIONS:], 5, seed=4)
    assert len(found) == 5


def test_the_seed_decides_and_nothing_else_random_is_touched(world):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    model = gpt(world)
    texts = [generate(model, [1], 12, seed=seed, temperature=3.0) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(state, torch.get_rng_state())
    assert model.training and generate(model.eval(), [1], 1, seed=1) and not model.training
    assert generate(model, [1], 0, seed=1) == []
