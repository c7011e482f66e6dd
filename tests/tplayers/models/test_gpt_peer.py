"""GPT against an implementation that is not ours: transformers' GPT-2, with the same weights."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.weights.hugging_face import from_hugging_face
from tplayers import GPT, GPTConfig

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]

VOCAB, S, B, H, HEADS, LAYERS = 21, 7, 2, 16, 4, 2
SHAPE = GPTConfig(LAYERS, H, HEADS, VOCAB, 8, hidden_dropout=0.0, attention_dropout=0.0, make_vocab_size_divisible_by=8)


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
    model = GPT(SHAPE, group.comm, dtype=torch.float64)
    theirs = from_hugging_face(dict(peer.named_parameters()), SHAPE)
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
    close(group.gradients(model), from_hugging_face({name: p.grad for name, p in peer.named_parameters()}, SHAPE))
