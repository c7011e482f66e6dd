"""Models of the literature, and the chunks of a layout of their steps."""

from __future__ import annotations

from commengine.options.ranges import divisors
from tplayers.formulas import StepLayout, TransformerShape
from trainers.presets import MIXTURES, PRESETS
from trainers.settings.commands import GPTSettings
from trainers.tasks.gpt import GPTTask

#: models by the short names of --model: the GPTs of Shoeybi et al. 2019 (8.3b is Table 1's, with 32 heads), and GPT-3
MODELS = {
    "355m": PRESETS["gpt-355m"].shape(),
    "1.2b": PRESETS["gpt-1.2b"].shape(),
    "2.5b": PRESETS["gpt-2.5b"].shape(),
    "4.2b": PRESETS["gpt-4.2b"].shape(),
    "8.3b": PRESETS["gpt-8.3b-32-heads"].shape(),
    "175b": TransformerShape(96, 12288, 96, 2048, 51200),
}
# Table 1 of Narayanan et al. 2021 (arXiv 2104.04473)
MODELS |= {
    name: TransformerShape(layers, hidden, heads, 2048, 51200)
    for name, layers, hidden, heads in (
        ("1.7b", 24, 2304, 24), ("3.6b", 30, 3072, 32), ("7.5b", 36, 4096, 32), ("18.4b", 40, 6144, 48),
        ("39.1b", 48, 8192, 64), ("76.1b", 60, 10240, 80), ("145.6b", 80, 12288, 96), ("310.1b", 96, 16384, 128),
        ("529.6b", 105, 20480, 128), ("1008b", 128, 25600, 160),
    )
}  # fmt: skip
#: mixtures of experts, with sequences of 4,096 tokens
MODELS |= {
    name: GPTTask(GPTSettings(**settings, seq_length=4096, mock_data=True)).cost_shape()
    for name, settings in MIXTURES.items()
}


def stage_chunks(layout: StepLayout, layers: int) -> int:
    """The chunks of a rank, for a model of so many layers. Raises ValueError, naming the option, if none fit."""
    stages, size = layout.pipeline, layout.chunk_layers
    if not 1 <= stages <= layers:
        raise ValueError(f"--pipeline-model-parallel-size {stages}: valid for {layers} layers: 1 to {layers}")
    if size is None:
        return 1
    name = f"--num-layers-per-virtual-pipeline-stage {size}"
    if stages == 1 or layers % stages:
        valid = ", ".join(str(one) for one in divisors(layers) if one > 1)
        raise ValueError(f"{name}: needs a --pipeline-model-parallel-size above 1 that divides {layers}: {valid}")
    if layers // stages % size:
        valid = ", ".join(map(str, divisors(layers // stages)))
        raise ValueError(f"{name}: must divide the {layers // stages} layers of a stage; valid: {valid}")
    if layout.micro_batches < stages and size < layers // stages:
        raise ValueError(
            f"{name}: {layout.micro_batches} micro-batches are fewer than the {stages} stages; valid: "
            f"--global-batch-size {stages * layout.data * layout.micro_batch} or more"
        )
    return layers // stages // size
