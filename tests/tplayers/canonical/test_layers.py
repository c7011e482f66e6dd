"""Whole models and losses in canonical shards at every tensor-parallel size, and layers that cannot."""

import copy

import pytest
import torch
import torch.nn.functional as F

from tests.support.small_models import KINDS, LLAMA, arguments, made, total
from tplayers import GPT, ExpertOptions, MoE, RowParallelLinear, placements, use_canonical_shards
from tplayers.canonical.layers import ARITHMETIC
from tplayers.cross_entropy import cross_entropy_of_shards

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.every_size]

#: sizes that four divides
SIZES = {"num_query_groups": 4, "kv_channels": 8}
EXPERTS = {
    "num_experts": 5, "moe_router_topk": 2, "moe_ffn_hidden_size": 8, "moe_shared_expert_intermediate_size": 4,
    "moe_shared_expert_gate": True, "moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.1,
}  # fmt: skip

#: the positions, and the columns of a shard, of the cross-entropies
S, WIDTH = 9, 12


@pytest.mark.some(8)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [*KINDS, "experts"])
def test_models_have_the_same_losses_and_gradients(shards, alone, kind, dtype, sequence_parallel):
    """As the model alone has; which has the losses of the ordinary model but for rounding."""
    options = {"make_vocab_size_divisible_by": 16} | (LLAMA | SIZES if kind in ("llama", "experts") else {})
    options |= EXPERTS if kind == "experts" else {}
    kind = "llama" if kind == "experts" else kind

    def new(*args, **more):
        model = made(*args, **more)
        if model.router_losses is not None:
            model.router_losses.scale = 0.5
        return model

    found = []
    for group in (alone, shards):
        model = new(kind, group.comm, dtype=dtype, sequence_parallel=sequence_parallel, **options)
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
    plain = new(kind, alone.comm, dtype=dtype, **options)
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
    with pytest.raises(ValueError, match="0: Linear cannot compute in canonical shards"):
        use_canonical_shards(torch.nn.Sequential(torch.nn.Linear(8, 8)), shards.comm, 4)
    experts = MoE(8, ExpertOptions(2, 1, 8), shards.comm)
    with pytest.raises(ValueError, match="experts exclude canonical parts"):
        use_canonical_shards(torch.nn.Sequential(experts), shards.comm, 4, parts=2)


def test_the_layers_themselves_know_nothing_of_it(alone):
    """A second call with another count changes the count; a copy computes as its model; other models do not."""
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    model, plain = made("gpt", alone.comm, **options).eval(), made("gpt", alone.comm, **options).eval()
    use_canonical_shards(model, alone.comm, 2)
    use_canonical_shards(model, alone.comm, 4)
    assert type(model).__name__ == "GPT" and isinstance(model, GPT) and type(model) is not GPT
    assert all(one.canonical.count == 4 for one in (model, model.layers[0].mlp, model.layers[1].attention.qkv))
    assert all(not hasattr(one, "canonical") for one in plain.modules())
    tokens = arguments("gpt")[0][0]
    assert torch.equal(copy.deepcopy(model)(tokens), model(tokens))


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


def losses(shards, dtype, vocab_size):
    """Losses and the gradient of this rank's logits, with one target that does not count."""
    logits = torch.randn(4, S, 1, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype) * 5
    target = torch.randint(vocab_size, (S, 1), generator=torch.Generator().manual_seed(1))
    target[3] = -100
    part = logits[shards.first : shards.first + shards.own].clone().requires_grad_()
    found = cross_entropy_of_shards(part * 1.0, target, shards.comm, vocab_size, True, ARITHMETIC)
    found.backward(torch.linspace(0.5, 2, S, dtype=found.dtype).view(S, 1))
    return logits, target, found.detach(), part.grad


@pytest.mark.parametrize("vocab_size", [4 * WIDTH, 2 * WIDTH + 5, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_cross_entropy(shards, alone, dtype, vocab_size):
    logits, target, right, of_logits = losses(alone, dtype, vocab_size)
    _, _, found, mine = losses(shards, dtype, vocab_size)
    assert torch.equal(found, right) and found.dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert torch.equal(mine, of_logits[shards.first : shards.first + shards.own])
    if dtype == torch.float64:
        whole = logits.permute(1, 2, 0, 3).reshape(S, -1)[:, :vocab_size].requires_grad_()
        expected = F.cross_entropy(whole, target[:, 0], reduction="none")
        torch.testing.assert_close(right[:, 0], expected.detach())
        (gradient,) = torch.autograd.grad(expected, whole, torch.linspace(0.5, 2, S, dtype=torch.float64))
        flat = of_logits.permute(1, 2, 0, 3).reshape(S, -1)
        torch.testing.assert_close(flat[:, :vocab_size], gradient)
        assert not flat[:, vocab_size:].any()


def test_a_target_outside_the_vocabulary(shards):
    logits = torch.zeros(shards.own, 1, 1, WIDTH)
    with pytest.raises(ValueError, match="a target lies outside 0 to 12 and is not ignore_index=-100"):
        cross_entropy_of_shards(logits, torch.tensor([[13]]), shards.comm, 13, True, ARITHMETIC)
