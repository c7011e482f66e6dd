"""The bytes of a training step: published formulas of activations, and what each setting adds or removes.

tests/trainers/training/test_trainer_memory.py compares the formulas with the tensors of a trainer.
"""

import pytest

from tplayers import formulas
from tplayers.formulas import KeptTensors, TransformerShape

GPT3 = TransformerShape(layers=96, hidden=12288, heads=96, seq=2048, vocab=51200)
SMALL = TransformerShape(layers=4, hidden=64, heads=4, seq=32, vocab=128)


def test_activation_memory_of_korthikanti():
    """2022, Table 2, sections 4 and 5: 5 a s / h is 80 for GPT-3, 64 for MT-NLG; without it 70% and 65% are saved."""
    sbh = 2048 * 12288
    assert formulas.layer_activation_bytes(GPT3, 1) == sbh * (34 + 80)
    assert formulas.layer_activation_bytes(GPT3, 1, 8) == sbh * (10 + 24 / 8 + 80 / 8)
    assert formulas.layer_activation_bytes(GPT3, 1, 8, KeptTensors(sequence_parallel=True)) == sbh / 8 * (34 + 80)
    assert formulas.layer_activation_bytes(GPT3, 1, 8, KeptTensors(recompute="full")) == 2 * sbh
    nlg = TransformerShape(105, 20480, 128, 2048, 51200)
    for shape, saved in ((GPT3, 0.70), (nlg, 0.65)):
        both = [
            formulas.layer_activation_bytes(shape, 1, 8, KeptTensors(recompute=how, sequence_parallel=True))
            for how in ("none", "selective")
        ]
        assert 1 - both[1] / both[0] == pytest.approx(saved, abs=0.005)


def test_two_moments_of_a_step():
    """The loss: layers, ends, the gradient of the logits. A recomputation: the layer whole, and no logits."""
    sbh, logits = 2048 * 12288, 2048 * 51200
    at_loss = sbh + 2 * 2 * sbh + 6 * logits
    assert formulas.activation_bytes(GPT3, 1) == 96 * sbh * 114 + at_loss
    assert formulas.activation_bytes(GPT3, 1, 1, KeptTensors(scores="none")) == 96 * 34 * sbh + at_loss
    full = formulas.activation_bytes(GPT3, 1, 1, KeptTensors(recompute="full"))
    table = 2 * 12288 * 51200  # a gradient of the tied embedding
    assert (
        full == 96 * 2 * sbh + sbh + 2 * sbh + (114 - 2) * sbh + table
    )  # mask, a gradient, the layer beyond its input
    selective = formulas.activation_bytes(GPT3, 1, 1, KeptTensors(recompute="selective"))
    assert selective == 96 * 34 * sbh + sbh + 2 * sbh + 80 * sbh + table
    wide = TransformerShape(layers=2, hidden=64, heads=1, seq=64, vocab=4096)  # here the loss needs more
    assert formulas.activation_bytes(wide, 1, 1, KeptTensors(recompute="full")) == 64 * (64 * (2 * 2 + 5) + 6 * 4096)


@pytest.mark.parametrize(
    ("kept", "of_layer"),
    [
        (KeptTensors(scores="softmax"), 34 + 2 * 2),
        (KeptTensors(hidden_dropout=False, scores="none"), 32),
        (KeptTensors(element_bytes=4), 66 + 9 * 2),
        (KeptTensors(element_bytes=4, recompute="selective"), 66),
        (KeptTensors(element_bytes=4, recompute="full"), 4),
    ],
)
def test_a_layer_without_dropout_and_in_fp32(kept, of_layer):
    sbh = 32 * 3 * 64  # a s / h is 2
    assert formulas.layer_activation_bytes(SMALL, 3, 1, kept) == of_layer * sbh


@pytest.mark.parametrize(
    ("options", "of_parameter"),
    [
        ({}, 18),
        ({"zero1_ranks": 4}, 6 + 12 / 4),
        ({"element_bytes": 4}, 16),
        ({"element_bytes": 4, "zero1_ranks": 4}, 8 + 8 / 4),
        ({"gradient_bytes": 2}, 16),  # Rajbhandari et al. 2020
    ],
)
def test_bytes_of_a_parameter(options, of_parameter):
    assert formulas.parameter_bytes(1000, **options) == 1000 * of_parameter


def test_gradients_that_are_sent_exist_when_activations_are_gone():
    owned = formulas.parameters(SMALL)
    both = {name: KeptTensors(sends_together=True, zero1=name == "zero1") for name in ("plain", "zero1")}
    activations = formulas.activation_bytes(SMALL, 1)
    for name, of_parameter in (("plain", 2), ("zero1", 2 + 2 / 4)):
        found = formulas.training_bytes(SMALL, 1, 1, 4, both[name])
        assert found["activations"] == activations and activations > 1000
        assert found["gradients being sent"] == max(0, of_parameter * owned - activations)
    large = TransformerShape(layers=4, hidden=512, heads=4, seq=8, vocab=128)
    found = formulas.training_bytes(large, 1, 1, 4, both["plain"])
    assert found["gradients being sent"] + found["activations"] == 2 * formulas.parameters(large)
    assert formulas.training_bytes(large, 1, 1, 1, both["plain"])["gradients being sent"] == 0
    assert formulas.training_bytes(large, 1, 1, 4)["gradients being sent"] == 0
    in_fp32 = KeptTensors(element_bytes=4, sent_bytes=0, sends_together=True)  # the sums themselves are sent
    assert formulas.training_bytes(large, 1, 1, 4, in_fp32)["gradients being sent"] == 0


def test_wrong_settings():
    with pytest.raises(ValueError, match="recompute='some': one of none, selective, full"):
        KeptTensors(recompute="some")
    with pytest.raises(ValueError, match="size 3 does not divide heads=4"):
        formulas.layer_activation_bytes(SMALL, 1, 3)
