"""Checkpoints as Megatron-LM writes them, from global tensors under our names, with one row moved at a time."""

import argparse
import enum
import random

import numpy as np
import torch

#: our name: theirs in version 0, and the dimension that is split
TOP = {
    "embedding.weight": ("language_model.embedding.word_embeddings.weight", 0),
    "position_embedding": ("language_model.embedding.position_embeddings.weight", None),
    "token_type_embedding": ("language_model.embedding.tokentype_embeddings.weight", None),
    "mlm_head.bias": ("lm_head.bias", 0),
}
LAYERS = {
    "final_norm": ("language_model.transformer.final_layernorm", None, None),
    "attention_norm": ("input_layernorm", None, None),
    "attention.qkv": ("attention.query_key_value", 0, 0),
    "attention.projection": ("attention.dense", 1, None),
    "mlp_norm": ("post_attention_layernorm", None, None),
    "mlp.up": ("mlp.dense_h_to_4h", 0, 0),
    "mlp.down": ("mlp.dense_4h_to_h", 1, None),
    "mlm_head.dense": ("lm_head.dense", None, None),
    "mlm_head.norm": ("lm_head.layernorm", None, None),
    "pooler": ("language_model.pooler.dense", None, None),
    "order_head": ("binary_head", None, None),
}  # our layer: theirs, the dimension that is split of the weight, that of the bias


class AttentionMask(enum.Enum):
    """An enumeration among the settings, as of Megatron-LM's own."""

    causal = 1


AttentionMask.__module__ = "megatron.model.enums"
AttentionMask.__qualname__ = AttentionMask.__name__ = "AttnMaskType"


def their_row(version, heads, size, part, head, i):
    """The row of element ``i`` of ``head`` of the queries (0), keys (1) or values (2)."""
    return {
        0: (part * heads + head) * size + i,
        1: (head * size + i) * 3 + part,
        2: (head * 3 + part) * size + i,
        3: (head * 3 + part) * size + i,
    }[version]


def reordered(whole, heads, version, ranks):
    """Each rank's rows of queries, keys and values [3 * heads * size, ...]."""
    size, mine = len(whole) // (3 * heads), heads // ranks
    found = []
    for rank in range(ranks):
        rows = torch.full((3 * mine * size, *whole.shape[1:]), torch.nan, dtype=whole.dtype)
        for part in range(3):
            for head in range(mine):
                for i in range(size):
                    ours = (part * heads + rank * mine + head) * size + i
                    rows[their_row(version, mine, size, part, head, i)] = whole[ours]
        found.append(rows)
    return found


def place(name):
    """(Their name, the dimension that is split) of our tensor."""
    if name in TOP:
        return TOP[name]
    layer, _, kind = name.rpartition(".")
    prefix = ""
    if layer.startswith("layers."):
        _, number, layer = layer.split(".", 2)
        prefix = f"language_model.transformer.layers.{number}."
    theirs, weight, bias = LAYERS[layer]
    return f"{prefix}{theirs}.{kind}", weight if kind == "weight" else bias


def settings(heads, tensors, ranks, **changes):
    """What ``args`` of a run has, some of it of types of others."""
    h = tensors["final_norm.weight"].shape[0]
    found = {
        "num_attention_heads": heads, "hidden_size": h, "padded_vocab_size": 0, "layernorm_epsilon": 1e-5,
        "num_layers": 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("layers.")),
        "max_position_embeddings": len(tensors["position_embedding"]), "tensor_model_parallel_size": ranks,
        "params_dtype": torch.float32, "attn_mask_type": AttentionMask.causal, "bias_gelu_fusion": True,
        "openai_gelu": False, "hidden_dropout": 0.2, "attention_dropout": 0.3, "make_vocab_size_divisible_by": 4,
    }  # fmt: skip
    return argparse.Namespace(**found | changes)


def contents(tensors, heads, *, version, ranks=1, padded=None, **changes):
    """The object of each rank's file. tensors: without vocabulary padding. padded: rows of the vocabulary."""
    vocabulary = len(tensors["embedding.weight"])
    models = [{} for _ in range(ranks)]
    for name, whole in tensors.items():
        theirs, split = place(name)
        if name in ("embedding.weight", "mlm_head.bias"):
            junk = torch.full(((padded or vocabulary) - vocabulary, *whole.shape[1:]), 7.0, dtype=whole.dtype)
            whole = torch.cat([whole, junk])
        if ".qkv." in name:
            parts = reordered(whole, heads, version, ranks)
        elif split is None:
            parts = [whole] * ranks
        else:
            parts = whole.chunk(ranks, split)
        if version >= 2:  # the names of later releases
            theirs = theirs.replace(".transformer.", ".encoder.").replace(".attention.", ".self_attention.")
        groups = {"binary_head": 1, "lm_head": 1, "language_model": 2}[theirs.partition(".")[0]]
        *path, last = theirs.split(".", groups + ("embedding" in theirs))
        for model, part in zip(models, parts, strict=True):
            level = model
            for key in path:
                level = level.setdefault(key, {})
            level[last] = part.clone()
    found = []
    for rank, model in enumerate(models):
        one = {
            "iteration": 7, "args": settings(heads, tensors, ranks, rank=rank, **changes), "model": model,
            "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}},
            "rng_state": [{"np_rng_state": np.random.RandomState(1).get_state(), "torch": torch.get_rng_state(),
                           "random_rng_state": random.Random(1).getstate()}],
        }  # fmt: skip
        found.append(one if version == 0 else one | {"checkpoint_version": float(version)})
    return found


def write_megatron(folder, files, *, alone=False, old=False):
    """Write each rank's object under ``folder`` as a run's newest checkpoint; return its files.

    alone: one rank's file without ``mp_rank_00``. old: in PyTorch's format before 1.6.
    """
    place = folder / "iter_0000007"
    found = []
    for rank, one in enumerate(files):
        where = place if alone else place / f"mp_rank_{rank:02d}"
        where.mkdir(parents=True)
        torch.save(one, where / "model_optim_rng.pt", _use_new_zipfile_serialization=not old)
        found.append(where / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return found
