"""The collectives of a training step, part by part."""

from dataclasses import replace

from tests.support.models.published import GPT3, PAPER, bytes_sent
from tplayers import formulas
from tplayers.formulas import TransformerShape


def test_parts_of_a_step():
    """What is recomputed, what a joined loss saves, and what bucketing leaves as it is."""
    layers = GPT3.layers
    for sequence in (False, True):
        run = formulas.tensor_parallel_collectives(GPT3, 1, 8, recompute="full", sequence_parallel=sequence)
        again, forward = (
            sorted((one.operation, one.count, one.size) for one in run if (one.part, one.phase) == ("layers", phase))
            for phase in ("recompute", "forward")
        )
        assert again == forward
        early = formulas.tensor_parallel_collectives(
            GPT3, 1, 8, recompute="full", sequence_parallel=sequence, stops_early=True
        )
        reduced = [one.count for one in early if one.phase == "recompute" and one.operation != "all_gather"]
        assert reduced == [layers]
        assert sum(one.count for one in run) - sum(one.count for one in early) == layers
    assert formulas.tensor_parallel_collectives(GPT3, 1, 8, stops_early=True) == formulas.tensor_parallel_collectives(
        GPT3, 1, 8
    )

    apart, together = (formulas.loss_collectives(GPT3, 1, 8, together=joined) for joined in (False, True))
    assert bytes_sent(apart) == bytes_sent(together)
    assert [sum(one.count for one in run) for run in (apart, together)] == [3, 2]

    whole = formulas.data_parallel_collectives(6e6, 4, zero1=True)
    parts = formulas.data_parallel_collectives(6e6, 4, zero1=True, buckets=[1e6, 3e6, 2e6])
    assert bytes_sent(parts) == bytes_sent(whole) and len(parts) == 6
    assert {one.part for one in parts} == {"gradients", "optimizer"}

    assert formulas.sequence_parallel_collectives(100, 1) == formulas.sequence_parallel_collectives(0, 8) == []
    assert formulas.sequence_parallel_collectives(100, 8)[0].size == 400
    for tensor, data in ((1, 1), (1, 2), (2, 1), (2, 2)):
        found = formulas.scalar_collectives(tensor, data, zero1=True, fp16=True)
        assert len(found) == 2 * (tensor > 1) + 4 * (data > 1)


def test_heads_of_a_bert():
    """Only the collectives behind the layers differ from a GPT's of the same sizes, and only with these options."""
    gpt, bert = (TransformerShape(24, 1024, 16, 512, 30720, model) for model in ("gpt", "bert"))
    for sequence in (False, True):
        more = {"recompute": "full", "sequence_parallel": sequence}
        as_gpt = formulas.tensor_parallel_collectives(gpt, 4, 8, **more)
        assert formulas.tensor_parallel_collectives(bert, 4, 8, order_head=False, **more) == as_gpt
        both = formulas.tensor_parallel_collectives(bert, 4, 8, **more)
        pooled = [(one.part, one.phase, one.operation, one.count, one.size) for one in both if one not in as_gpt]
        assert pooled == ([("pooler", "forward", "all_reduce", 1, 4 * 1024 * 2)] if sequence else [])
        masked = formulas.tensor_parallel_collectives(bert, 4, 8, predictions=80, **more)
        assert [one for one in masked if one.part not in ("MLM head", "output layer")] == [
            one for one in both if one.part != "output layer"
        ]
        heads = [one for one in masked if one.part in ("MLM head", "output layer")]
        assert {one.size for one in heads} == {80 * 4 * 1024 * 2} and len(heads) == (5 if sequence else 1)
    assert formulas.tensor_parallel_collectives(bert, 4, 1, predictions=80, sequence_parallel=True) == []
    assert [one.size for one in formulas.loss_collectives(bert, 4, 8, predictions=80, together=True)] == [1280, 2560]
    assert [one.size for _, one in formulas.scalar_collectives(1, 2, terms=2)] == [24, 16]
    sizes = formulas.parameter_sizes(bert, 8)
    post = formulas.parameter_sizes(bert, 8, post_norm=True)
    assert sorted(size for _, size in post) == sorted(size for _, size in sizes)
    assert [name for name, _ in post if name not in dict(sizes)] == ["embedding_norm.weight", "embedding_norm.bias"]
    alone = formulas.parameter_sizes(bert, 8, order_head=False)
    assert sum(size for _, size in sizes) - sum(size for _, size in alone) == 1024 * 1024 + 1024 + 2 * 1024 + 2


def test_parameter_by_parameter():
    for shape in (*PAPER.values(), GPT3):
        for tensor in (1, 2, 8):
            sizes = formulas.parameter_sizes(shape, tensor)
            assert len(sizes) == 4 + 12 * shape.layers
    h, shape = GPT3.hidden, replace(GPT3, ffn=100)
    layer = {name: size for name, size in formulas.parameter_sizes(shape) if name.startswith("layers.0.")}
    assert sum(layer.values()) == h * (3 * h + h + 2 * 100) + 3 * h + h + 100 + h + 4 * h
    positions = dict(formulas.parameter_sizes(GPT3, 8, positions=5))["position_embedding"]
    assert positions == 5 * GPT3.hidden
