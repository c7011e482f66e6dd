"""The scale of an fp16 loss: its transitions, and that an overflow on one rank is a step skipped by all."""

import pytest
import torch

from commengine import UsageError
from tests.support.training.states import local_state
from trainers.training.precision import LossScaler

GOOD, BAD = False, True
TABLE = {  # settings; what happens, and the scale after it
    "each overflow halves": (
        {"scale": 16.0, "hysteresis": 1, "window": 3},
        [(BAD, 8.0), (BAD, 4.0), (GOOD, 4.0), (BAD, 2.0)],
    ),
    "a window of good steps doubles": (
        {"scale": 16.0, "hysteresis": 1, "window": 3},
        [(GOOD, 16.0), (GOOD, 16.0), (GOOD, 32.0), (GOOD, 32.0), (GOOD, 32.0), (GOOD, 64.0)],
    ),
    "an overflow starts the window again": (
        {"scale": 16.0, "hysteresis": 1, "window": 3},
        [(GOOD, 16.0), (GOOD, 16.0), (BAD, 8.0), (GOOD, 8.0), (GOOD, 8.0), (GOOD, 16.0)],
    ),
    "the first overflow is forgiven, also after good steps": (
        {"scale": 16.0, "hysteresis": 2, "window": 3},
        [(BAD, 16.0), (GOOD, 16.0), (BAD, 8.0), (BAD, 4.0)],
    ),
    "growth restores the hysteresis": (
        {"scale": 16.0, "hysteresis": 2, "window": 2},
        [(BAD, 16.0), (BAD, 8.0), (GOOD, 8.0), (GOOD, 16.0), (BAD, 16.0), (BAD, 8.0)],
    ),
    "a forgiven overflow starts the window again": (
        {"scale": 16.0, "hysteresis": 3, "window": 2},
        [(GOOD, 16.0), (BAD, 16.0), (GOOD, 16.0), (BAD, 16.0), (BAD, 8.0)],
    ),
    "not below the minimum": (
        {"scale": 6.0, "hysteresis": 1, "window": 9, "minimum": 2.0},
        [(BAD, 3.0), (BAD, 2.0), (GOOD, 2.0)],
    ),
    "a constant one": ({"scale": 5.0, "window": None}, [(BAD, 5.0), (GOOD, 5.0), (BAD, 5.0), (BAD, 5.0)]),
}


@pytest.mark.parametrize("case", TABLE)
def test_transitions(case):
    """Also from a state that went through JSON in between."""
    settings, events = TABLE[case]
    scaler, reloaded = LossScaler(**settings), LossScaler(**settings)
    for overflow, scale in events:
        scaler = scaler.after(overflow=overflow)
        reloaded = LossScaler(**settings).from_json(reloaded.after(overflow=overflow).to_json())
        assert scaler.scale == reloaded.scale == scale


def test_an_overflow_at_the_minimum_is_an_error():
    scaler = LossScaler(2.0, hysteresis=2, minimum=1.0).after(overflow=True).after(overflow=True)
    assert scaler.scale == 1.0
    with pytest.raises(UsageError, match=r"loss scale of 1, and --min-loss-scale 1 .*--bf16"):
        scaler.after(overflow=True)


def snapshot(trainer):
    """Copies of all that a skipped step must leave alone, on this rank."""
    parameters = [p.detach().clone() for p in trainer.model.parameters()]
    kept = [tensor.detach().clone() for _, tensor in local_state(trainer.optimizer)]
    steps = [state["step"].clone() for adamw in trainer.optimizer._steps for state in adamw.state.values()]
    return [*parameters, *kept, *steps, torch.tensor(trainer.optimizer.updates)]


def poisoned(trainer, name, rank, value):
    """A step in which ``rank``'s gradient of one element is ``value``: as if it had overflowed there alone."""

    def poison(grad):
        grad = grad.clone()
        grad.view(-1)[-1] = value
        return grad

    hook = None
    if trainer.grid.world.rank == rank:
        hook = dict(trainer.model.named_parameters())[name].register_hook(poison)
    step = trainer.step()
    if hook is not None:
        hook.remove()
    trainer.optimizer.wait_for_parameters()
    return step


@pytest.mark.mpi
@pytest.mark.every_size
@pytest.mark.parametrize("mode", [{}, {"use_distributed_optimizer": True, "overlap_grad_reduce": True}])
@pytest.mark.parametrize(("hysteresis", "scales"), [(1, [512.0, 256.0]), (2, [1024.0, 512.0])])
def test_an_overflow_on_one_rank_of_a_tensor_group_is_skipped_by_all(world, trainer, mode, hysteresis, scales):
    """Nothing changes but the scale, in every bit; of a replicated parameter the others see nothing themselves."""
    settings = {"fp16": True, "initial_loss_scale": 1024.0, "hysteresis": hysteresis, "lr_warmup_iters": 10, **mode}
    made = trainer(world, tensor_model_parallel_size=min(world.size, 2), **settings)
    made.step()
    made.optimizer.wait_for_parameters()
    before = snapshot(made)
    rates = []
    for number, (name, value) in enumerate([("final_norm.bias", float("inf")), ("embedding.weight", float("nan"))]):
        step = poisoned(made, name, world.size - 1, value)
        assert step.skipped and made.iteration == 2 + number and made.skipped == 1 + number
        assert made.loss_scale == scales[number]
        assert all(torch.equal(one, other) for one, other in zip(snapshot(made), before, strict=True))
        rates.append(step.rate)
    step = made.step()
    assert not step.skipped and step.rate == rates[0] == rates[1] == pytest.approx(1e-2 * 2 / 10)
    after = snapshot(made)
    assert not any(torch.equal(one, other) for one, other in zip(after[-3:], before[-3:], strict=True))
    assert made.optimizer.updates == 2 and made.skipped == 2


@pytest.mark.mpi
def test_an_overflow_at_the_minimum_ends_all_ranks(world, trainer):
    made = trainer(world, fp16=True, initial_loss_scale=4.0, min_loss_scale=4.0, hysteresis=1)
    with pytest.raises(UsageError, match="--min-loss-scale 4 "):
        poisoned(made, "embedding.weight", world.size - 1, float("inf"))


@pytest.mark.mpi
def test_a_constant_scale_skips_and_stays(world, trainer):
    made = trainer(world, fp16=True, loss_scale=768.0)
    for value, skipped in ((float("inf"), True), (0.0, False), (float("inf"), True)):
        assert poisoned(made, "final_norm.bias", 0, value).skipped is skipped
    assert made.loss_scale == 768.0 and made.optimizer.updates == 1
