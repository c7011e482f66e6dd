"""The collectives of a generated token and the bytes of a cache, on paper; a trace compares them with the code's."""

import pytest

from tplayers import formulas
from tplayers.formulas import TransformerShape

GPT2 = TransformerShape(layers=12, hidden=768, heads=12, seq=1024, vocab=50304)


def test_bytes_of_a_token():
    greedy = formulas.generation_collectives(GPT2, 1, 2)
    assert sum(one.count for one in greedy) == 1 + 24 + 1
    assert sum(one.size * one.count for one in greedy) == 25 * 768 * 4 + 2 * 16
    top_k = formulas.generation_collectives(GPT2, 8, 4, top_k=40)
    assert sum(one.size for one in top_k if one.part == "token") == 8 * (4 * 4 * 40 + 4 * 16)
    both = formulas.generation_collectives(GPT2, 1, 2, top_k=40, top_p=0.9)
    assert sum(one.size * one.count for one in both if "top-p" in one.why) == 4 + 4 * 2048
    assert formulas.generation_collectives(GPT2, 8, 1) == []


def test_a_large_top_k_sends_a_ranks_columns_at_most():
    small = TransformerShape(layers=2, hidden=8, heads=2, seq=4, vocab=16)
    (best,) = (one for one in formulas.generation_collectives(small, 1, 2, top_k=12) if "top-k" in one.why)
    assert best.size == 2 * 8 * 4
    assert not any("top-k" in one.why for one in formulas.generation_collectives(small, 1, 2, top_k=16))


def test_bytes_of_a_cache():
    assert formulas.key_value_bytes(GPT2, 1, 1024) == 2 * 12 * 1024 * 768 * 4
    assert formulas.key_value_bytes(GPT2, 8, 1024, 4, element_bytes=2) == 2 * 12 * 8 * 1024 * 768 / 4 * 2
    with pytest.raises(ValueError, match="tensor-parallel size 5 does not divide heads=12"):
        formulas.key_value_bytes(GPT2, 1, 1, 5)
