"""Shapes of models whose figures are published, and what the collectives of a step send."""

from commengine import cost
from tplayers.formulas import TransformerShape

GPT3 = TransformerShape(layers=96, hidden=12288, heads=96, seq=2048, vocab=51200)
#: of Shoeybi et al. 2019, Table 1, by the billions of parameters
PAPER = {
    1.2: TransformerShape(40, 1536, 16, 1024, 51200),
    2.5: TransformerShape(54, 1920, 20, 1024, 51200),
    4.2: TransformerShape(64, 2304, 24, 1024, 51200),
    8.3: TransformerShape(72, 3072, 32, 1024, 51200),
}


def bytes_sent(collectives):
    """What the busiest rank sends, if all run as rings."""
    return sum(
        one.count * cost.collective(one.operation, "ring", one.size, one.ranks).path_bytes for one in collectives
    )
