"""torch's default device and dtype belong to the program: a step of training does not follow them."""

import pytest
import torch

from commengine import Communicator
from tests.support.device.torch_defaults import DEFAULTS, Explicit
from tests.support.small_models import KINDS, arguments, made, total

pytestmark = pytest.mark.mpi

SETTINGS = {
    "tensor, sequence, bf16": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "bf16": True},
    "data, ZeRO-1, overlap": {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "clip_grad": 1.0},
    "deterministic, dropout": {
        "deterministic": True,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        "clip_grad": 1.0,
    },
    "fp16": {"fp16": True, "initial_loss_scale": 256.0},
}
#: of SETTINGS, with the ranks that each needs
CASES = [
    pytest.param(one, id=name, marks=pytest.mark.mpi(min_size=one.get("tensor_model_parallel_size", 1)))
    for name, one in SETTINGS.items()
]


@pytest.mark.some(2)
@pytest.mark.slow
@pytest.mark.parametrize("settings", CASES)
def test_a_step_does_not_follow_torchs_defaults(trainer, world, settings):
    """The parameters are made before a program sets its defaults, because layers' parameters follow them."""
    losses = {}
    for name in ("", *DEFAULTS):
        one = trainer(world, **settings)
        if not name:
            losses[name] = [one.step().losses for _ in range(2)]
            continue
        with DEFAULTS[name]():
            losses[name] = [one.step().losses for _ in range(2)]
    assert all(found == losses[""] for found in losses.values())


@pytest.mark.parametrize("kind", KINDS)
def test_layers_make_nothing_of_torchs_defaults(mpi_world, kind):
    found = {}
    with Communicator(mpi_world, device="cpu") as comm:
        for name, mode in {"": None, "explicit": Explicit, "dtype": DEFAULTS["dtype"]}.items():
            positional, named = arguments(kind)
            if name == "explicit":
                with mode():
                    model = made(kind, comm, dtype=torch.float32)
                    total(model(*positional, **named)).backward()
            else:
                model = made(kind, comm, dtype=torch.float32)
                with mode() if mode else torch.enable_grad():
                    total(model(*positional, **named)).backward()
            found[name] = [parameter.grad for parameter in model.parameters()]
    for grads in found.values():
        assert all(torch.equal(one, other) for one, other in zip(grads, found[""], strict=True))
