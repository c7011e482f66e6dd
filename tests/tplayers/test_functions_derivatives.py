"""Second derivatives of all that tplayers exports: the truth of finite differences, or an error that names them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import tplayers
from commengine import CartesianGrid, Communicator
from tests.support.small_models import S as TOKENS
from tests.support.small_models import arguments, block, made, total
from tests.tplayers.conftest import Group
from tplayers.fields import replicated

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2)]

B, S, H, HEADS, VOCAB = 2, 8, 8, 4, 16
F64 = torch.float64
#: what tplayers exports and cannot be differentiated: settings, plans, records, and what returns no derivative
NO_FUNCTIONS = {
    "ModelPart", "StageInput", "whole_placements", "BERTConfig", "Bridge", "BridgeField", "CanonicalShards", "Constant",
    "ContextGroup", "ContextMethod", "DropoutMask", "T5Config", "ExpertOptions", "GPTConfig", "Gelu", "KeyValueCache",
    "NormPlacement", "Normal", "Normalization", "Placement", "PositionEmbedding", "Randomness", "Recompute",
    "RopeScaling", "RouterLosses", "Sampling", "StartedTransfer", "TransferPlan", "TransformerConfig", "add_parameter",
    "all_reduce_together", "generate", "halo_plan", "initialize", "kept_output", "placements", "plan_halo",
    "repartition_plan", "require_divisible", "set_randomness", "shard", "sum_partial_gradients", "use_canonical_shards",
    "vocab_parallel_argmax",
}  # fmt: skip


@dataclass
class Case:
    """``value`` gives this rank's tensors from ``inputs``. together: the ranks' losses are terms of one sum.

    parts: the inputs are parts of something, of which each rank has its own. terms: the numbers of the results of which
    what the ranks compute are terms of a sum: parts, or whole activations in a parallel region.
    """

    value: Callable[..., Any]
    inputs: list[Tensor] = field(default_factory=list)
    module: nn.Module = field(default_factory=nn.Module)
    together: bool = False
    parts: bool = False
    terms: tuple[int, ...] = ()


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def of_layer(module: nn.Module, *inputs: Tensor, parts: bool = False, terms: Any = (), **more: Any) -> Case:
    return Case(lambda *x: module(*x, **more), list(inputs), module, parts=parts, terms=terms)


def of_field(make: Callable[..., nn.Module], channels: int = 2, axes: int = 2) -> Callable[[Communicator], Case]:
    def case(comm: Communicator) -> Case:
        grid = CartesianGrid(comm, (comm.size, 1)[:axes])
        whole = grid.decompose((4 * comm.size, 4)[:axes])
        module = make(grid, whole)
        x = draw(B, channels, *whole.local_shape(grid.coords), seed=comm.rank)
        return Case(module, [x], module if isinstance(module, nn.Module) else nn.Module(), together=True)

    return case


def dropping(grid: CartesianGrid, whole: Any) -> nn.Module:
    layer = tplayers.FieldDropout(0.3, grid, whole)
    tplayers.set_randomness(layer, RANDOMNESS)
    return layer


def small_network() -> nn.Module:
    """Of a layer of each kind that `tplayers.shard` makes: of points that are split, and of tensors of every rank."""
    torch.manual_seed(1)
    pooled = [nn.AdaptiveAvgPool2d(1), nn.Conv2d(2, 3, 1), nn.Tanh(), nn.Flatten(), nn.Linear(3, 2)]
    return nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Sigmoid(), nn.GroupNorm(1, 2), *pooled).double()


def of_operator(function: Callable[..., Tensor], *shape: int) -> Callable[[Communicator], Case]:
    return lambda comm: Case(lambda x: function(x, comm), [draw(*shape, seed=comm.rank)], together=True)


def of_region(function: Callable[..., Tensor], *, parts: bool, terms: bool) -> Callable[[Communicator], Case]:
    def case(comm: Communicator) -> Case:
        x = draw(4, 3, seed=comm.rank * parts)
        along = (0,) if "dim" in function.__code__.co_varnames else ()
        return Case(lambda x: function(x, comm, *along), [x], parts=parts, terms=(0,) * terms)

    return case


def of_model(kind: str, **options: Any) -> Callable[[Communicator], Case]:
    def case(comm: Communicator) -> Case:
        model = made(kind, comm, dtype=F64, num_layers=1, hidden_dropout=0.1, attention_dropout=0.1, **options)
        inputs, named = arguments(kind)
        return Case(lambda: total(model(*inputs, **named)), module=model)

    return case


def of_canonical(kind: str, **options: Any) -> Callable[[Communicator], Case]:
    def case(comm: Communicator) -> Case:
        found = of_model(kind, **options)(comm)
        tplayers.use_canonical_shards(found.module, comm, 4)
        return found

    return case


def of_task(make: Callable[..., nn.Module], *shape: int) -> Callable[[Communicator], Case]:
    def case(comm: Communicator) -> Case:
        config = tplayers.BERTConfig(1, 16, HEADS, 13, TOKENS, make_vocab_size_divisible_by=16)
        model = make(config, comm, dtype=F64)
        tokens = torch.randint(13, shape, generator=torch.Generator().manual_seed(0))
        randomness = arguments("bert")[1]["randomness"]
        return Case(lambda: not_fused(model)(tokens, randomness=randomness), module=model.eval())

    return case


def cross_entropy(comm: Communicator) -> Case:
    target = torch.tensor([3, -100, 0, 15])
    return Case(
        lambda x: tplayers.vocab_parallel_cross_entropy(1.0 * x, target, comm, overwrite=True),
        [draw(4, VOCAB // comm.size, seed=comm.rank)], parts=True,
    )  # fmt: skip


def distillation(comm: Communicator) -> Case:
    teacher = draw(4, VOCAB // comm.size, seed=10 + comm.rank)
    return Case(
        lambda x: tplayers.vocab_parallel_distillation_loss(x, teacher, comm, temperature=2.0),
        [draw(4, VOCAB // comm.size, seed=comm.rank)], parts=True,
    )  # fmt: skip


def t5(comm: Communicator, **options: Any) -> tplayers.T5:
    config = tplayers.T5Config(
        1, H, HEADS, 13, make_vocab_size_divisible_by=16, hidden_dropout=0.1, attention_dropout=0.1,
        relative_attention_num_buckets=4, relative_attention_max_distance=4, **options,
    )  # fmt: skip
    return tplayers.T5(config, comm, dtype=F64)


def of_t5(**options: Any) -> Callable[[Communicator], Case]:
    def case(comm: Communicator) -> Case:
        model = t5(comm, **options)
        tokens, shifted, labels = torch.randint(13, (3, B, S), generator=torch.Generator().manual_seed(0))
        return Case(lambda: model(tokens, shifted, labels, randomness=RANDOMNESS), module=model)

    return case


def t5_block(comm: Communicator) -> Case:
    layer: Any = t5(comm).layers[1]
    return Case(lambda x, source: layer(x, torch.zeros(1, 1, S, S, dtype=F64), source, None, RANDOMNESS),
                [draw(*X), draw(*X, seed=1)], layer)  # fmt: skip


def relative_bias(comm: Communicator) -> Case:
    table = t5(comm).encoder_bias
    return Case(lambda: table(range(2, 5), 6, table.weight), module=table, terms=(0,))


def embedding(comm: Communicator) -> Case:
    table = tplayers.VocabParallelEmbedding(VOCAB, H, comm, dtype=F64)
    tokens = torch.tensor([[1, 5], [15, 1]])
    return Case(lambda x: (table(tokens), table.logits(x)), [draw(3, H)], table, terms=(1,))


def shared(comm: Communicator) -> Case:
    module = nn.Module()
    module.weight = nn.Parameter(draw(3))
    return Case(lambda: replicated(comm, module.weight), module=module, together=True)


def started(comm: Communicator) -> Case:
    grid = CartesianGrid(comm, (comm.size,))
    whole, stream = grid.decompose((3 * comm.size,)), comm.new_stream()

    def value(x: Tensor) -> Tensor:
        return tplayers.start_transfer(x, tplayers.plan_halo(grid, whole, 1), comm, stream).wait()

    return Case(value, [draw(2, 3, seed=comm.rank)], together=True)


def of_grid(function: Callable[..., Tensor], points: int = 3) -> Callable[[Communicator], Case]:
    def case(comm: Communicator) -> Case:
        grid = CartesianGrid(comm, (comm.size,))
        whole = grid.decompose((3 * comm.size,))
        return Case(lambda x: function(x, grid, whole), [draw(2, points, seed=comm.rank)], together=True)

    return case


def plan_of(grid: CartesianGrid, whole: Any) -> Any:
    return tplayers.plan_halo(grid, whole, 1)


def unfused(comm: Communicator) -> Case:
    """The fused kernel of torch on the host has no second derivative, and its plain one has."""
    layer = tplayers.SelfAttention(H, HEADS, comm, causal=True, dtype=F64)
    return Case(not_fused(layer), [draw(*X)], layer)


def not_fused(function: Callable[..., Any]) -> Callable[..., Any]:
    def value(*args: Any, **named: Any) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            return function(*args, **named)

    return value


def turned(case: Case) -> Case:
    """With an input that is not contiguous."""
    value = case.value
    case.value = lambda x: value(x.transpose(0, 1))
    return case


def in_a_row(make: Callable[[Communicator], Case]) -> Callable[[Communicator], Case]:
    """The layer twice, so that its second input depends on the parameters of which it has the gradient."""

    def case(comm: Communicator) -> Case:
        found = make(comm)
        once = found.value
        found.value = lambda x: once(torch.sin(once(x)))
        return found

    return case


RANDOMNESS = tplayers.Randomness(5, 17, (1, 2))
X = (S, B, H)
#: the exported name (with a remark), and its case
CASES: dict[str, Callable[[Communicator], Case]] = {
    "LayerNorm": lambda comm: of_layer(tplayers.LayerNorm(H, dtype=F64), draw(*X)),
    "RMSNorm": lambda comm: of_layer(tplayers.RMSNorm(H, dtype=F64), draw(*X)),
    "ColumnParallelLinear": lambda comm: of_layer(
        tplayers.ColumnParallelLinear(H, 16, comm, dtype=F64), draw(*X), terms=(0,)
    ),
    "ColumnParallelLinear, a shard": lambda comm: of_layer(
        tplayers.ColumnParallelLinear(H, 16, comm, sequence_parallel=True, dtype=F64),
        draw(S // comm.size, B, H, seed=comm.rank), parts=True, terms=(0,),
    ),
    "ColumnParallelLinear, a turned shard": lambda comm: turned(
        of_layer(
            tplayers.ColumnParallelLinear(H, 16, comm, sequence_parallel=True, dtype=F64),
            draw(B, S // comm.size, H, seed=comm.rank), parts=True, terms=(0,),
        )
    ),
    "RowParallelLinear": lambda comm: of_layer(
        tplayers.RowParallelLinear(16, H, comm, dtype=F64), draw(S, B, 16 // comm.size, seed=comm.rank), parts=True
    ),
    "RowParallelLinear, a shard": lambda comm: of_layer(
        tplayers.RowParallelLinear(16, H, comm, sequence_parallel=True, dtype=F64),
        draw(S, B, 16 // comm.size, seed=comm.rank), parts=True, terms=(0,),
    ),
    "ReplicatedLinear": lambda comm: of_layer(tplayers.ReplicatedLinear(H, 5, dtype=F64), draw(*X)),
    "MLP": lambda comm: of_layer(tplayers.MLP(H, 16, comm, dtype=F64), draw(*X)),
    "MoE": lambda comm: of_layer(
        tplayers.MoE(H, tplayers.ExpertOptions(4, 2, 16, shared_expert_size=8), comm, dtype=F64), draw(*X)
    ),
    "SwiGLU": lambda comm: of_layer(tplayers.SwiGLU(H, 16, comm, dtype=F64), draw(*X)),
    "SelfAttention": lambda comm: of_layer(
        tplayers.SelfAttention(H, HEADS, comm, attention_dropout=0.1, dtype=F64), draw(*X), randomness=RANDOMNESS
    ),
    "SelfAttention, fused": lambda comm: of_layer(tplayers.SelfAttention(H, HEADS, comm, dtype=F64), draw(*X)),
    "SelfAttention, not fused": unfused,
    "SelfAttention, two heads of keys": lambda comm: of_layer(
        tplayers.SelfAttention(H, HEADS, comm, query_groups=2, attention_dropout=0.1, recompute_core=True, dtype=F64),
        draw(*X), randomness=RANDOMNESS,
    ),
    "TransformerBlock": lambda comm: of_layer(
        block(comm, H, HEADS, 16, attention_dropout=0.1, dtype=F64), draw(*X), randomness=RANDOMNESS
    ),
    "TransformerBlock, recomputed": lambda comm: of_layer(
        block(comm, H, HEADS, 16, attention_dropout=0.1, recompute="full", swiglu=True, dtype=F64),
        draw(*X), randomness=RANDOMNESS,
    ),
    "CrossAttention": lambda comm: of_layer(
        tplayers.CrossAttention(H, HEADS, comm, attention_dropout=0.1, dtype=F64), draw(*X), draw(*X, seed=1),
        randomness=RANDOMNESS,
    ),
    "RelativeBias": relative_bias,
    "T5Block": t5_block,
    "T5": of_t5(),
    "T5, recomputed": of_t5(recompute="full", swiglu=True, untie_embeddings_and_output_weights=True),
    "VocabParallelEmbedding": embedding,
    "vocab_parallel_distillation_loss": distillation,
    "vocab_parallel_cross_entropy": cross_entropy,
    "cosine_distillation_loss": lambda comm: Case(
        lambda x: tplayers.cosine_distillation_loss(x, draw(3, 4, seed=1)), [draw(3, 4)]
    ),
    "class_cross_entropy": lambda comm: Case(
        lambda x: tplayers.class_cross_entropy(x, torch.tensor([2, -100, 0])), [draw(3, 4)]
    ),
    "dropout": lambda comm: Case(
        lambda x: tplayers.dropout(x, 0.3, RANDOMNESS.keys("here")), [draw(*X, seed=comm.rank)], together=True
    ),
    "GPT": of_model("gpt"),
    "GPT, of shards": of_model("gpt", sequence_parallel=True, recompute="selective"),
    "GPT, canonical": of_canonical("gpt"),
    "GPT, a Llama": of_model("llama"),
    "GPT, a canonical Llama": of_canonical("llama", num_query_groups=4),
    "Transformer": of_model("gpt", position_embedding_type="rope"),
    "BERT": of_model("bert"),
    "BERT, canonical": of_canonical("bert"),
    "BERTSequenceClassifier": of_task(
        lambda config, comm, **more: tplayers.BERTSequenceClassifier(config, comm, classes=3, **more), 3, TOKENS
    ),
    "BERTMultipleChoice": of_task(tplayers.BERTMultipleChoice, 1, 3, TOKENS),
    "BERTSpans": of_task(tplayers.BERTSpans, 3, TOKENS),
    "FieldConv": of_field(lambda grid, whole: tplayers.FieldConv(2, 3, 3, grid, whole, padding=1, dtype=F64)),
    "FieldConvTranspose": of_field(
        lambda grid, whole: tplayers.FieldConvTranspose(2, 2, 2, grid, whole, stride=2, dtype=F64)
    ),
    "FieldAttention": of_field(lambda grid, whole: tplayers.FieldAttention(4, 2, grid, whole, dtype=F64), 4),
    "FieldAttention, windows": of_field(
        lambda grid, whole: tplayers.FieldAttention(
            4, 2, grid, whole, window_size=3, shift=1, relative_position_bias=True, dtype=F64
        ), 4,
    ),
    "FieldAttention, fused windows": of_field(
        lambda grid, whole: tplayers.FieldAttention(4, 2, grid, whole, window_size=3, shift=1, dtype=F64), 4
    ),
    "FieldDropout": of_field(dropping),
    "FieldMaxPool": of_field(lambda grid, whole: tplayers.FieldMaxPool(2, grid, whole)),
    "FieldAvgPool": of_field(lambda grid, whole: tplayers.FieldAvgPool(3, grid, whole, stride=1, padding=1)),
    "FieldPad": of_field(lambda grid, whole: tplayers.FieldPad((1, 1, 0, 2), grid, whole, mode="reflect")),
    "FieldAdaptiveAvgPool": of_field(lambda grid, whole: tplayers.FieldAdaptiveAvgPool((5, 3), grid, whole)),
    "FieldAdaptiveMaxPool": of_field(lambda grid, whole: tplayers.FieldAdaptiveMaxPool((5, 3), grid, whole)),
    "FieldGlobalPool": of_field(lambda grid, whole: tplayers.FieldGlobalPool(grid, whole)),
    "FieldGlobalPool, max": of_field(lambda grid, whole: tplayers.FieldGlobalPool(grid, whole, mode="max")),
    "FieldUpsample": of_field(lambda grid, whole: tplayers.FieldUpsample(2, grid, whole, mode="linear")),
    "FieldUpsample, of corners": of_field(
        lambda grid, whole: tplayers.FieldUpsample(2, grid, whole, mode="bicubic", align_corners=True)
    ),
    "FieldResample": of_field(
        lambda grid, whole: tplayers.FieldResample(grid, whole, grid.decompose((5 * grid.shape[0], 3)))
    ),
    "FieldBatchNorm": of_field(lambda grid, whole: tplayers.FieldBatchNorm(2, grid, whole, dtype=F64)),
    "FieldBatchNorm, plain": of_field(lambda grid, whole: tplayers.FieldBatchNorm(2, grid, whole, affine=False)),
    "FieldBatchNorm, 1 axis": of_field(lambda grid, whole: tplayers.FieldBatchNorm(2, grid, whole, dtype=F64), axes=1),
    "FieldInstanceNorm": of_field(
        lambda grid, whole: tplayers.FieldInstanceNorm(2, grid, whole, affine=True, dtype=F64)
    ),
    "FieldGroupNorm": of_field(lambda grid, whole: tplayers.FieldGroupNorm(2, 4, grid, whole, dtype=F64), 4),
    "FieldLayerNorm": of_field(lambda grid, whole: tplayers.FieldLayerNorm(2, grid, whole, dtype=F64)),
    "SpectralConv": of_field(lambda grid, whole: tplayers.SpectralConv(2, 2, 2, grid, whole, dtype=F64)),
    "UNet": of_field(lambda grid, whole: tplayers.UNet(2, 1, grid, whole, width=2, depth=1, dtype=F64)),
    "UNet, in groups": of_field(
        lambda grid, whole: tplayers.UNet(2, 1, grid, whole, width=8, depth=1, norm="group", dtype=F64)
    ),
    "FNO": of_field(lambda grid, whole: tplayers.FNO(2, 1, grid, whole, width=4, modes=2, depth=2, dtype=F64)),
    "ShardedModule": of_field(lambda grid, whole: tplayers.shard(small_network(), grid, whole)),
    "replicated": shared,
    **{
        name: of_region(getattr(tplayers, name), parts=parts, terms=terms)
        for name, parts, terms in (
            ("copy_to_tensor_parallel_region", False, True), ("gather_from_sequence_parallel_region", True, True),
            ("gather_from_tensor_parallel_region", True, False), ("reduce_from_tensor_parallel_region", True, False),
            ("reduce_scatter_to_sequence_parallel_region", True, True),
            ("scatter_to_tensor_parallel_region", False, True),
        )
    },
    "all_gather": of_operator(tplayers.all_gather, 2, 3),
    "all_reduce": of_operator(tplayers.all_reduce, 2, 3),
    "all_to_all": of_operator(lambda x, comm: tplayers.all_to_all(x, comm, 0, 1), 4, 3),
    "all_to_all_v": of_operator(
        lambda x, comm: tplayers.all_to_all_v(x, comm, [4 - comm.size + 1, *[1] * (comm.size - 1)])[0], 4, 3
    ),
    "broadcast": of_operator(tplayers.broadcast, 2, 3),
    "gather": of_operator(tplayers.gather, 2, 3),
    "reduce_scatter": of_operator(tplayers.reduce_scatter, 4, 3),
    "scatter": of_operator(tplayers.scatter, 4, 3),
    "sum_reduce": of_operator(tplayers.sum_reduce, 2, 3),
    "repartition": of_grid(lambda x, grid, whole: tplayers.repartition(x, grid.comm, whole, whole)),
    "roll": of_grid(lambda x, grid, whole: tplayers.roll(x, grid, 2, 0, decomposition=whole)),
    "flip": of_grid(lambda x, grid, whole: tplayers.flip(x, grid, 0, decomposition=whole)),
    "shift": of_grid(lambda x, grid, whole: tplayers.shift(x, grid, 0)),
    "halo_exchange": of_grid(lambda x, grid, whole: tplayers.halo_exchange(x, grid, 1, decomposition=whole)),
    "halo_accumulate": of_grid(lambda x, grid, whole: tplayers.halo_accumulate(x, grid, 1, decomposition=whole), 5),
    "transfer": of_grid(lambda x, grid, whole: tplayers.transfer(x, plan_of(grid, whole), grid.comm)),
    "transfer_adjoint": of_grid(
        lambda x, grid, whole: tplayers.transfer_adjoint(x, plan_of(grid, whole), grid.comm), 5
    ),
    "start_transfer": started,
}  # fmt: skip
CASES |= {
    f"{name}, twice": in_a_row(CASES[name])
    for name in (
        "LayerNorm", "RMSNorm", "MLP", "SwiGLU", "MoE", "SelfAttention", "TransformerBlock", "FieldBatchNorm",
        "FieldGroupNorm", "FieldLayerNorm", "FieldAvgPool", "FieldAttention",
    )
} | {
    "FieldConv, twice": in_a_row(
        of_field(lambda grid, whole: tplayers.FieldConv(2, 2, 3, grid, whole, padding=1, dtype=F64))
    ),
}  # fmt: skip
#: those of which a second derivative is an error that says so
ONCE = {
    "SelfAttention, fused", "vocab_parallel_distillation_loss", "GPT, canonical", "GPT, a canonical Llama",
    "BERT, canonical", "start_transfer",
}  # fmt: skip
STEP = 1e-6


@pytest.fixture
def group(mpi_world):
    with Communicator(mpi_world, order="tree") as comm:
        yield Group(comm)


def test_every_export_has_a_case_or_nothing_to_differentiate():
    exported = {name for name, value in vars(tplayers).items() if name[0] != "_" and not inspect.ismodule(value)}
    exported.add("replicated")
    named = {name.split(",")[0] for name in CASES}
    assert exported - named - NO_FUNCTIONS == set()
    assert (named | NO_FUNCTIONS) - exported == set()


class Twice:
    """A loss of a case, and a penalty on its gradients, which may be differentiated."""

    def __init__(self, case: Case, group: Group) -> None:
        self.case, self.group = case, group
        #: of values of which each rank has its own, or a term
        self.loss: Callable[[Tensor], Tensor] = lambda y: torch.sin(y + 0.3 * group.rank * case.together)
        self.parameters = dict(case.module.named_parameters())
        self.placements = tplayers.placements(case.module)
        self.leaves = [x.requires_grad_() for x in (*case.inputs, *self.parameters.values())]
        #: of each leaf: each rank has a part; each rank has one term of its gradient
        self.parts = [case.parts] * len(case.inputs) + [one.sharded for one in self.placements.values()]
        self.partial = [False] * len(case.inputs) + [one.partial for one in self.placements.values()]
        kinds = (range(len(case.inputs)), range(len(case.inputs), len(self.leaves)))
        #: the numbers of the inputs, and of the parameters
        self.kinds = [numbers for numbers in kinds if numbers]

    def of_all(self, term: Tensor) -> Tensor:
        """The sum of the ranks' terms, which each of them then has."""
        return term if self.case.together else tplayers.reduce_from_tensor_parallel_region(term, self.group.comm)

    def first(self, numbers: range, **options: Any) -> list[Tensor]:
        case, total = self.case, torch.zeros((), dtype=F64)
        values = case.value(*case.inputs)
        for number, y in enumerate(values if isinstance(values, list | tuple) else [values]):
            term = (self.loss if case.together or number in case.terms else torch.sin)(y).sum()
            total = total + (self.of_all(term) if number in case.terms else term)
        return torch.autograd.grad(total, [self.leaves[n] for n in numbers], allow_unused=True, **options)

    def penalty(self, gradients: list[Tensor | None], numbers: range) -> Tensor:
        total = torch.zeros((), dtype=F64)
        for g, number in zip(gradients, numbers, strict=True):
            if g is not None:
                term = (self.of_all(g) if self.partial[number] else g).pow(3).sum()
                total = total + (self.of_all(term) if self.parts[number] else term)
        return total

    def second(self, gradients: list[Tensor | None], numbers: range) -> tuple[Tensor | None, ...]:
        """The gradients of the penalty by all leaves."""
        penalty = self.penalty(gradients, numbers)
        if not penalty.requires_grad:  # of a linear loss of something linear that sends nothing
            return (None,) * len(self.leaves)
        return torch.autograd.grad(penalty, self.leaves, allow_unused=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_second_derivative_is_right_or_an_error(group, name):
    case = CASES[name](group.comm)
    group.fill(case.module)
    torch.manual_seed(1)
    twice = Twice(case, group)
    ways = [draw(*x.shape, seed=70 + group.rank * (case.together or case.parts)) for x in case.inputs]
    ways += [twice.placements[name].part(draw(*twice.placements[name].shape, seed=80)) for name in twice.parameters]
    for numbers in twice.kinds:
        plain = twice.first(numbers)
        gradients = twice.first(numbers, create_graph=True)
        torch.testing.assert_close([g for g in gradients if g is not None], [g for g in plain if g is not None])
        problem = None
        try:
            second = twice.second(gradients, numbers)
        except RuntimeError as error:
            problem = str(error)
            assert "no second derivative" in problem or "not implemented" in problem, problem
        assert len({*group.comm.mpi.allgather(problem is None)}) == 1
        assert (problem is None) or name in ONCE, problem
        if problem is not None:
            continue
        # What all ranks hold counts once. Parameters that layers of fields share have the gradient of all losses.
        slope = sum(
            float((g * way).sum())
            for n, (g, way) in enumerate(zip(second, ways, strict=True))
            if g is not None
            and (group.rank == 0 or twice.parts[n] or twice.partial[n] or (case.together and n < len(case.inputs)))
        )
        sides = []
        for sign in (1, -1):
            with torch.no_grad():
                for leaf, way in zip(twice.leaves, ways, strict=True):
                    leaf += sign * STEP * way
            sides.append(float(twice.penalty(twice.first(numbers), numbers).detach()))
            with torch.no_grad():
                for leaf, way in zip(twice.leaves, ways, strict=True):
                    leaf -= sign * STEP * way
        truth = (sides[0] - sides[1]) / (2 * STEP) * (case.together or group.rank == 0)
        found, expected = (sum(group.comm.mpi.allgather(one)) for one in (slope, truth))
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6), (found, expected)


#: those of which the ranks' losses may differ
OWN_LOSSES = [name for name in CASES if name not in ONCE]


@pytest.mark.slow
@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2)
@pytest.mark.parametrize("name", OWN_LOSSES)
def test_where_one_ranks_loss_is_linear(group, name):
    """The gradient of a linear loss has no graph of its own; that of the same loss with 0 times a square has one."""
    case = CASES[name](group.comm)
    group.fill(case.module)
    twice = Twice(case, group)
    if not (case.together or case.terms):
        pytest.skip("every rank computes the same loss")
    other = twice.loss
    for numbers in twice.kinds:
        for linear in range(group.comm.size):
            found = []
            for graph in (False, True):
                twice.loss = (
                    other if linear != group.rank else lambda y, graph=graph: y + (0 * y.square() if graph else 0)
                )
                gradients = twice.first(numbers, create_graph=True)
                found.append([None if g is None else g.clone() for g in twice.second(gradients, numbers)])
            for mine, expected in zip(*found, strict=True):
                if mine is None or expected is None:
                    assert not any(g.any() for g in (mine, expected) if g is not None)
                else:
                    torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


#: layers and models of which every rank has the whole input
WHOLE = [
    name
    for name in CASES
    if name.split(",")[0] in (
        "LayerNorm", "RMSNorm", "ColumnParallelLinear", "ReplicatedLinear", "MLP", "MoE", "SwiGLU", "SelfAttention",
        "TransformerBlock", "CrossAttention", "T5Block", "T5", "VocabParallelEmbedding", "GPT", "Transformer", "BERT",
        "BERTSequenceClassifier", "BERTMultipleChoice", "BERTSpans",
    ) and name not in ONCE and "shard" not in name.replace("GPT, of shards", "")
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("name", WHOLE)
def test_second_derivatives_are_those_of_one_rank(group, alone, name):
    """To 1e-12 of the largest one of a leaf, for five drawn inputs."""
    both = [(one, CASES[name](one.comm)) for one in (group, alone)]
    for one, case in both:
        one.fill(case.module)
    for number in range(5 if both[0][1].inputs else 1):
        found = []
        for one, case in both:
            case.inputs = [draw(*x.shape, seed=1000 * number + 7 + place) for place, x in enumerate(case.inputs)]
            twice = Twice(case, one)
            for numbers in twice.kinds:
                gradients = twice.first(numbers, create_graph=True)
                value = twice.penalty(gradients, numbers).detach()
                found.append((value, twice.second(gradients, numbers), twice))
        for (value, mine, twice), (expected, whole, _) in zip(
            found[: len(found) // 2], found[len(found) // 2 :], strict=True
        ):
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
            placed = [None] * len(twice.case.inputs) + [*twice.placements.values()]
            for n, (g, of_whole) in enumerate(zip(mine, whole, strict=True)):
                if g is None or of_whole is None:
                    assert g is of_whole is None or not (g if of_whole is None else of_whole).any()
                    continue
                g = twice.of_all(g.detach()) if twice.partial[n] else g
                one = placed[n]
                part = of_whole if one is None else one.part(of_whole)
                scale = float(of_whole.abs().max())
                torch.testing.assert_close(g, part, rtol=0, atol=1e-12 * max(scale, 1.0))


#: what torch.func takes, too: all that is linear in its input, pooling, and losses of it
TRANSFORMED = [
    name
    for name in CASES
    if name.endswith("_region") or name.split("_")[0] in ("all", "broadcast", "gather", "scatter", "sum", "halo")
    or name in ("reduce_scatter", "repartition", "shift", "roll", "flip", "transfer", "transfer_adjoint")
    or name.startswith(("FieldConv", "FieldAttention", "FieldMaxPool", "FieldAvgPool", "FieldAdaptive",
        "FieldGlobalPool", "FieldUpsample"))
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMED)
def test_under_torch_func(group, name):
    """Jvp, vjp, grad and Hessian products are those of autograd, which `test_a_second_derivative...` checks."""
    case = CASES[name](group.comm)
    group.fill(case.module)
    (x,) = case.inputs
    v = draw(*x.shape, seed=50 + group.rank * (case.together or case.parts))

    def loss(x: Tensor) -> Tensor:
        y = case.value(x)
        y = y[0] if isinstance(y, tuple | list) else y
        total = torch.sin(y + 0.3 * group.rank * case.together).sum()
        return tplayers.reduce_from_tensor_parallel_region(total, group.comm) if case.terms else total

    leaf = x.clone().requires_grad_()
    y = case.value(leaf)
    w = torch.zeros_like(y).requires_grad_()
    (transposed,) = torch.autograd.grad(y, leaf, w, create_graph=True)
    (tangent,) = torch.autograd.grad(transposed, w, v)
    torch.testing.assert_close(torch.func.jvp(case.value, (x,), (v,))[1], tangent)
    ones = torch.ones_like(y)
    (expected,) = torch.autograd.grad(y, leaf, ones)
    torch.testing.assert_close(torch.func.vjp(case.value, x)[1](ones)[0], expected)

    (gradient,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    torch.testing.assert_close(torch.func.grad(loss)(x), gradient.detach())
    (product,) = torch.autograd.grad(gradient, leaf, v)
    if not case.parts and not case.terms:  # a Hessian product of what is whole, or terms of one sum
        found = torch.func.jvp(torch.func.grad(loss), (x,), (v,))[1]
        torch.testing.assert_close(found, product)
    torch.testing.assert_close(torch.func.vjp(torch.func.grad(loss), x)[1](v)[0], product)


@pytest.mark.parametrize("name", ["RowParallelLinear", "MLP"])
def test_forward_mode_of_frozen_weights(group, name):
    """A sum in place would leave the tangents out."""
    case = CASES[name](group.comm)
    group.fill(case.module)
    case.module.requires_grad_(False)
    (x,) = case.inputs
    way = draw(*x.shape, seed=50 + group.rank * case.parts)
    with torch.no_grad(), forward_ad.dual_level():
        found = forward_ad.unpack_dual(case.value(forward_ad.make_dual(x, way))).tangent
    with torch.no_grad():
        plus, minus = (case.value(x + sign * STEP * way) for sign in (1, -1))
    torch.testing.assert_close(found, (plus - minus) / (2 * STEP), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", [name for name in OWN_LOSSES if "twice" not in name])
def test_the_tangent_of_a_gradient_is_right_or_an_error(group, name):
    """A backward without ``create_graph`` may have a gradient with a tangent."""
    case = CASES[name](group.comm)
    group.fill(case.module)
    twice = Twice(case, group)
    if len(case.inputs) != 1:
        pytest.skip("no input")
    y = case.value(*case.inputs)
    y = y[0] if isinstance(y, tuple | list) else y
    given, way = (draw(*y.shape, seed=50 + place + 9 * group.rank * case.together) for place in (0, 1))
    expected = torch.autograd.grad(y, twice.leaves, way, retain_graph=True, allow_unused=True)
    with forward_ad.dual_level():
        problem, found = "", ()
        try:
            dual = forward_ad.make_dual(given, way)
            found = torch.autograd.grad(y, twice.leaves, dual, retain_graph=True, allow_unused=True)
        except (RuntimeError, NotImplementedError) as error:
            problem = str(error)
        # Or the cross-entropy has written into logits that its caller gave away, or a recomputation took another way.
        said = ("implement the jvp function", "modified by an inplace operation", "different metadata")
        assert found or any(words in problem for words in said), problem
        for one, tangent in zip(found, expected, strict=bool(found)):
            if one is not None:
                mine = forward_ad.unpack_dual(one).tangent
                torch.testing.assert_close(torch.zeros_like(tangent) if mine is None else mine, tangent)


@pytest.mark.mpi(min_size=2)
def test_gradients_that_were_summed_in_place(group):
    layer = tplayers.ReplicatedLinear(H, 3, sequence_parallel=True, dtype=F64)
    group.fill(layer)
    for parameter in layer.parameters():
        (parameter.grad,) = torch.autograd.grad(layer(draw(2, H)).pow(3).sum(), parameter, create_graph=True)
    tplayers.sum_partial_gradients(layer, group.comm)
    with pytest.raises(RuntimeError, match="not implemented"):
        torch.autograd.grad(layer.weight.grad.pow(2).sum(), layer.weight)
