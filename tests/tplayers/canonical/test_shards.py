"""Canonical shards: their numbers and refusals, sums in the tree, and whole models at every tensor-parallel size."""

import weakref

import pytest
import torch

from commengine import Communicator
from tests.support.exact import in_pairs
from tests.support.small_models import KINDS, LLAMA, arguments, made, total
from tplayers import CanonicalShards, ParallelLayerNorm, RowParallelLinear, placements, use_canonical_shards
from tplayers.canonical.shards import require_count, stacked, tree_sum, unstacked

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.every_size]

#: sizes that four divides
SIZES = {"num_query_groups": 4, "kv_channels": 8}


def test_the_sum_is_a_binary_tree_and_keeps_one_part_of_each_level():
    numbers = [torch.randn(50, generator=torch.Generator().manual_seed(n)) * 3**n for n in range(16)]
    alive, most = [], 0

    def parts():
        nonlocal most
        for number in numbers:
            part = number.clone()
            alive.append(weakref.ref(part))
            most = max(most, sum(one() is not None for one in alive))
            yield part

    assert torch.equal(tree_sum(parts()), in_pairs(numbers))
    assert not torch.equal(in_pairs(numbers), sum(numbers[1:], numbers[0]))
    assert most <= 6  # one for each of the four levels, the new one, and the one before it, which the generator holds


def test_counts_that_do_not_fit(mpi_world):
    with pytest.raises(ValueError, match="6 is not a power of two"):
        require_count(6, 2)
    with pytest.raises(ValueError, match=r"3 ranks does not divide 4; sizes that would: \[1, 2, 4\]"):
        require_count(4, 3)
    if mpi_world.size > 1:
        with Communicator(mpi_world) as comm, pytest.raises(ValueError, match="order='tree', not None"):
            CanonicalShards(4, comm)


def test_shards_side_by_side():
    x = torch.arange(24.0).view(2, 12)
    parts = list(stacked(x, 4))
    assert all(part.is_contiguous() and part.shape == (2, 3) for part in parts)
    assert torch.equal(unstacked(torch.stack(parts)), x)


def test_blocks_of_rows(shards):
    assert shards.blocks(8, split=False) == 4 and shards.blocks(33, split=False) == 1
    assert shards.blocks(8, split=True) == shards.own
    if shards.own > 1:
        with pytest.raises(ValueError, match=r"a sequence of \d+ does not divide into 4 canonical shards"):
            shards.blocks(shards.own * 2 + 1, split=True)


def test_sum_of_rows(shards, alone):
    values = (
        torch.randn(16, 1, 40, generator=torch.Generator().manual_seed(0)) * torch.logspace(0, 4, 16)[:, None, None]
    )
    expected = alone.sum_of_rows(values, split=False)
    assert torch.equal(expected, in_pairs([block.sum((0, 1)) for block in values.chunk(4)]))
    assert torch.equal(shards.sum_of_rows(values, split=False), expected)
    mine = values.chunk(shards.comm.size)[shards.comm.rank]
    assert torch.equal(shards.sum_of_rows(mine, split=True), expected)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_models_have_the_same_losses_and_gradients(shards, alone, kind, dtype, sequence_parallel):
    """As the model alone has; which has the losses of the ordinary model but for rounding."""
    options = {"make_vocab_size_divisible_by": 16} | (LLAMA | SIZES if kind == "llama" else {})
    found = []
    for group in (alone, shards):
        model = made(kind, group.comm, dtype=dtype, sequence_parallel=sequence_parallel, **options)
        use_canonical_shards(model, group.comm, 4)
        by_columns = [one.weight for one in model.modules() if isinstance(one, RowParallelLinear)]
        assert by_columns and all(weight.t().is_contiguous() for weight in by_columns)
        positional, named = arguments(kind)
        loss = total(model(*positional, **named))
        loss.backward()
        placed = placements(model)
        assert not any(placement.partial for placement in placed.values())
        found.append((loss.detach(), {n: (p.grad + 0.0, placed[n]) for n, p in model.named_parameters()}))
    (right, wholes), (loss, gradients) = found
    assert torch.equal(loss, right)
    for name, (gradient, placement) in gradients.items():
        assert torch.equal(gradient, placement.part(wholes[name][0])), name
    plain = made(kind, alone.comm, dtype=dtype, **options)
    positional, named = arguments(kind)
    expected = total(plain(*positional, **named))
    expected.backward()
    tolerance = 2e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(right.float(), expected.detach().float(), rtol=tolerance, atol=tolerance)
    for name, parameter in plain.named_parameters():
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(wholes[name][0], parameter.grad + 0.0, rtol=0, atol=tolerance * scale + 1e-12)


def test_layers_that_cannot(shards):
    if shards.comm.size > 2:
        return
    with pytest.raises(ValueError, match="4 canonical shards do not divide in_features=6"):
        use_canonical_shards(RowParallelLinear(6, 4, shards.comm), shards.comm, 4)
    with pytest.raises(ValueError, match="0: ParallelLayerNorm cannot compute in canonical shards"):
        use_canonical_shards(torch.nn.Sequential(ParallelLayerNorm(8, shards.comm)), shards.comm, 4)


def test_without_labels_logits_lie_side_by_side(shards, alone):
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    logits = []
    for group in (alone, shards):
        model = made("gpt", group.comm, **options).eval()
        use_canonical_shards(model, group.comm, 4)
        with torch.no_grad():
            logits.append(model(arguments("gpt")[0][0]))
    whole, part = logits
    width = part.shape[-1]
    assert torch.equal(part, whole[..., shards.comm.rank * width : (shards.comm.rank + 1) * width])
    plain = made("gpt", alone.comm, **options).eval()
    torch.testing.assert_close(whole, plain(arguments("gpt")[0][0]).detach())
