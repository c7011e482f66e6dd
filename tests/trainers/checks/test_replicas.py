"""Copies that must be equal: after steps they are, at every layout; a flipped bit in one of them is found and named."""

import pytest
import torch

from tests.support.training.states import local_state
from trainers.checks.replicas import checksum, difference

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]

#: two heads of keys and values, which four ranks of a tensor group share
LLAMA = {
    "normalization": "RMSNorm", "swiglu": True, "position_embedding_type": "rope", "group_query_attention": True,
    "num_query_groups": 2, "disable_bias_linear": True, "untie_embeddings_and_output_weights": True,
}  # fmt: skip
MODES = {
    "fp32": {},
    "bf16": {"bf16": True},
    "ZeRO-1": {"use_distributed_optimizer": True, "bf16": True, "overlap_grad_reduce": True},
    "sequence parallel": {"sequence_parallel": True},
    "Llama": LLAMA,
    "Llama, ZeRO-1": {**LLAMA, "use_distributed_optimizer": True, "bf16": True, "sequence_parallel": True},
}


def layouts(world):
    return [tensor for tensor in (1, 2, 4) if world.size % tensor == 0]


def flip(tensor, bit):
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    flat[bit // 8] ^= 1 << bit % 8


@pytest.mark.some(3)
@pytest.mark.parametrize("mode", MODES)
def test_copies_are_equal_after_steps(world, trainer, mode):
    for tensor in layouts(world):
        one = trainer(world, tensor_model_parallel_size=tensor, **MODES[mode])
        assert difference(one) is None
        for _ in range(3):
            one.step()
        assert difference(one) is None


@pytest.mark.parametrize("mode", ["fp32", "bf16", "ZeRO-1", "Llama"])
def test_a_flipped_bit_of_a_parameter_is_found_between_replicas(world, trainer, mode):
    if world.size == 1:
        pytest.skip("one rank has no replicas")
    one = trainer(world, **MODES[mode])
    one.step()
    one.optimizer.wait_for_parameters()
    name, parameter = next((n, p) for n, p in one.model.named_parameters() if p.dim() > 1 and "embed" not in n)
    if world.rank == world.size - 1:
        flip(parameter, 37)
    found = difference(one)
    assert found is not None and found.startswith(name)
    last = world.size - 1
    expected = "differs between rank 0 and rank 1" if last == 1 else f"on rank {last} is not that of ranks 0, 1, 2"
    assert expected in found or expected.replace("rank 0 and rank 1", "rank 1 and rank 0") in found


def test_a_flipped_bit_of_a_moment_is_found_where_it_is_not_sharded(world, trainer):
    if world.size == 1:
        pytest.skip("one rank has no replicas")
    for shard in (False, True):
        one = trainer(world, use_distributed_optimizer=shard)
        one.step()
        if world.rank == 0:
            kind, tensor = list(local_state(one.optimizer))[-1]
            assert kind == "exp_avg_sq"
            flip(tensor, 3)
        found = difference(one)
        assert found is None if shard else found is not None and found.startswith("exp_avg_sq.")


@pytest.mark.parametrize("mode", ["fp32", "Llama"])
def test_a_replicated_parameter_of_a_tensor_group_is_compared_and_a_split_one_is_not(world, trainer, mode):
    if world.size == 1:
        pytest.skip("one rank has no tensor group")
    one = trainer(world, tensor_model_parallel_size=world.size, **MODES[mode])
    named = dict(one.model.named_parameters())
    from tplayers import placements

    placed = placements(one.model)
    split = next(name for name in named if placed[name].sharded)
    whole = next(name for name in named if not placed[name].sharded)
    if world.rank == 1:
        flip(named[split], 5)
    assert difference(one) is None
    if world.rank == 1:
        flip(named[whole], 5)
    found = difference(one)
    assert found is not None and found.startswith(whole)


def test_checksum_is_of_all_bits_and_their_order():
    values = torch.arange(40.0).reshape(5, 8)
    assert checksum(values) == checksum(values.clone()) == checksum(values.t().contiguous().t().contiguous())
    assert checksum(values) != checksum(values.t().contiguous())
    other = values.clone()
    flip(other, 40 * 32 - 1)
    assert checksum(values) != checksum(other)
    assert checksum(values.bfloat16()) != checksum(values) and -(2**63) <= checksum(values) < 2**63
