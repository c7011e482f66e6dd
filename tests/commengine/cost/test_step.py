"""The collectives of a training step, part by part."""

from commengine import cost
from commengine.cost import TransformerShape

GPT3 = TransformerShape(layers=96, hidden=12288, heads=96, seq=2048, vocab=51200)
PAPER = {
    1.2: TransformerShape(40, 1536, 16, 1024, 51200),
    2.5: TransformerShape(54, 1920, 20, 1024, 51200),
    4.2: TransformerShape(64, 2304, 24, 1024, 51200),
    8.3: TransformerShape(72, 3072, 32, 1024, 51200),
}


def test_parts_of_a_step():
    """What is recomputed, what a joined loss saves, and what bucketing leaves as it is."""
    layers = GPT3.layers
    for sequence in (False, True):
        run = cost.tensor_parallel_collectives(GPT3, 1, 8, recompute="full", sequence_parallel=sequence)
        again, forward = (
            sorted((one.operation, one.count, one.size) for one in run if (one.part, one.phase) == ("layers", phase))
            for phase in ("recompute", "forward")
        )
        assert again == forward
        early = cost.tensor_parallel_collectives(
            GPT3, 1, 8, recompute="full", sequence_parallel=sequence, stops_early=True
        )
        reduced = [one.count for one in early if one.phase == "recompute" and one.operation != "all_gather"]
        assert reduced == [layers]
        assert sum(one.count for one in run) - sum(one.count for one in early) == layers
    assert cost.tensor_parallel_collectives(GPT3, 1, 8, stops_early=True) == cost.tensor_parallel_collectives(
        GPT3, 1, 8
    )

    apart, together = (cost.loss_collectives(GPT3, 1, 8, together=joined) for joined in (False, True))
    assert cost.total_bytes_sent(apart) == cost.total_bytes_sent(together)
    assert [sum(one.count for one in run) for run in (apart, together)] == [3, 2]

    whole = cost.data_parallel_collectives(6e6, 4, zero1=True)
    parts = cost.data_parallel_collectives(6e6, 4, zero1=True, buckets=[1e6, 3e6, 2e6])
    assert cost.total_bytes_sent(parts) == cost.total_bytes_sent(whole) and len(parts) == 6
    assert {one.part for one in parts} == {"gradients", "optimizer"}

    assert cost.sequence_parallel_collectives(100, 1) == cost.sequence_parallel_collectives(0, 8) == []
    assert cost.sequence_parallel_collectives(100, 8)[0].size == 400
    for tensor, data in ((1, 1), (1, 2), (2, 1), (2, 2)):
        found = cost.scalar_collectives(tensor, data, zero1=True, fp16=True)
        assert len(found) == 2 * (tensor > 1) + 4 * (data > 1)


def test_parameter_by_parameter():
    for shape in (*PAPER.values(), GPT3):
        for tensor in (1, 2, 8):
            sizes = cost.parameter_sizes(shape, tensor)
            assert sum(size for _, size in sizes) == cost.parameters(shape, tensor)
            assert len(sizes) == 4 + 12 * shape.layers
    layer = {name: size for name, size in cost.parameter_sizes(GPT3, mlp=100) if name.startswith("layers.0.")}
    assert sum(layer.values()) == cost.layer_parameters(GPT3.hidden, 100)
    positions = dict(cost.parameter_sizes(GPT3, 8, positions=5))["position_embedding"]
    assert positions == 5 * GPT3.hidden
