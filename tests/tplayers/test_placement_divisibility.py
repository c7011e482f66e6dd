"""A TP size that does not divide a model: ValueError names the numbers and the sizes that would work."""

import pytest

from tplayers import (
    GPT,
    MLP,
    ColumnParallelLinear,
    GPTConfig,
    ParallelLayerNorm,
    RowParallelLinear,
    SelfAttention,
    TransformerBlock,
    VocabParallelEmbedding,
    require_divisible,
)

LAYERS = {
    "column": (lambda c: ColumnParallelLinear(4, 6, c), "out_features=6", [1, 2, 3, 6]),
    "column of blocks": (lambda c: ColumnParallelLinear(4, 18, c, blocks=3), "out_features=6", [1, 2, 3, 6]),
    "row": (lambda c: RowParallelLinear(6, 4, c), "in_features=6", [1, 2, 3, 6]),
    "embedding": (lambda c: VocabParallelEmbedding(10, 4, c), "num_embeddings=10", [1, 2, 5, 10]),
    "norm": (lambda c: ParallelLayerNorm(6, c), "hidden_size=6", [1, 2, 3, 6]),
    "attention": (lambda c: SelfAttention(12, 6, c), "num_attention_heads=6", [1, 2, 3, 6]),
    "mlp": (lambda c: MLP(8, 10, c), "out_features=10", [1, 2, 5, 10]),
    "block": (lambda c: TransformerBlock(12, 6, 16, c), "num_attention_heads=6", [1, 2, 3, 6]),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer(ranks_of, name):
    build, value, fitting = LAYERS[name]
    for rank in ranks_of(4):
        with pytest.raises(ValueError) as caught:
            build(rank)
        message = str(caught.value)
        assert "tensor-model-parallel size 4 does not divide" in message
        assert value in message
        assert message.endswith(f"sizes that would work: {fitting}")
    for size in (1, 2):
        build(ranks_of(size)[-1])


@pytest.mark.parametrize(
    "changes, offender, fitting",
    [
        ({"num_attention_heads": 6, "hidden_size": 24}, "num_attention_heads=6", [1, 2]),
        ({"ffn_hidden_size": 18}, "ffn_hidden_size=18", [1, 2]),
        ({"make_vocab_size_divisible_by": 10}, "padded_vocab_size=10", [1, 2]),
        ({"num_attention_heads": 1}, "num_attention_heads=1", [1]),
    ],
)
def test_gpt_names_every_value_and_the_sizes_that_divide_all(ranks_of, changes, offender, fitting):
    values = {"hidden_size": 16, "num_attention_heads": 4, "make_vocab_size_divisible_by": 16, **changes}
    config = GPTConfig(num_layers=1, vocab_size=10, max_position_embeddings=8, **values)
    with pytest.raises(ValueError) as caught:
        GPT(config, ranks_of(4)[0])
    message = str(caught.value)
    assert offender in message
    for name in ("num_attention_heads=", "hidden_size=", "ffn_hidden_size=", "padded_vocab_size="):
        assert name in message
    assert message.endswith(f"sizes that would work: {fitting}")
    for size in fitting:
        GPT(config, ranks_of(size)[0])


def test_the_ranks_of_the_job_count_too():
    config = GPTConfig(num_layers=1, hidden_size=16, num_attention_heads=8, vocab_size=16, max_position_embeddings=8)
    with pytest.raises(ValueError, match=r"size 3 .*ranks=6; sizes that would work: \[1, 2\]"):
        config.require_parallel(3, ranks=6)
    config.require_parallel(2, ranks=6)


def test_hidden_size_that_the_heads_do_not_divide(ranks_of):
    for build in (
        lambda: SelfAttention(10, 4, *ranks_of(1)),
        lambda: GPT(GPTConfig(1, 10, 4, 16, 8), *ranks_of(1)),
    ):
        with pytest.raises(ValueError, match="hidden_size=10 is not a multiple of num_attention_heads=4"):
            build()


def test_sizes_that_would_work_are_those_that_do():
    for size in range(1, 40):
        numbers = {"a": 24, "b": 36}
        if 24 % size or 36 % size:
            with pytest.raises(ValueError, match=r"a=24, b=36; sizes that would work: \[1, 2, 3, 4, 6, 12\]"):
                require_divisible(size, **numbers)
        else:
            assert size in (1, 2, 3, 4, 6, 12)
            require_divisible(size, **numbers)
