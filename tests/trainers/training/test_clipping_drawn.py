"""The norms of drawn gradients against float64: shapes, orders in memory, dtypes, values; by each way to a norm."""

import math
import random

import pytest
import torch
from torch import nn

from commengine import ProcessGrid
from tplayers import Placement, add_parameter, placements
from trainers.data_parallel import DataParallel
from trainers.training.clipping import gradient_norm
from trainers.training.layout import Treatment
from trainers.training.reduction import GradientBuckets, GradientSegment

pytestmark = pytest.mark.mpi

MILLION = 10**6
KINDS = ("matrix", "transposed", "embedding", "convolution", "channels last", "flat", "permuted")


def drawn(draws: random.Random, kind: str, elements: int, seed: int) -> torch.Tensor:
    """A gradient of about as many elements. Of equal ones all roundings have one direction."""
    width = draws.choice([16, 96, 768, 1600])
    rows = 2 * max(elements // width // 2, 1)
    shape = {"flat": (rows * width,), "permuted": (rows, 8, width // 8)}.get(kind, (rows, width))
    if kind in ("convolution", "channels last"):
        shape = (2 * max(elements // (9 * width) // 2, 1), width, 3, 3)
    values = draws.choice(["normal", "equal", "cubed"])
    generator = torch.Generator().manual_seed(seed)
    found = torch.full(shape, draws.uniform(0.01, 1)) if values == "equal" else torch.randn(shape, generator=generator)
    found = (found**3 if values == "cubed" else found).to(draws.choice([torch.float32] * 4 + [torch.bfloat16]))
    if kind == "channels last":
        return found.contiguous(memory_format=torch.channels_last)
    return {"transposed": found.t, "permuted": lambda: found.permute(2, 0, 1)}.get(kind, lambda: found)()


def squares(gradient: torch.Tensor) -> torch.Tensor:
    return sum(part.double().square().sum() for part in torch.split(gradient.reshape(-1), MILLION))


def assert_right(world, number: int, most: int) -> None:
    """By all ways, with a tensor group of one rank and of all. The parameter is split over it, its bias is not."""
    for tensor in sorted({1, world.size}):
        draws = random.Random(number)
        elements, kind = int(10 ** draws.uniform(3, math.log10(most))), KINDS[number % len(KINDS)]
        with ProcessGrid(world, tensor=tensor) as grid:
            seed = 1000 * number + grid.tensor.rank
            gradients = {"weight": drawn(draws, kind, elements, seed), "bias": drawn(draws, "flat", 1000, number)}
            module = nn.Module()
            for name, one in gradients.items():
                size = grid.tensor.size if name == "weight" else 1
                shape = (one.shape[0] * size, *one.shape[1:])
                split = {"dim": 0, "index": grid.tensor.rank, "count": size} if name == "weight" else {}
                add_parameter(module, name, Placement(shape, **split), one.dtype)
                setattr(module, name, nn.Parameter(torch.zeros_like(one)))  # with the gradient's order in memory
            named = dict(module.named_parameters())
            total = squares(gradients["weight"]).reshape(1)
            grid.tensor.all_reduce(total)
            expected = math.sqrt(float(total) + float(squares(gradients["bias"])))

            def backward() -> None:
                leaves = [p.view_as(p) for p in named.values()]  # noqa: B023
                torch.autograd.backward(leaves, [gradients[name] for name in named])  # noqa: B023

            placed = placements(module)
            for name, p in named.items():
                p.grad = gradients[name]
            segments = [GradientSegment(Treatment.of(placed[name]), p) for name, p in named.items()]
            found = {"clipping": gradient_norm(segments, grid.tensor)}
            module.zero_grad()
            with DataParallel(module, grid) as replicas:
                backward()
                found["DataParallel"] = replicas.clip(0.0)
            module.zero_grad()
            buckets = GradientBuckets(
                module, grid.data, overlap=False, bucket_size=4 * MILLION, tensor=grid.tensor, shard=True
            )
            buckets.zero()
            with buckets.last_microbatch():
                backward()
            buckets.finish()
            found["ZeRO-1"] = gradient_norm(buckets.segments, grid.tensor, [grid.data]) / grid.data.size
            buckets.remove()
            wrong = {way: norm / expected - 1 for way, norm in found.items() if abs(norm / expected - 1) > 1e-6}
            assert not wrong, (number, kind, elements, tensor, wrong)


def test_norms_of_a_few_are_those_of_float64(world):
    for number in range(len(KINDS)):
        assert_right(world, number, 3 * MILLION)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", range(50))
def test_norms_are_those_of_float64(world, number):
    assert_right(world, 100 + number, 80 * MILLION)


@pytest.mark.slow
def test_the_norm_of_a_step_is_the_same_at_every_layout(world, alone, trainer):
    """With a vocabulary of the usual size: its gradient is a long matrix, a part of it, or a stretch of a buffer."""
    if world.size != 2:
        pytest.skip("the layouts have two ranks")
    settings = {"num_layers": 2, "vocab_size": 51_200, "clip_grad": 1.0}
    expected = trainer(alone, **settings).step().norm
    layouts = {
        "TP 2": {"tensor_model_parallel_size": 2}, "PP 2": {"pipeline_model_parallel_size": 2}, "DP 2": {},
        "ZeRO-1": {"use_distributed_optimizer": True},
    }  # fmt: skip
    found = {name: trainer(world, **settings, **layout).step().norm for name, layout in layouts.items()}
    assert found == pytest.approx(dict.fromkeys(layouts, expected), rel=2e-6)
