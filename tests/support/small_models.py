"""A small GPT, a small Llama and a small BERT with dropout, and a step of each: what tests of all of them run."""

import torch

from tplayers import BERT, GPT, BERTConfig, GPTConfig, Randomness, TransformerBlock, initialize

VOCAB, S, B, H, HEADS, LAYERS = 13, 8, 3, 16, 4, 3
SAMPLES = (40, 41, 2)
DECODERS = ("gpt", "llama")
KINDS = (*DECODERS, "bert", "post-LN bert at positions")
#: the fields of a GPT that is of the Llama family. All its ranks share one head of keys and values
LLAMA = {
    "normalization": "RMSNorm", "swiglu": True, "position_embedding_type": "rope", "num_query_groups": 1,
    "kv_channels": 8, "add_bias_linear": False, "add_qkv_bias": True, "untie_embeddings_and_output_weights": True,
}  # fmt: skip


def made(kind, comm, *, overlap_stream=None, dtype=None, part=None, context=None, expert_group=None, **options):
    """An initialised model of this kind. part: of its layers. options: fields of its configuration."""
    fields = {"hidden_dropout": 0.2, "attention_dropout": 0.1, "make_vocab_size_divisible_by": 16, **options}
    layers = fields.pop("num_layers", LAYERS)
    if "post-LN" in kind:
        fields["norm_placement"] = "post"
    if kind == "llama":
        fields = LLAMA | fields
    shape, model = (GPTConfig, GPT) if kind in DECODERS else (BERTConfig, BERT)
    found = model(
        shape(layers, H, HEADS, VOCAB, S, **fields), comm, overlap_stream=overlap_stream, dtype=dtype, part=part,
        context=context, **({} if expert_group is None else {"expert_group": expert_group}),
    )  # fmt: skip
    initialize(found, 3)
    return found


def arguments(kind, step=0, device=None):
    """(positional, named) arguments with which the model gives losses. They differ from step to step."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (B, S + 1), generator=generator).to(device)
    randomness = Randomness(5, 17 + step, tuple(sample + step for sample in SAMPLES), device=device)
    if kind in DECODERS:
        return (tokens[:, :-1], tokens[:, 1:], randomness), {}
    labels = tokens[:, 1:].clone()
    labels[:, step % 2 :: 2] = -100
    types = torch.randint(2, (B, S), generator=generator).to(device)
    named = {"labels": labels, "randomness": randomness}
    if "positions" in kind:  # 3 of 4 or so that are masked
        positions = torch.arange(1 - step % 2, S, 2, device=device)[:3].expand(B, -1)
        named |= {"positions": positions, "labels": labels.gather(1, positions)}
    lengths, order = torch.tensor([8, 3 + step, 5], device=device), torch.tensor([1, -100, 0], device=device)
    return (tokens[:, :-1], types, lengths), named | {"order_labels": order}


def total(losses):
    """The sum of a model's losses: of its one tensor, or of both."""
    return losses.sum() if isinstance(losses, torch.Tensor) else losses[0].sum() + losses[1].sum()


def block(comm, hidden, heads, ffn, *, encoder=False, dtype=None, **fields):
    """One layer of a GPT or, if ``encoder``, of a BERT, without dropout. fields: of its configuration."""
    fields = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "ffn_hidden_size": ffn, **fields}
    shape = BERTConfig if encoder else GPTConfig
    return TransformerBlock(shape(1, hidden, heads, VOCAB, S, **fields), comm, dtype=dtype)
