"""What a BERT predicts: the argmax of the whole vocabulary at every TP size, and never a column that only pads it."""

import pytest
import torch

from tplayers import BERT, BERTConfig, initialize
from trainers.run.masked_prediction import RightPredictions, filled, predict

VOCAB, PADDED = 50, 64


def bert(comm, **options):
    config = BERTConfig(2, 32, 4, VOCAB, 12, init_method_std=0.3, make_vocab_size_divisible_by=PADDED, **options)
    model = BERT(config, comm)
    initialize(model, 9)
    with torch.no_grad():  # the columns that pad the vocabulary look best to who does not leave them out
        mine = torch.arange(PADDED // comm.size) + comm.rank * PADDED // comm.size
        model.mlm_head.bias.copy_(torch.where(mine >= VOCAB, 1000.0, 0.0))
    return model.eval()


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)

    def draw(high, *shape):
        return torch.randint(high, shape, generator=generator)

    return draw(VOCAB, 6, 12), draw(2, 6, 12), torch.tensor([12, 12, 7, 9, 12, 5]), draw(5, 6, 4)


@pytest.mark.mpi
@pytest.mark.every_size
@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}, {"binary_head": False}])
def test_the_argmax_of_the_whole_vocabulary(world, alone, batch, options):
    tokens, types, lengths, positions = batch
    whole = bert(alone, **{name: value for name, value in options.items() if name == "binary_head"})
    with torch.no_grad():
        logits, order = whole(tokens, types, lengths)
    expected = logits[torch.arange(6)[:, None], positions, :VOCAB].argmax(dim=-1)
    found, swapped = predict(bert(world, **options), tokens, types, lengths, positions)
    assert torch.equal(found, expected) and len(expected.unique()) > 3
    assert (swapped is None) == (order is None)
    if order is not None:
        assert torch.equal(swapped, order.argmax(dim=-1))


@pytest.mark.mpi
@pytest.mark.every_size
def test_right_predictions_count_nothing_else(world, batch):
    tokens, types, lengths, positions = batch
    model = bert(world)
    labels, order = predict(model, tokens, types, lengths, positions)
    labels[0, 0] += 1
    labels[1] = -100
    order[2:] = -100

    class Batch:
        token_types, padding, order_labels = types, lengths, order

    Batch.tokens, Batch.labels, Batch.positions = tokens, labels, positions
    right, in_order = RightPredictions()(model, Batch, None)
    assert right.sum() == 24 - 1 - 4 and in_order.tolist() == [1, 1, 0, 0, 0, 0]
    alone = RightPredictions(binary_head=False)
    assert alone.names == ("masked_accuracy",)


def test_the_text_shows_what_is_right_and_what_is_not():
    tokens = ["[CLS]", "the", "[MASK]", "##s", "sat", "[MASK]", "dog", "[SEP]"]
    masked, completed = filled(tokens, {2: "cat", 5: "##able", 6: "mat"}, {2: "cat", 5: "##on", 6: "mat"})
    assert masked == "[CLS] the [MASK]s sat [MASK] dog [SEP]"
    assert completed == "[CLS] the [cat]s sat [##able, not ##on] [mat] [SEP]"
