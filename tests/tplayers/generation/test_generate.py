"""Text from a model: as without a cache, as transformers has it, the same at every TP size, never a padding token."""

import warnings

import pytest
import torch

from commengine import CollectiveMismatch
from tests.support.weights.hugging_face import from_hugging_face
from tplayers import BERT, GPT, BERTConfig, GPTConfig, Sampling, generate, initialize

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2)]

VOCAB, PADDED, POSITIONS = 50, 64, 12
DRAWN = Sampling(temperature=0.8, top_k=40)
GREEDY = Sampling(temperature=0)


def gpt(comm, *, positions=POSITIONS, **options):
    config = GPTConfig(2, 32, 4, VOCAB, positions, init_method_std=0.3, make_vocab_size_divisible_by=PADDED, **options)
    model = GPT(config, comm)
    initialize(model, 9)
    return model


def without_cache(model, prompt, count):
    """Greedy tokens, each from a forward pass of all tokens before it, through a model that is on one rank."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            window = torch.tensor([tokens[-model.config.max_position_embeddings :]])
            tokens.append(int(model.eval()(window)[0, -1, :VOCAB].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def peer():
    transformers = pytest.importorskip("transformers", reason="the independent peer is transformers' GPT-2")
    shape = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=96, n_embd=32, n_layer=3, n_head=4, activation_function="gelu_new",
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(shape).eval()
    # Weights whose greedy text neither repeats one token nor has two largest logits closer than 0.002, 1000 times the
    # rounding of float32: large positions, and small biases, because a bias of the last norm favours some tokens.
    sizes = {"wpe.weight": 1.0, "wte.weight": 0.3}
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            size = sizes.get(name.removeprefix("transformer."), 0.12 if parameter.dim() == 1 else 0.6)
            parameter.copy_(size * noise + (1.0 if "ln_" in name and "weight" in name else 0.0))
    return model


@pytest.mark.slow
def test_greedy_text_is_that_of_transformers_and_that_without_a_cache(peer, group, alone):
    """64 tokens after prompts of 1 to 30 tokens, in float32: one batch here, left padding there."""
    prompts = [[(7 * row + 3 * n * n) % VOCAB for n in range(length)] for row, length in enumerate((5, 1, 30, 17))]
    config = GPTConfig(3, 32, 4, VOCAB, 96, make_vocab_size_divisible_by=PADDED)
    split, whole = GPT(config, group.comm), GPT(config, alone.comm)
    for side, model in ((group, split), (alone, whole)):
        side.load(model, from_hugging_face(dict(peer.named_parameters()), config))

    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    real = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    theirs = peer.generate(padded, attention_mask=real, max_new_tokens=64, do_sample=False, pad_token_id=0)
    theirs = theirs[:, longest:].tolist()

    found = generate(split, prompts, 64)
    assert found == theirs
    assert found == [without_cache(whole, prompt, 64) for prompt in prompts]
    assert all(len(set(row)) > 10 for row in found)  # not one token again and again, whatever the mistake
    assert group.comm.mpi.allgather(found) == [found] * group.comm.size


@pytest.mark.every_size
@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY, DRAWN, Sampling(temperature=2.0, top_k=1000), Sampling(top_k=1), Sampling(top_p=0.7),
        Sampling(0.7, 20, 0.9, 1.3), Sampling(0, repetition_penalty=1.5), Sampling(),
    ],
)  # fmt: skip
def test_the_same_text_at_every_tensor_size(group, alone, sampling):
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6], [5]]
    options = {"sampling": sampling, "seed": 1, "samples": 2}
    expected = generate(gpt(alone.comm, positions=40), prompts, 20, **options)
    found = generate(gpt(group.comm, positions=40), prompts, 20, **options)
    assert found == expected
    assert all(len(row) == 20 and set(row) <= set(range(VOCAB)) for row in found)
    pairs = list(zip(found[::2], found[1::2], strict=True))
    if sampling.temperature == 0 or sampling.top_k == 1:
        assert all(one == other for one, other in pairs)
    else:
        assert all(one != other for one, other in pairs)


def test_the_same_text_with_sequence_parallelism(group, alone):
    expected = generate(gpt(alone.comm), [[3, 1, 4], [1]], 20)
    model = gpt(group.comm, sequence_parallel=True)
    assert generate(model, [[3, 1, 4], [1]], 20) == expected
    assert model.sequence_parallel and model.layers[0].mlp.up.sequence_parallel  # it is as before


def test_a_window_slides_past_the_last_position(group, alone):
    """Each token is that of the model on the last tokens; rows reach the end of the positions one after the other."""
    prompts = [[3, 1, 4], [(7 * n) % VOCAB for n in range(30)], [2, 7, 1, 8, 2, 8, 1, 8, 2]]
    whole = gpt(alone.comm)
    expected = [without_cache(whole, prompt, 20) for prompt in prompts]
    assert generate(gpt(group.comm), prompts, 20) == expected
    assert all(len(set(row)) > 3 for row in expected)


def test_a_window_slides_by_several_tokens(group, alone):
    whole, tokens, start = gpt(alone.comm).eval(), [3, 1, 4], 0
    with torch.no_grad():
        for _ in range(30):
            if len(tokens) - start > POSITIONS:
                start = len(tokens) - POSITIONS + 4
            tokens.append(int(whole(torch.tensor([tokens[start:]]))[0, -1, :VOCAB].argmax()))
    assert generate(gpt(group.comm), [[3, 1, 4]], 30, slide=5) == [tokens[3:]]


def test_rank_zero_warns_where_a_window_slides(group):
    """The last token does not go through the model, so 12 positions are enough for a prompt of 3 and 10 tokens."""
    model, rows = gpt(group.comm), [[3, 1, 4], [1]]
    for arguments, named, slid in [
        ((rows, 10), {}, 0), ((rows, 11), {}, 1), ((rows, 13), {}, 2), ((rows, 13), {"warn": False}, 0),
        (([[1] * 13], 1), {"slide": 3}, 1), (([[1] * 12], 1), {}, 0),
    ]:  # fmt: skip
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            generate(model, *arguments, **named)
        told = [str(one.message) for one in told if one.filename == __file__]
        assert len(told) == (1 if slid and not group.comm.rank else 0)
        if told:
            rest = f"{slid} of {len(arguments[0])} rows got longer than the 12 positions of the model"
            assert rest in told[0] and f"forgotten {named.get('slide', 1)} at a time" in told[0]


def test_padding_is_never_generated(group):
    """Padding columns that would win by far, on whichever rank holds them."""
    model, comm = gpt(group.comm), group.comm
    first = comm.rank * PADDED // comm.size
    with torch.no_grad():
        hidden = model.eval().hidden_states(torch.tensor([[3, 1, 4]]))[-1, 0]
        padding = torch.arange(first, first + PADDED // comm.size) >= VOCAB
        model.embedding.weight[padding] = 100 * hidden
        logits = model(torch.tensor([[3, 1, 4]]))[0, -1]
    assert comm.mpi.allreduce(int((logits > 100).sum())) == PADDED - VOCAB
    for sampling in (GREEDY, Sampling(5.0), Sampling(5.0, top_k=1000), Sampling(5.0, top_p=0.99)):
        assert max(generate(model, [[3, 1, 4]], 8, sampling=sampling)[0]) < VOCAB


def test_the_seed_and_the_numbers_decide_and_nothing_else_random_is_touched(group):
    """So a prompt has one text, whatever its place in the batch, and whichever rank of the data group has it."""
    torch.manual_seed(1)
    state = torch.get_rng_state()
    model, hot = gpt(group.comm, positions=32), Sampling(temperature=3.0)
    texts = [generate(model, [[1]], 12, sampling=hot, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    prompts = [[1], [2, 3], [1]]
    three = generate(model, prompts, 12, sampling=hot, seed=1, samples=2)
    assert three[0] == texts[0][0] and len({tuple(row) for row in three}) == 6
    assert generate(model, prompts[:0:-1], 12, sampling=hot, seed=1, samples=2, numbers=[2, 1]) == [
        *three[4:],
        *three[2:4],
    ]
    assert torch.equal(state, torch.get_rng_state())
    assert model.training and generate(model.eval(), [[1]], 1) and not model.training
    model.train().layers[0].eval()
    assert generate(model, torch.tensor([[1], [2]]), 3) == generate(model, [[1], [2]], 3)
    assert [model.layers[number].mlp.training for number in (0, 1)] == [False, True]  # each as before
    assert generate(model, [[1], [2]], 0) == [[], []] and generate(model, [], 5) == []


def test_rows_end_one_after_the_other(group):
    """At a stop token, which is their last, or where the caller says so; the other rows go on as if alone."""
    model, prompts = gpt(group.comm, positions=40), [[3, 1, 4], [1, 5, 9, 2, 6], [5]]
    sampling = Sampling(1.5, repetition_penalty=1.2)
    free = generate(model, prompts, 20, sampling=sampling, seed=3)
    stop, calls = free[1][4], []

    def after(row, new):
        calls.append((row, len(new)))
        return row == 2 and len(new) == 7

    found = generate(model, prompts, 20, sampling=sampling, seed=3, stop_tokens={stop}, after_token=after)
    for row, (whole, part) in enumerate(zip(free, found, strict=True)):
        ends = [n + 1 for n, token in enumerate(whole) if token == stop] + [7 if row == 2 else 20]
        assert part == whole[: min(ends)]
        assert [n for place, n in calls if place == row] == list(range(1, len(part) + 1))
    assert len({len(row) for row in found}) > 1


def test_errors_are_clear_and_the_same_on_all_ranks(group):
    model = gpt(group.comm)
    for arguments, named, message in [
        (([[1], []], 4), {}, "prompt 1 has no token"),
        (([[1], [2, VOCAB]], 4), {}, f"prompt 1: token {VOCAB} lies outside 0 to {VOCAB - 1}"),
        (([[-1]], 4), {}, "prompt 0: token -1 lies outside"),
        (([[1]], -1), {}, "max_new_tokens=-1 must not be negative"),
        (([[1]], 4), {"samples": 0}, "samples=0 must be at least 1"),
        (([[1]], 4), {"slide": 13}, "slide=13 must be from 1 to max_position_embeddings=12"),
        (([[1]], 4), {"numbers": [1, 2]}, "2 numbers for 1 prompts"),
    ]:
        with pytest.raises(ValueError, match=message):
            generate(model, *arguments, **named)
    with pytest.raises(TypeError, match="float"):
        generate(model, [[1.7]], 4)
    for tokens in ([1, 2, 3], torch.tensor([1, 2, 3])):
        with pytest.raises(
            TypeError, match=r"prompt 0 is 1, not a sequence of tokens; .*\[\[1, 2, 3\]\] for one prompt"
        ):
            generate(model, tokens, 4)
    with pytest.raises(ValueError, match="BERT is not causal"):
        generate(BERT(BERTConfig(1, 32, 4, VOCAB, 8, make_vocab_size_divisible_by=PADDED), group.comm), [[1]], 1)
    assert model.training


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, Sampling(), Sampling(top_p=0.5)])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_an_error(group, sampling, wrong):
    """Of one token, whose row of the embedding is on one rank."""
    model = gpt(group.comm)
    row = 40 - group.comm.rank * PADDED // group.comm.size
    if 0 <= row < PADDED // group.comm.size:
        with torch.no_grad():
            model.embedding.weight[row] = wrong
    with pytest.raises(ValueError, match="logits of token 0 after the prompt are not finite"):
        generate(model, [[1, 2], [3]], 4, sampling=sampling)


@pytest.mark.mpi(min_size=2)
def test_ranks_with_different_arguments_are_found(group):
    model = gpt(group.comm)
    with pytest.raises(CollectiveMismatch, match=r"generate\(1 prompts, 4 new tokens, arguments"):
        generate(model, [[1 + group.comm.rank % 2]], 4)
    with pytest.raises(CollectiveMismatch, match="a token is an integer"):
        generate(model, [[1.5 if group.comm.rank else 1]], 4)
    with pytest.raises(CollectiveMismatch, match="generate"):
        generate(model, [[1]], 4, seed=group.comm.rank)
