"""The most likely token: that of the whole logits, also where the largest one is there twice, or is padding."""

import pytest
import torch

from tplayers.generation.vocab_argmax import vocab_parallel_argmax, vocab_parallel_max

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [24, 19, 5, 1])
def test_it_is_the_first_largest_of_the_real_columns(group, dtype, vocab_size):
    """With 5 real columns of 24, most ranks have padding alone."""
    generator = torch.Generator().manual_seed(vocab_size)
    whole = torch.randint(-3, 3, (4, 7, 24), generator=generator).to(dtype)  # many equal ones
    whole[..., vocab_size:] = 9
    mine = group.mine(whole).contiguous()
    before = mine.clone()
    found = vocab_parallel_argmax(mine, group.comm, vocab_size)
    assert found.dtype == torch.int64 and torch.equal(found, whole[..., :vocab_size].float().argmax(dim=-1))
    assert torch.equal(mine, before)


def test_numbers_that_differ_in_their_last_bits_and_infinities(group):
    whole = torch.full((3, 12), -torch.inf, dtype=torch.float64)
    whole[0, 7], whole[0, 8] = 1.0, 1.0 + 2**-50
    whole[1, 11] = -1e300
    mine = group.mine(whole).contiguous()
    assert vocab_parallel_argmax(mine, group.comm, 12)[:2].tolist() == [8, 11]
    tokens, logits = vocab_parallel_max(mine, group.comm, 12)
    assert tokens[:2].tolist() == [8, 11] and logits.tolist() == [1.0 + 2**-50, -1e300, -torch.inf]
    whole[2, 5] = torch.nan
    assert vocab_parallel_max(group.mine(whole).contiguous(), group.comm, 12)[1].isnan().tolist() == [0, 0, 1]
