"""The norm of gradients: in stretches on the host, whole on a device, and accurate on both.

Drawn ones have other shapes, orders in memory, dtypes and values, and go each way to a norm, on two ranks.
"""

import math
import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from commengine import ProcessGrid
from tplayers import Placement, add_parameter, placements
from trainers.data_parallel import DataParallel
from trainers.training.clipping import PIECE, STRETCH, exact_gradient_norm, gradient_norm, sum_of_squares
from trainers.training.layout import Treatment
from trainers.training.reduction import GradientBuckets, GradientSegment

ALONE = SimpleNamespace(all_reduce=lambda tensor, op="sum": None)
MILLION = 10**6
KINDS = ("matrix", "transposed", "embedding", "convolution", "channels last", "flat", "permuted")


def flat(*tensors):
    """Stretches of flat buffers, every second one of parameters that are split."""
    return [GradientSegment(Treatment(True, n % 2 == 1, False), stretch=one) for n, one in enumerate(tensors)]


def test_parts_of_any_layout_and_dtype_are_those_of_float64():
    """Equal numbers too, of which rounding has one direction."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape, dtype=torch.float32):
        return torch.randn(shape, dtype=dtype, generator=generator)

    every = [
        drawn(), drawn(0), drawn(STRETCH - 1), drawn(STRETCH), drawn(3, STRETCH, 7).permute(2, 0, 1),
        drawn(999, 777).t(), drawn(1000, 1000)[:, ::3], drawn(7).expand(1000, 7), drawn(PIECE + 5),
        drawn(64, 32, 3, 3).contiguous(memory_format=torch.channels_last),
        drawn(999, 77, dtype=torch.complex64).conj().t(), drawn(999, 77, dtype=torch.float64),
        drawn(999, 77).half(), drawn(999, 77).bfloat16(),
        torch.full((1024, 1024), 0.1), torch.full((STRETCH - 1,), 0.7),
    ]  # fmt: skip
    expected = [float(one.abs().double().square().sum()) for one in every]
    for one, square in zip(every, expected, strict=True):
        assert float(sum_of_squares([one])) == pytest.approx(square, rel=1e-6)
    found = sum_of_squares(every)
    assert found.dtype == torch.float64 and float(found) == pytest.approx(sum(expected), rel=1e-6)


def assert_accurate(device):
    """Of equal numbers rounding has one direction, and adds up; a float32 sum of 2**25 of them would be wrong."""
    count = 2**25
    found = gradient_norm(flat(torch.full((count,), 0.1, device=device), torch.full((7,), 0.1, device=device)), ALONE)
    assert found == pytest.approx(math.sqrt((count + 7) * float(torch.tensor(0.1)) ** 2), rel=1e-6)


def test_the_norm_is_accurate_on_the_host():
    assert_accurate("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device, or not asked for with -m gpu")
def test_the_norm_is_accurate_on_a_device():
    assert_accurate("cuda")


class Copies(TorchFunctionMode):
    count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.Tensor.cpu
        return function(*args, **(kwargs or {}))


def test_the_sums_of_both_kinds_are_read_from_the_device_at_once():
    with Copies() as copies:
        assert gradient_norm(flat(torch.tensor([3.0]), torch.tensor([4.0])), ALONE) == 5.0
    assert copies.count == 1
    assert gradient_norm([], ALONE) == 0.0


def test_the_exact_norm_is_that_of_float64_however_the_gradient_is_cut():
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-30, 1e-3, 1.0, 1e30):
        whole = torch.randn(100_003, generator=generator) ** 3 * scale
        right = float(torch.linalg.vector_norm(whole.double()))
        found = {
            exact_gradient_norm(flat(*torch.split(whole[torch.randperm(len(whole), generator=generator)], size)), ALONE)
            for size in (len(whole), 32768, 999, 50_001)
        }
        assert len(found) == 1 and found.pop() == pytest.approx(right, rel=1e-9)


def test_the_exact_norm_of_special_gradients():
    zeros, one = torch.zeros(5), torch.tensor([3.0, 0.0])
    assert exact_gradient_norm(flat(zeros, zeros), ALONE) == 0 and exact_gradient_norm([], ALONE) == 0
    assert exact_gradient_norm(flat(one, torch.tensor([4.0])), ALONE) == 5
    for bad in (math.nan, math.inf, -math.inf):
        assert exact_gradient_norm(flat(one, torch.tensor([bad])), ALONE) == math.inf
    tiny = torch.tensor([1e-44, 0.0])
    assert exact_gradient_norm(flat(tiny), ALONE) == float(tiny[0])


# Drawn gradients ----------------------------------------------------------------------------------------------------


def drawn_gradient(draws: random.Random, kind: str, elements: int, seed: int) -> torch.Tensor:
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
            gradients = {
                "weight": drawn_gradient(draws, kind, elements, seed),
                "bias": drawn_gradient(draws, "flat", 1000, number),
            }
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


@pytest.mark.mpi
def test_norms_of_a_few_are_those_of_float64(world):
    for number in range(len(KINDS)):
        assert_right(world, number, 3 * MILLION)


@pytest.mark.mpi
@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", range(50))
def test_norms_are_those_of_float64(world, number):
    assert_right(world, 100 + number, 80 * MILLION)


@pytest.mark.mpi
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
