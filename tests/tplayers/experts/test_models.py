"""Whole models with experts against transformers' in float64: logits, losses and all gradients, at any layout."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

import tplayers
from commengine import ProcessGrid
from tests.support.models.llama import exactly
from tests.support.weights.hugging_face import from_hugging_face
from tests.tplayers.experts.test_moe import close
from tplayers import GPT, GPTConfig
from tplayers.formulas import active_parameters, parameters

VOCAB, LENGTH, SAMPLES = 31, 8, 4
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 4, "intermediate_size": 24, "max_position_embeddings": LENGTH}  # fmt: skip
LLAMA = {
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "make_vocab_size_divisible_by": 8, "normalization": "RMSNorm",
    "swiglu": True, "position_embedding_type": "rope", "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True, "norm_epsilon": 1e-6,
}  # fmt: skip
#: transformers' class, its sizes beside SIZES, and the fields of our configuration
MODELS = {
    "Mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-6}, {
        "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}),
    "Qwen2-MoE": ("Qwen2Moe", {
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 12}, {
        "num_experts": 8, "moe_router_topk": 3, "moe_ffn_hidden_size": 8, "moe_router_pre_softmax": True,
        "moe_shared_expert_intermediate_size": 12, "moe_shared_expert_gate": True, "add_qkv_bias": True}),
    "Qwen3-MoE": ("Qwen3Moe", {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8, "norm_topk_prob": True,
        "num_key_value_heads": 2}, {
        "num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 8, "qk_layernorm": True, "kv_channels": 8,
        "num_query_groups": 2}),
    "Qwen2-MoE, weights of the chosen": ("Qwen2Moe", {
        "num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
        "norm_topk_prob": True}, {
        "num_experts": 4, "moe_router_topk": 4, "moe_ffn_hidden_size": 8, "moe_shared_expert_intermediate_size": 8,
        "moe_shared_expert_gate": True, "add_qkv_bias": True}),
}  # fmt: skip


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers", reason="the independent peer is transformers")


def ours(name, **more):
    return GPTConfig(2, 16, 4, VOCAB, LENGTH, **LLAMA, **MODELS[name][2], **more)


def unstacked(named, config):
    """Transformers' tensors with one for each expert, by the names of its files."""
    found = {}
    for name, tensor in named.items():
        at = re.fullmatch(r"(.*)\.mlp\.experts\.(gate_up_proj|down_proj)", name)
        mixtral = config.moe_shared_expert_intermediate_size is None and not config.qk_layernorm
        if at is None:
            found[name.replace(".mlp.gate.", ".block_sparse_moe.gate.") if mixtral else name] = tensor
            continue
        for number, one in enumerate(tensor):
            pieces = one.chunk(2) if at[2] == "gate_up_proj" else (one,)
            names = ("w1", "w3") if len(pieces) == 2 else ("w2",)
            if not mixtral:
                names = ("gate_proj", "up_proj") if len(pieces) == 2 else ("down_proj",)
            block = "block_sparse_moe" if mixtral else "mlp"
            for of, piece in zip(names, pieces, strict=True):
                found[f"{at[1]}.{block}.experts.{number}.{of}.weight"] = piece
    return found


@pytest.mark.slow
@pytest.mark.sizes(1, 2)
@pytest.mark.some(2)
@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("name", MODELS)
def test_logits_losses_and_gradients_are_those_of_transformers(world, transformers, name):
    kind, sizes, _ = MODELS[name]
    torch.manual_seed(5)
    configuration = getattr(transformers, f"{kind}Config")(**SIZES | sizes, attention_dropout=0.0)
    configuration._experts_implementation = "eager"  # the grouped product has no float64
    peer = exactly(getattr(transformers, f"{kind}ForCausalLM")(configuration), ours(name))
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    data = torch.randint(VOCAB, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    expected = peer(input_ids=data[:, :-1]).logits
    losses = F.cross_entropy(expected.transpose(1, 2), data[:, 1:], reduction="none")
    losses.sum().backward()
    config = ours(name)
    weights = from_hugging_face(unstacked({n: p.detach() for n, p in peer.named_parameters()}, config), config)
    gradients = from_hugging_face(unstacked({n: p.grad for n, p in peer.named_parameters()}, config), config)
    assert sum(tensor.numel() for tensor in weights.values()) == parameters(config.cost_shape(LENGTH))
    options = [(tensor, split, recompute) for tensor in (1, 2, 4) if world.size % tensor == 0
               for split in ((False, True) if tensor > 1 else (False,)) for recompute in (None, "full")]  # fmt: skip
    for tensor, split, recompute in options:
        with ProcessGrid(world, tensor=tensor) as grid:
            config = ours(name, sequence_parallel=split, recompute=recompute)
            model = GPT(config, grid.tensor, expert_group=grid.data, dtype=torch.float64)
            placed = tplayers.placements(model)
            for n, p in model.named_parameters():
                p.detach().copy_(placed[n].part(weights[n]))
            each = SAMPLES // grid.data.size
            mine = slice(grid.data.rank * each, (grid.data.rank + 1) * each)
            case = f"{tensor=} experts={grid.data.size} {split=} {recompute=}"
            found = model(data[mine, :-1], data[mine, 1:])
            close(found, losses[mine], case)
            found.sum().backward()
            tplayers.sum_partial_gradients(model, grid.tensor)
            for n, p in model.named_parameters():
                if ".experts." not in n:
                    grid.data.all_reduce(p.grad)
                close(p.grad, placed[n].part(gradients[n]), f"{n}, {case}")


#: parallelism.md of the project's facts: the models' numbers of parameters, of all and of those that a token meets
PUBLISHED = {
    "Mixtral 8x7B": (46_702_792_704, 12_879_925_248, {
        "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "vocab_size": 32000, "num_query_groups": 8,
        "num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 14336}),
    "Mixtral 8x22B": (140_620_634_112, 39_152_031_744, {
        "num_layers": 56, "hidden_size": 6144, "num_attention_heads": 48, "vocab_size": 32000, "num_query_groups": 8,
        "num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 16384}),
    "Qwen3-30B-A3B": (30_532_122_624, 3.35e9, {
        "num_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "vocab_size": 151936, "num_query_groups": 4,
        "kv_channels": 128, "num_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": 768,
        "qk_layernorm": True}),
    "Qwen1.5-MoE": (14_315_784_192, 2.69e9, {
        "num_layers": 24, "hidden_size": 2048, "num_attention_heads": 16, "vocab_size": 151936, "num_experts": 60,
        "moe_router_topk": 4, "moe_ffn_hidden_size": 1408, "moe_shared_expert_intermediate_size": 5632,
        "moe_shared_expert_gate": True, "moe_router_pre_softmax": True, "add_qkv_bias": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_numbers_of_parameters_are_the_published_ones(name):
    total, active, fields = PUBLISHED[name]
    shape = GPTConfig(**fields, max_position_embeddings=64, **LLAMA | {"make_vocab_size_divisible_by": 1})
    assert parameters(shape.cost_shape(64)) == total
    assert active_parameters(shape.cost_shape(64)) == pytest.approx(active, rel=0 if isinstance(active, int) else 2e-3)


@pytest.mark.mpi(min_size=1)
@pytest.mark.sizes(1, 2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_text_with_a_cache_is_that_of_whole_passes(world, dtype):
    """Several samples at once, whose tokens go to the same experts or to others."""
    config = ours("Qwen2-MoE")
    with ProcessGrid(world, tensor=world.size) as grid:
        model = GPT(config, grid.tensor, dtype=dtype)
        tplayers.initialize(model, 4)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(8)
        prompts = [[1, 2, 3], [5], [6, 7]]
        found = tplayers.generate(model, prompts, 4, sampling=tplayers.Sampling(temperature=0))
        for prompt, new in zip(prompts, found, strict=True):
            whole = list(prompt)
            for token in new:
                with torch.no_grad():
                    part = model.eval()(torch.tensor([whole]))[0, -1].float().contiguous()
                logits = part.new_empty(world.size * len(part))
                grid.tensor.all_gather(logits, part)
                assert logits[token] >= logits[:VOCAB].max() - (0 if dtype == torch.float64 else 0.2)
                whole.append(token)
