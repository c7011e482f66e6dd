"""A trainer of a model with experts: at every layout of 2 and 4 ranks, the steps and the gradients of one rank."""

from dataclasses import replace

import pytest
import torch

from commengine import Communicator, ProcessGrid
from tests.support.training import small_runs

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.sizes(2, 4), pytest.mark.timeout(600)]

STEPS, LAYERS = 3, 2
EXPERTS = {
    "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16, "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.01,
}  # fmt: skip
SHARED = {
    "moe_shared_expert_intermediate_size": 8, "moe_shared_expert_gate": True, "moe_router_pre_softmax": True,
    "qk_layernorm": True,
}  # fmt: skip
#: sizes of the tensor, context and pipeline groups, and of the expert groups; the data group has the rest
LAYOUTS = {
    2: [(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 1), (1, 1, 1, 2), (1, 1, 1, 2)],
    4: [
        (2, 2, 1, 1), (2, 1, 2, 1), (1, 2, 2, 1), (2, 1, 1, 1), (1, 1, 2, 1),
        (2, 1, 1, 2), (1, 2, 1, 2), (1, 1, 2, 2), (1, 1, 1, 2), (1, 1, 1, 4), (1, 1, 1, 2), (1, 2, 1, 2), (2, 1, 1, 2),
    ],
}  # fmt: skip


@pytest.mark.parametrize("more", [{}, SHARED], ids=["chosen", "shared"])
@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_steps_in_float64(mpi_world, itself, method, more):
    """Recomputation routes as the first pass did."""
    options = {"layers": LAYERS, **EXPERTS, **more}
    truth = small_runs.steps_of(small_runs.alone(itself, "llama", **options), STEPS)
    for step, _, _ in truth:
        assert list(step.router_losses) == ["load_balancing_loss", "z_loss"] and min(step.router_losses.values()) > 0
        assert step.loss == sum(step.losses.values())
    with Communicator(mpi_world) as world:
        for number, (tensor, context, pipeline, expert) in enumerate(LAYOUTS[world.size]):
            sharded = number % 2 == 1
            config = replace(
                small_runs.CONFIG, use_distributed_optimizer=sharded, sequence_parallel=tensor > 1,
                overlap_grad_reduce=number % 3 == 1,
            )  # fmt: skip
            grid = ProcessGrid(world, tensor=tensor, context=context, pipeline=pipeline, expert=expert)
            layout = {"sequence_parallel": tensor > 1, "recompute": "full" if sharded else None}
            trainer = small_runs.trainer("llama", grid, config=config, method=method, **options, **layout)
            small_runs.require_steps(trainer, truth, f"{tensor=} {context=} {pipeline=} {expert=} {sharded=}")
            trainer.close()


@pytest.mark.sizes(2)
def test_losses_in_float32(mpi_world, itself):
    options = {"layers": LAYERS, "dtype": torch.float32, **EXPERTS}
    whole = small_runs.alone(itself, "llama", **options)
    with Communicator(mpi_world) as world:
        trainer = small_runs.trainer("llama", ProcessGrid(world, tensor=2), **options)
        for _ in range(20):
            assert trainer.step().loss == pytest.approx(whole.step().loss, rel=1e-5)
        trainer.close()
