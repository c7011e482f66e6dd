"""A trainer of a model with experts: at every layout of 2 and 4 ranks, the steps and the gradients of one rank."""

from dataclasses import replace

import pytest
import torch

from commengine import CollectiveError, Communicator, ProcessGrid, UsageError
from tests.support.training import small_runs
from tplayers import formulas
from trainers.checks.replicas import difference
from trainers.run.evaluation import evaluate
from trainers.training.reduction import GradientBuckets

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
        (4, 1, 1, 1), (1, 1, 1, 1),
    ],
}  # fmt: skip


def layouts(world, part=slice(None), **options):
    """(trainer, what it is) at each of the layouts of ``part``, every other one with ZeRO-1 and recomputation."""
    for number, (tensor, context, pipeline, expert) in [*enumerate(LAYOUTS[world.size])][part]:
        sharded = number % 2 == 1
        config = replace(
            small_runs.CONFIG, use_distributed_optimizer=sharded, sequence_parallel=tensor > 1,
            overlap_grad_reduce=number % 3 == 1,
        )  # fmt: skip
        grid = ProcessGrid(world, tensor=tensor, context=context, pipeline=pipeline, expert=expert)
        layout = {"sequence_parallel": tensor > 1, "recompute": "full" if sharded else None}
        made = small_runs.trainer("llama", grid, config=config, layers=LAYERS, **options, **layout)
        yield made, f"{tensor=} {context=} {pipeline=} {expert=} {sharded=}"
        made.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "more"),
    [
        pytest.param(*case, id=f"{case[0]}-{name}", marks=[] if usual else [pytest.mark.long])
        for *case, name, usual in (
            *(("ulysses", {}, "chosen", False), ("ulysses", SHARED, "shared", True)),
            *(("ring", {}, "chosen", True), ("ring", SHARED, "shared", False)),
        )
    ],
)
@pytest.mark.parametrize(
    "part", [slice(1, None, 3), *(pytest.param(slice(n, None, 3), marks=pytest.mark.long) for n in (0, 2))]
)
def test_steps_in_float64(mpi_world, itself, method, more, part):
    """Recomputation routes as the first pass did."""
    options = {**EXPERTS, **more}
    truth = small_runs.steps_of(small_runs.alone(itself, "llama", layers=LAYERS, **options), STEPS)
    for step, _, _ in truth:
        assert list(step.router_losses) == ["load_balancing_loss", "z_loss"] and min(step.router_losses.values()) > 0
        assert step.loss == sum(step.losses.values())
    with Communicator(mpi_world) as world:
        for made, case in layouts(world, part, method=method, **options):
            small_runs.require_steps(made, truth, case)


@pytest.mark.long
def test_twenty_steps_in_float64(mpi_world, itself):
    """With the same routes: no token comes near a tie of its experts (here 1e-6)."""
    one, margins = small_runs.alone(itself, "llama", layers=LAYERS, **EXPERTS), []

    def keep(layer, arguments):
        x = arguments[0].detach().flatten(0, 1)
        first, second = (x @ layer.router.detach().t()).topk(EXPERTS["moe_router_topk"] + 1).values[:, -2:].unbind(1)
        margins.append(float((first - second).min()))

    for layer in one.model.layers:
        layer.mlp.register_forward_pre_hook(keep)
    truth = small_runs.steps_of(one, 20)
    assert len(margins) == 20 * 4 * LAYERS and min(margins) > 1e-6
    with Communicator(mpi_world) as world:
        for made, case in layouts(world, **EXPERTS):
            small_runs.require_steps(made, truth, case)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.sizes(2)  # its layouts of four ranks take a minute; test_steps_in_float64 has one of each kind
def test_losses_in_float32(mpi_world, itself):
    options = {"dtype": torch.float32, **EXPERTS}
    whole = small_runs.alone(itself, "llama", layers=LAYERS, **options)
    expected = [whole.step().loss for _ in range(20)]
    with Communicator(mpi_world) as world:
        for made, case in layouts(world, **options):
            assert [made.step().loss for _ in range(20)] == pytest.approx(expected, rel=1e-5), case


def expert_trainer(world, *, config=small_runs.CONFIG, expert=2, **options):
    grid = ProcessGrid(world, expert=expert)
    return small_runs.trainer("llama", grid, config=config, layers=LAYERS, **EXPERTS, **options)


def test_a_flipped_bit_of_an_expert_is_found_among_those_who_hold_it(mpi_world):
    with Communicator(mpi_world) as world:
        made = expert_trainer(world)
        for _ in range(2):
            made.step()
        assert difference(made) is None
        name, parameter = next((n, p) for n, p in made.model.named_parameters() if ".experts." in n)
        holders = made.grid.expert_replicas
        if world.rank == world.size - 1:
            parameter.detach().view(-1).view(torch.int64)[1] ^= 1 << 5
        found = difference(made)
        if world.size == 2 or world.rank % 2 == 0:
            assert found is None and holders.size == world.size // 2  # the other expert's ranks are equal
        else:
            assert found is not None and found.startswith(f"{name} ") and "rank 1 and rank 3" in found
        made.close()


def test_a_batch_that_one_rank_cannot_use_ends_an_evaluation_on_all(mpi_world):
    """The others would wait for its tokens."""

    class Unusable(small_runs.Batches):
        unusable = "a token that is none"

        def __len__(self):
            return 3

        def __call__(self, k):
            for number, batch in enumerate(super().__call__(k)):
                yield replace(batch, usable=not (k == number == 1 and self.data.rank == self.data.size - 1))

    with Communicator(mpi_world) as world:
        made = expert_trainer(world, expert=world.size)
        batches = Unusable("llama", made.grid.data, micro=1)
        arguments = (made.model, small_runs.Losses("llama"), batches, made.grid)
        assert evaluate(*arguments, iterations=1)["loss"].items > 0
        passed = []
        with pytest.raises(UsageError, match="a token that is none"):
            evaluate(*arguments, iterations=3, between=lambda: passed.append(world.barrier()))
        assert len(passed) == 3
        made.close()


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("share", [False, True], ids=["whole experts", "over tensor groups"])
def test_bytes_of_a_ranks_experts_are_the_formulas(mpi_world, sharded, half, share):
    """Parameters, gradients and AdamW's state, counted, to 2%."""
    with Communicator(mpi_world) as world:
        tensor, expert = (2, world.size // 2) if share else (1, 2)
        config = replace(small_runs.CONFIG, use_distributed_optimizer=sharded, bf16=half, ddp_bucket_size=100_000)
        wide = EXPERTS | {"moe_ffn_hidden_size": 512}
        made = small_runs.trainer(
            "llama", ProcessGrid(world, tensor=tensor, expert=expert), config=config, layers=LAYERS,
            dtype=torch.bfloat16 if half else torch.float32, **wide,
        )  # fmt: skip
        made.step()
        shape = made.model.config.cost_shape(small_runs.S, 1)
        kept = formulas.KeptTensors(element_bytes=2 if half else 4, zero1=sharded)
        planned = formulas.training_bytes(shape, 2, tensor, world.size // tensor, kept, expert=expert)
        counted = {True: 0.0, False: 0.0}
        for bucket, owner in zip(made.gradients.buckets, made.optimizer._owners, strict=True):
            held = [*bucket.layout.names, *([bucket.gradients] if bucket.gradients is not None else [])]
            held += [p.grad for p in bucket.layout.names if bucket.gradients is None]
            held += [moment for one in owner.updated for moment in one.moments.values()]
            held += [one.values for one in owner.updated] if half else []
            counted[bucket.segments[0].treatment.expert] += sum(one.numel() * one.element_size() for one in held)
        of_experts, others = planned["experts and their optimizer"], planned["parameters and optimizer"]
        if expert == 1:  # gradients of experts lie with the others
            assert counted[True] == 0
            assert of_experts + others == pytest.approx(counted[False], rel=0.02)
        else:
            assert of_experts == pytest.approx(counted[True], rel=0.02)
            assert others == pytest.approx(counted[False], rel=0.2)  # small, and padded
        made.close()


def test_a_grid_with_expert_groups_needs_a_model_with_them(mpi_world):
    with Communicator(mpi_world) as world, ProcessGrid(world, expert=2) as grid:
        with pytest.raises(CollectiveError, match=r"without an expert group knows the axes .* has expert, too"):
            small_runs.trainer("llama", grid, layers=1)
        made = small_runs.made("llama", grid.tensor, num_layers=1, expert_group=grid.expert, **EXPERTS)
        with pytest.raises(ValueError, match="experts over an expert group: GradientBuckets needs experts="):
            GradientBuckets(made, grid.data, overlap=False, bucket_size=100)
