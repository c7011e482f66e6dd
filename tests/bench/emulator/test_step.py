"""The emulated cluster runs real programs, and its times are those that links and device say: exactly, and again."""

from dataclasses import replace
from itertools import pairwise

import pytest

from bench.emulator.machine import EmulatedMachine, Wire
from trainers.tasks.kinds import task_of

ALPHA, BETA = 1e-3, 1e-9


def plain(ranks, **changed):
    drawn = EmulatedMachine.drawn(0, 1, ranks)
    return replace(
        drawn, **{"flops": 1e10, "half_flops": 0.0, "memory_rate": 1e15, "launch": 0.0, "speed": (1.0,) * ranks,
        "noise": 0.0, "inside": Wire(ALPHA, BETA), "jitter": 0.0, "contention": 0.0, "short": 0, **changed},
    )  # fmt: skip


def small(**options):
    from trainers.settings.commands import GPTSettings

    return GPTSettings(
        num_layers=2, hidden_size=128, num_attention_heads=4, seq_length=64, vocab_size=512, mock_data=True,
        micro_batch_size=2, hidden_dropout=0.0, attention_dropout=0.0, **options,
    )  # fmt: skip


@pytest.mark.mpi(min_size=2)
def test_a_collective_takes_what_its_ring_takes_beside_what_is_computed(mpi_world):
    import torch

    from bench.emulator.rank import emulated
    from bench.emulator.step import cluster
    from commengine import Communicator

    tensor = torch.full((1 << 20,), float(mpi_world.rank))
    ring = 2 * (mpi_world.size - 1) * (ALPHA + 4 * (1 << 20) * BETA / mpi_world.size)
    with (
        Communicator(mpi_world, device="cpu") as world,
        Communicator(mpi_world, device="cpu") as used,
        cluster(world, plain(world.size)) as rank,
    ):
        stream = used.new_stream()
        with emulated(rank, used), rank.emulating(world):
            moments = [rank.now()]
            used.all_reduce(tensor)
            moments.append(rank.now())
            for before, beside in ((0.05, ring / 2), (0.01, 2 * ring)):
                rank.device.seconds += before
                work = used.all_reduce(tensor, stream=stream)
                rank.device.seconds += beside
                work.wait()
                moments.append(rank.now())
        used.all_reduce(tensor)  # the engine carries it again
    took = [after - before for before, after in pairwise(moments)]
    assert took == pytest.approx([ring, 0.05 + ring, 0.01 + 2 * ring])
    assert torch.equal(tensor, torch.full_like(tensor, world.size * (world.size - 1) / 2))


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_comes_late_delays_the_others_by_as_much(mpi_world):
    import torch

    from bench.emulator.rank import emulated
    from bench.emulator.step import cluster
    from commengine import Communicator

    with (
        Communicator(mpi_world, device="cpu") as world,
        cluster(world, plain(world.size)) as rank,
        emulated(rank, world),
        rank.emulating(world),
    ):
        began = rank.now()
        rank.device.seconds += 0.3 * (world.rank == 1)
        world.all_reduce(torch.empty(world.size))
        took = rank.now() - began
    ring = 2 * (world.size - 1) * (ALPHA + 4 * BETA)
    assert 0.3 + ALPHA * (world.size - 1) <= took <= 0.3 + ring + 1e-9


@pytest.mark.slow
@pytest.mark.mpi(min_size=2)
def test_a_step_of_the_real_trainer_takes_its_products_and_its_gradients(mpi_world):
    from bench.emulator.step import cluster, run_steps
    from commengine import Communicator
    from tplayers.formulas import model_flops, parameters

    with Communicator(mpi_world, device="cpu") as world, cluster(world, plain(world.size)) as rank:
        found = [step.seconds for step in run_steps(world, rank, small(), 1, 2)]
    shape = task_of(small()).model().cost_shape(64)
    products = model_flops(shape, 2) / 1e10
    gradients = 2 * (world.size - 1) / world.size * 4 * parameters(shape) * BETA
    # The masked half of attention's scores is not computed. Beside the gradients some small collectives run.
    attention = 2 * 12 * 2 * 64 * 64 * 128 / 1e10 / 2
    least = products - attention + gradients
    assert len(found) == 2 and least <= min(found) and max(found) <= least + 30 * world.size * ALPHA


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "options",
    [
        {"tensor_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"use_distributed_optimizer": True},
        {"overlap_grad_reduce": True},
        {"pipeline_model_parallel_size": 2, "global_batch_size": 8, "overlap_p2p_communication": True},
    ],
    ids=lambda one: "-".join(one),
)
def test_every_layout_runs_and_a_second_run_takes_the_same_time(mpi_world, options):
    from bench.emulator.step import cluster, run_steps
    from commengine import Communicator

    drawn = EmulatedMachine.drawn(3, 1, mpi_world.size)
    found = []
    with Communicator(mpi_world, device="cpu") as world:
        for seed in (0, 0, 1):
            with cluster(world, drawn, seed) as rank:
                found.append(run_steps(world, rank, small(**options), 1, 2))
    assert found[0] == found[1] != found[2]
    first, last = ([step.seconds for step in steps] for steps in (found[0], found[2]))
    assert first == pytest.approx(last, rel=0.1)


@pytest.mark.slow
@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, only=True)
def test_buckets_that_are_reduced_during_the_backward_save_time(mpi_world):
    from bench.emulator.step import cluster, run_steps
    from commengine import Communicator

    times = []
    with Communicator(mpi_world, device="cpu") as world:
        for overlap in (False, True):
            with cluster(world, plain(world.size, inside=Wire(1e-6, 1e-7))) as rank:
                (step,) = run_steps(world, rank, small(overlap_grad_reduce=overlap, ddp_bucket_size=50000), 1, 1)
                times.append(step.seconds)
    assert times[1] < 0.95 * times[0]


@pytest.mark.mpi(min_size=2)
def test_a_machine_of_other_ranks_is_an_error(mpi_world):
    from bench.emulator.step import cluster
    from commengine import Communicator, UsageError

    with (
        Communicator(mpi_world, device="cpu") as world,
        pytest.raises(UsageError, match=f"has 64 ranks, and the job {world.size}"),
        cluster(world, plain(64)),
    ):
        pass


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.mpi(min_size=2)
def test_a_prediction_from_measurements_meets_the_run(mpi_world, tmp_path):
    """All that bench.emulator does, on one node of these ranks."""
    from bench.emulator.job import everything
    from bench.emulator.layouts import LayoutRun, settings
    from bench.emulator.predicting import predict, write_cluster
    from bench.emulator.step import cluster, run_steps
    from commengine import Communicator

    machine = EmulatedMachine.drawn(5, 1, mpi_world.size)
    model = {"num_layers": 2, "micro_batch_size": 2}
    runs = [
        LayoutRun("data", mpi_world.size, model),
        LayoutRun("tensor", mpi_world.size, {"tensor_model_parallel_size": mpi_world.size, **model}),
    ]
    with Communicator(mpi_world, device="cpu") as world:
        with cluster(world, machine, seed=1) as rank:
            found = everything(world, rank, [1], settings(**model))
        measured = []
        for run in runs:
            with cluster(world, machine, seed=2) as rank:
                (step,) = run_steps(world, rank, run.config(), 1, 1)
                measured.append(step.seconds)
    if mpi_world.rank == 0:
        made = write_cluster(tmp_path, "here", found, settings(**model), mpi_world.size)
        predicted = [predict(made, run, tmp_path / "step.json") for run in runs]
        assert predicted == pytest.approx(measured, rel=0.1)


@pytest.mark.mpi(min_size=2)
def test_a_message_takes_its_link_while_its_sender_goes_on(mpi_world):
    """A receive waits for the message; the second message of a sender waits for its port."""
    import torch

    from bench.emulator.rank import emulated
    from bench.emulator.step import cluster
    from commengine import Communicator

    tensor, took = torch.empty(1 << 18), []
    one = ALPHA + tensor.nbytes * BETA
    with (
        Communicator(mpi_world, device="cpu") as world,
        cluster(world, plain(world.size)) as rank,
    ):
        stream = world.new_stream()
        with emulated(rank, world), rank.emulating(world):
            began = rank.now()
            if world.rank == 0:
                works = [world.send(tensor, 1, stream=stream) for _ in range(2)]
                rank.device.seconds += 0.001
                for work in works:
                    work.wait()
                took.append(rank.now() - began)
            elif world.rank == 1:
                rank.device.seconds += 0.0005
                for _ in range(2):
                    world.recv(torch.empty_like(tensor), 0, stream=stream).wait()
                    took.append(rank.now() - began)
    if world.rank == 0:
        assert took == [pytest.approx(0.001)]
    elif world.rank == 1:
        assert took == [pytest.approx(one), pytest.approx(one + tensor.nbytes * BETA)]


@pytest.mark.slow
@pytest.mark.mpi(min_size=2)
def test_a_ring_of_keys_and_values_is_hidden_where_the_link_lets_it_be(mpi_world):
    """An all-to-all is not: the same count finds all of its seconds among those in which no rank computes."""
    from bench.emulator.step import cluster, run_steps
    from commengine import Communicator
    from tplayers import formulas

    wire, ranks = Wire(1e-7, 2e-9), mpi_world.size
    options = {"num_layers": 2, "seq_length": 2048, "micro_batch_size": 1, "overlap_p2p_communication": True}
    shares = {}
    with Communicator(mpi_world, device="cpu") as world:
        for way, method in (("p2p", "ring"), ("a2a", "ulysses")):
            config = replace(small(), **options, context_parallel_size=ranks, cp_comm_type=way)
            with cluster(world, plain(ranks, inside=wire)) as rank:
                (step,) = run_steps(world, rank, config, 0, 1)
            shape = task_of(config).model().cost_shape(2048)
            run = formulas.context_collectives(shape, 1, 1, ranks, method, element_bytes=4)
            factors = {"all_to_all": (ranks - 1) / ranks, "sendrecv": 1.0}
            sent = sum(one.count * one.size * factors[one.operation] for one in run) * wire.beta
            shares[way] = 1 - max(step.waits) * step.seconds / sent
    assert shares["p2p"] > 0.8, shares
    assert shares["a2a"] < 0.1, shares


@pytest.mark.long
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("chunks", [1, 2])
def test_the_bubble_of_a_pass_is_that_of_the_formula(mpi_world, chunks):
    """Equal stages, messages that take next to nothing. The real schedule waits as Narayanan et al. say."""
    from bench.emulator.step import cluster, run_steps
    from commengine import Communicator
    from tplayers import formulas

    layers, microbatches = 2 * mpi_world.size, 4
    options = {
        "num_layers": layers, "pipeline_model_parallel_size": mpi_world.size, "global_batch_size": 2 * microbatches,
        "overlap_p2p_communication": True, "vocab_size": 8, "make_vocab_size_divisible_by": 8,
    } | ({"num_layers_per_virtual_pipeline_stage": 1} if chunks > 1 else {})  # fmt: skip
    with (
        Communicator(mpi_world, device="cpu") as world,
        cluster(world, plain(world.size, inside=Wire(1e-7, 1e-13))) as rank,
    ):
        (step,) = run_steps(world, rank, replace(small(), **options), 0, 1)
    free = formulas.bubble(mpi_world.size, microbatches, chunks)
    assert step.waits == pytest.approx([free / (1 + free)] * mpi_world.size, abs=0.03)
