"""GPT against an implementation that is not ours: transformers' GPT-2, with the same weights."""

import pytest
import torch
import torch.nn.functional as F

from tplayers import GPT, GPTConfig

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]

VOCAB, S, B, H, HEADS, LAYERS = 21, 7, 2, 16, 4, 2
PADDED = 24


def by_our_names(tensors):
    """GPT-2's parameters (or their gradients) by our names; its Conv1D holds the transpose of a Linear's weight."""
    ours = {
        "embedding.weight": F.pad(tensors["transformer.wte.weight"], (0, 0, 0, PADDED - VOCAB)),
        "position_embedding": tensors["transformer.wpe.weight"],
        "final_norm.weight": tensors["transformer.ln_f.weight"],
        "final_norm.bias": tensors["transformer.ln_f.bias"],
    }
    names = {
        "attention_norm": "ln_1", "attention.qkv": "attn.c_attn", "attention.projection": "attn.c_proj",
        "mlp_norm": "ln_2", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
    }  # fmt: skip
    for layer in range(LAYERS):
        for mine, theirs in names.items():
            for kind in ("weight", "bias"):
                tensor = tensors[f"transformer.h.{layer}.{theirs}.{kind}"]
                transposed = kind == "weight" and "norm" not in mine
                ours[f"layers.{layer}.{mine}.{kind}"] = tensor.t() if transposed else tensor
    return ours


@pytest.fixture(scope="module")
def peer():
    transformers = pytest.importorskip("transformers", reason="the independent peer is transformers' GPT-2")
    shape = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=8, n_embd=H, n_layer=LAYERS, n_head=HEADS, activation_function="gelu_new",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(shape).double().train()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)).double()
            parameter.copy_(0.3 * noise)
    return model


def test_logits_loss_and_gradients(peer, group, close):
    shape = GPTConfig(
        LAYERS, H, HEADS, VOCAB, 8, hidden_dropout=0.0, attention_dropout=0.0, make_vocab_size_divisible_by=8
    )
    model = GPT(shape, group.comm, dtype=torch.float64)
    theirs = by_our_names(dict(peer.named_parameters()))
    assert set(theirs) == {name for name, _ in model.named_parameters()}
    group.load(model, theirs)

    tokens = torch.randint(VOCAB, (B, S), generator=torch.Generator().manual_seed(3))
    peer.zero_grad()
    output = peer(input_ids=tokens, labels=tokens)
    F.cross_entropy(output.logits[:, :-1].reshape(-1, VOCAB), tokens[:, 1:].reshape(-1)).backward()

    close(group.joined(model(tokens))[..., :VOCAB], output.logits.detach())
    losses = model(tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(losses.detach().mean(), output.loss.detach().double(), rtol=1e-6, atol=1e-6)
    losses.mean().backward()
    close(group.gradients(model), by_our_names({name: p.grad for name, p in peer.named_parameters()}))
