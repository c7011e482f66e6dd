"""Small models of the Llama family in transformers, exact in float64, and their tensors by our names."""

import math

import torch
import torch.nn.functional as F

from tplayers import GPTConfig, RopeScaling

VOCAB, S, H, HEADS, LAYERS, FFN, THETA = 21, 8, 32, 8, 2, 48, 5e5
LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 8)
_OF_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}  # fmt: skip
#: the family of transformers, the heads of keys and values, whether the output is tied, the other fields of theirs, and
#: of ours
CASES = {
    "all heads, llama3": ("Llama", 8, False, {"rope_parameters": _OF_LLAMA3}, {"rope_scaling": LLAMA3}),
    "2 of 8, tied": ("Llama", 2, True, {}, {}),
    "1 of 8, large heads": ("Mistral", 1, False, {"head_dim": 12, "sliding_window": None}, {"kv_channels": 12}),
    "biases of q, k, v": ("Qwen2", 2, True, {}, {"add_qkv_bias": True}),
    "biases, linear": (
        "Llama", 8, True,
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
        {"add_bias_linear": True, "rope_scaling": RopeScaling("linear", 4.0)},
    ),
}  # fmt: skip


def ours(case, **changes):
    """Our configuration of a case, without dropout."""
    _, groups, tied, _, fields = CASES[case]
    shape = {
        "ffn_hidden_size": FFN, "make_vocab_size_divisible_by": 8, "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "normalization": "RMSNorm", "norm_epsilon": 1e-6, "swiglu": True, "position_embedding_type": "rope",
        "rotary_base": THETA, "num_query_groups": groups, "add_bias_linear": False,
        "untie_embeddings_and_output_weights": not tied,
    }  # fmt: skip
    return GPTConfig(LAYERS, H, HEADS, VOCAB, 2 * S, **{**shape, **fields, **changes})


def theirs(case, transformers, *, exact):
    """Transformers' model of a case with random weights: as it is in float32, or exact in float64."""
    family, groups, tied, fields, _ = CASES[case]
    rope = {"rope_type": "default"} | fields.get("rope_parameters", {}) | {"rope_theta": THETA}
    shape = getattr(transformers, f"{family}Config")(
        vocab_size=VOCAB, hidden_size=H, intermediate_size=FFN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=groups, max_position_embeddings=2 * S, rms_norm_eps=1e-6, tie_word_embeddings=tied,
        bos_token_id=0, eos_token_id=None, pad_token_id=None, **{**fields, "rope_parameters": rope},
    )  # fmt: skip
    model = getattr(transformers, f"{family}ForCausalLM")(shape)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.copy_(0.3 * noise)
    return exactly(model, ours(case)) if exact else model


def turns(config):
    """The radians by which each pair of a head turns in a position: a second way to write them, number by number."""
    found = []
    for pair in range(config.head_size // 2):
        turn = config.rotary_base ** (-2 * pair / config.head_size)
        scaling = config.rope_scaling
        if scaling is not None and scaling.kind == "linear":
            turn /= scaling.factor
        elif scaling is not None:
            wave, original = 2 * math.pi / turn, scaling.original_max_position_embeddings
            longest, shortest = original / scaling.low_freq_factor, original / scaling.high_freq_factor
            if wave > longest:
                turn /= scaling.factor
            elif wave >= shortest:
                share = (original / wave - scaling.low_freq_factor) / (
                    scaling.high_freq_factor - scaling.low_freq_factor
                )
                turn = (1 - share) * turn / scaling.factor + share * turn
        found.append(turn)
    return torch.tensor(found, dtype=torch.float64)


def by_our_names(tensors, config):
    """Global tensors by our names from those of transformers, or from their gradients, written out one by one."""
    found = {"embedding.weight": ["model.embed_tokens.weight"], "final_norm.weight": ["model.norm.weight"]}
    if config.untie_embeddings_and_output_weights:
        found["output.weight"] = ["lm_head.weight"]
    for number in range(config.num_layers):
        mine, layer = f"layers.{number}", f"model.layers.{number}"
        found[f"{mine}.attention_norm.weight"] = [f"{layer}.input_layernorm.weight"]
        found[f"{mine}.mlp_norm.weight"] = [f"{layer}.post_attention_layernorm.weight"]
        for kind in ("weight", "bias"):
            q, k, v, o = (f"{layer}.self_attn.{name}_proj.{kind}" for name in "qkvo")
            if config.grouped:
                found |= {f"{mine}.attention.query.{kind}": [q], f"{mine}.attention.key_value.{kind}": [k, v]}
            else:
                found[f"{mine}.attention.qkv.{kind}"] = [q, k, v]
            gate, up, down = (f"{layer}.mlp.{name}_proj.{kind}" for name in ("gate", "up", "down"))
            found |= {
                f"{mine}.attention.projection.{kind}": [o],
                f"{mine}.mlp.gate_up.{kind}": [gate, up],
                f"{mine}.mlp.down.{kind}": [down],
            }
    there = {name: torch.cat([tensors[one] for one in parts]) for name, parts in found.items() if parts[0] in tensors}
    rows = config.padded_vocab_size - VOCAB
    return {name: F.pad(t, (0, 0, 0, rows)) if t.shape[0] == VOCAB else t for name, t in there.items()}


class _Norm(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return self.weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6)


class _Router(torch.nn.Module):
    def __init__(self, weight, k, normed):
        super().__init__()
        self.weight, self.k, self.normed = weight, k, normed

    def forward(self, x):
        logits = x.reshape(-1, x.shape[-1]) @ self.weight.t()
        weights, experts = logits.softmax(-1).topk(self.k)
        return logits, weights / weights.sum(-1, keepdim=True) if self.normed else weights, experts


class _Rotary(torch.nn.Module):
    def __init__(self, turns):
        super().__init__()
        self.turns = turns

    def forward(self, x, position_ids):
        angles = torch.cat(2 * [position_ids[..., None] * self.turns], -1)
        return angles.cos(), angles.sin()


def exactly(model, config):
    """``model`` in float64, with norms, rotary tables and routers that are not computed in float32."""
    model = model.double()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(parent, name, _Norm(child.weight))
            elif type(child).__name__.endswith("TopKRouter"):
                setattr(parent, name, _Router(child.weight, config.moe_router_topk, not config.moe_router_pre_softmax))
            elif type(child).__name__.endswith("RotaryEmbedding"):
                setattr(parent, name, _Rotary(turns(config)))
    return model
