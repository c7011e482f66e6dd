"""The model of a training command's step has the layout and the precision of the command."""

import pytest

from trainers.settings.commands import BERTSettings, GPTSettings
from trainers.tasks.step_model import step_model

SIZES = {
    "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "vocab_size": 100,
    "micro_batch_size": 2, "mock_data": True,
}  # fmt: skip


def test_layout_and_precision_are_those_of_the_command():
    config = GPTSettings(
        **SIZES, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, global_batch_size=24, bf16=True,
        grad_reduce_in_fp32=True, sequence_parallel=True, hidden_dropout=0.0, use_distributed_optimizer=True,
    )  # fmt: skip
    found = step_model(config, 16)
    layout = found.layout
    assert (layout.ranks, layout.data, layout.micro_batches, layout.batch) == (16, 4, 3, 24)
    assert layout.zero1 and layout.sequence_parallel and not layout.hidden_dropout and layout.recompute == "none"
    assert (found.element_bytes, found.gradient_bytes, found.stops_early) == (2, 4, True)


@pytest.mark.parametrize(("option", "stops", "head"), [({}, True, True), ({"norm_placement": "post"}, False, True),
                                                      ({"bert_no_binary_head": True}, True, False)])  # fmt: skip
def test_a_bert_ends_a_recomputation_and_has_heads_as_its_options_say(option, stops, head):
    found = step_model(BERTSettings(**SIZES, hidden_dropout=0.0, **option), 2)
    assert (found.stops_early, found.order_head, found.gradient_bytes) == (stops, head, 4)
