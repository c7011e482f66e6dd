"""The heads of fine-tuning against transformers': logits, one loss and all its gradients, pre-LN and post-LN."""

import functools

import pytest
import torch

from tests.support.weights.hugging_face import from_hugging_face, to_hugging_face
from tplayers import (
    BERTConfig,
    BERTMultipleChoice,
    BERTSequenceClassifier,
    BERTSpans,
    Randomness,
    class_cross_entropy,
    initialize,
    sum_partial_gradients,
)

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2)]

VOCAB, S, B, CHOICES, CLASSES, H, HEADS, LAYERS = 21, 8, 3, 4, 3, 16, 4, 2
#: our model, the end of the name of theirs, the head
KINDS = {
    "classes": (functools.partial(BERTSequenceClassifier, classes=CLASSES), "SequenceClassification", "classifier"),
    "choice": (BERTMultipleChoice, "MultipleChoice", "classifier"),
    "spans": (BERTSpans, "QuestionAnswering", "span_head"),
}
OPTIONS = {
    "plain": {},
    "sequence parallel": {"sequence_parallel": True},
    "full recomputation": {"recompute": "full"},
}


def config(placement, **changes):
    return BERTConfig(
        LAYERS, H, HEADS, VOCAB, S + 2, make_vocab_size_divisible_by=8, norm_placement=placement,
        **{"hidden_dropout": 0.0, "attention_dropout": 0.0, **changes},
    )  # fmt: skip


@functools.cache
def peer(kind, placement):
    """The random model of transformers, in float64."""
    transformers = pytest.importorskip("transformers", reason="the independent peer is transformers' BERT")
    shape = {
        "vocab_size": VOCAB, "hidden_size": H, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "intermediate_size": 4 * H, "max_position_embeddings": S + 2, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0, "layer_norm_eps": 1e-5, "pad_token_id": None,
        "attn_implementation": "eager", "num_labels": 2 if kind == "spans" else CLASSES,
    }  # fmt: skip
    prefix = "MegatronBert" if placement == "pre" else "Bert"
    made = getattr(transformers, f"{prefix}For{KINDS[kind][1]}")(getattr(transformers, f"{prefix}Config")(**shape))
    made = made.double().train()
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)).double()
            parameter.copy_(0.3 * noise)
    return made


@functools.cache
def batch(kind):
    """Tokens, types, lengths and labels; of a choice, the last length is 1 and a label counts nowhere."""
    generator = torch.Generator().manual_seed(3)
    shape = (B, CHOICES) if kind == "choice" else (B,)
    tokens, types = (torch.randint(n, (*shape, S), generator=generator) for n in (VOCAB, 2))
    lengths = torch.randint(2, S + 1, shape, generator=generator)
    lengths.view(-1)[0], lengths.view(-1)[-1] = S, 1
    if kind == "spans":
        labels = torch.tensor([[2, 5], [0, 0], [0, 3]])
    else:
        labels = torch.tensor([2, 0, 1])
    return tokens, types, lengths, labels


@functools.cache
def expected(kind, placement):
    """Logits, the loss and its gradients by our names."""
    model, (tokens, types, lengths, labels) = peer(kind, placement), batch(kind)
    real = torch.arange(S) < lengths.unsqueeze(-1)
    wanted = {"labels": labels}
    if kind == "spans":
        wanted = {"start_positions": labels[:, 0], "end_positions": labels[:, 1]}
    model.zero_grad()
    found = model(input_ids=tokens, token_type_ids=types, attention_mask=real.long(), **wanted)
    found.loss.backward()
    logits = torch.stack([found.start_logits, found.end_logits], -1) if kind == "spans" else found.logits
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return logits.detach(), found.loss.item(), from_hugging_face(gradients, config(placement), KINDS[kind][2])


def loss_of(kind, logits, labels):
    if kind == "spans":
        return class_cross_entropy(logits.transpose(1, 2), labels).mean(dim=1).mean()
    return class_cross_entropy(logits, labels).mean()


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", OPTIONS)
def test_logits_loss_and_gradients(group, kind, placement, case):
    shape = config(placement, **OPTIONS[case])
    new, _, head = KINDS[kind]
    model = new(shape, group.comm, dtype=torch.float64)
    theirs = dict(peer(kind, placement).named_parameters())
    group.load(model, from_hugging_face(theirs, shape, head))
    logits, loss, gradients = expected(kind, placement)
    tokens, types, lengths, labels = batch(kind)
    found = model(tokens, types, lengths)
    close = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-10)
    close(group.same(found), logits)
    mine = loss_of(kind, found, labels)
    assert mine.item() == pytest.approx(loss, abs=1e-10)
    mine.backward()
    sum_partial_gradients(model, group.comm)
    ours = group.gradients(model)
    assert set(ours) == set(gradients)
    close(ours, gradients)
    back = to_hugging_face(group.assembled(model), shape, head)
    assert back.keys() == theirs.keys() and all(torch.equal(back[name], theirs[name]) for name in back)


@pytest.mark.every_size
@pytest.mark.parametrize("kind", KINDS)
def test_dropout_is_drawn_by_sample_at_every_size(group, alone, kind):
    """The same masks on a rank alone and on all of them, other ones for other samples, and none in evaluation."""
    shape = config("pre", hidden_dropout=0.3, attention_dropout=0.2, sequence_parallel=True)
    new, (tokens, types, lengths, _) = KINDS[kind][0], batch(kind)
    split, whole = (new(shape, side.comm, dtype=torch.float64) for side in (group, alone))
    for model in (split, whole):
        initialize(model, 5)
    rows = lengths.numel()

    def logits(model, first=0):
        return model(tokens, types, lengths, randomness=Randomness(1, 2, tuple(range(first, first + rows))))

    torch.testing.assert_close(logits(split), logits(whole), rtol=0, atol=1e-10)
    assert (logits(split, 7) - logits(split)).abs().max() > 1e-3
    with pytest.raises(ValueError, match="needs randomness"):
        split(tokens, types, lengths)
    split.eval()
    torch.testing.assert_close(logits(split, 7), logits(split), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["classes", "choice"])
def test_a_sample_that_counts_nothing_gives_zero_gradients(group, kind):
    model = KINDS[kind][0](config("pre"), group.comm, dtype=torch.float64)
    initialize(model, 5)
    tokens, types, lengths, labels = batch(kind)
    losses = class_cross_entropy(model(tokens, types, lengths), torch.full_like(labels, -100))
    assert losses.shape == labels.shape and (losses == 0).all()
    losses.sum().backward()
    assert all((p.grad == 0).all() for p in model.parameters())
