"""Routing against transformers' routers, and its precision."""

import pytest
import torch

from tplayers.experts.routing import route

N, H, E = 2000, 16, 6


def drawn(dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(*shape, generator=generator) for shape in ((N, H), (E, H)))
    return x.to(dtype), weight.to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 3, E])
@pytest.mark.parametrize("kind", ["Mixtral", "Qwen2Moe", "Qwen2Moe, weights of the chosen"])
def test_experts_and_weights_are_those_of_transformers(kind, k):
    transformers = pytest.importorskip("transformers", reason="the independent peer is transformers")
    name, _, chosen = kind.partition(",")
    sizes = {"num_experts_per_tok": k, "hidden_size": H}
    sizes |= {"num_local_experts": E} if name == "Mixtral" else {"num_experts": E, "norm_topk_prob": bool(chosen)}
    module = getattr(transformers.models, name.lower().replace("moe", "_moe"))
    modeling = getattr(module, f"modeling_{name.lower().replace('moe', '_moe')}")
    peer = getattr(modeling, f"{name}TopKRouter")(getattr(transformers, f"{name}Config")(**sizes))
    x, weight = drawn()
    with torch.no_grad():
        peer.weight.copy_(weight)
        _, weights, experts = peer(x)
    found = route(x, weight, k, pre_softmax=kind == "Qwen2Moe")
    assert torch.equal(found.experts, experts)
    torch.testing.assert_close(found.weights, weights)
    torch.testing.assert_close(found.probabilities, (x @ weight.t()).softmax(-1))


@pytest.mark.parametrize("k", [1, 2])
def test_halves_are_routed_in_float32_under_autocast_too(k):
    """In bfloat16 other experts would be chosen for some of these tokens."""
    x, weight = drawn(torch.bfloat16)
    wanted = route(x.float(), weight.float(), k)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = route(x.float(), weight.float(), k)
    for found in (route(x, weight, k), under):
        assert found.weights.dtype == found.logits.dtype == torch.float32
        assert torch.equal(found.experts, wanted.experts) and torch.equal(found.weights, wanted.weights)
    assert not torch.equal((x @ weight.t()).topk(E).indices, route(x, weight, E).experts)


def test_one_expert_with_the_weights_of_the_chosen_gives_the_router_no_gradient():
    x, weight = drawn()
    weight.requires_grad_()
    for pre_softmax in (False, True):
        weight.grad = None
        route(x, weight, 1, pre_softmax=pre_softmax).weights.sum().backward()
        assert bool(weight.grad.abs().max() > 1e-3) == pre_softmax
