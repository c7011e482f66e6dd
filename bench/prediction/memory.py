"""The tensors that a device keeps in a predicted step."""

from __future__ import annotations

from bench.clusters.cluster import Cluster, Device
from tplayers import formulas
from tplayers.formulas import StepLayout


def kept_tensors(layout: StepLayout, cluster: Cluster) -> formulas.KeptTensors:
    """The settings that decide which tensors a device keeps in such a step."""
    size = cluster.device.element_bytes
    keeps = eager_attention(layout, cluster.device) and (layout.context == 1 or layout.method == "ulysses")
    return formulas.KeptTensors(
        element_bytes=size, recompute=layout.recompute, sequence_parallel=layout.sequence_parallel,
        hidden_dropout=layout.hidden_dropout, zero1=layout.zero1, sends_together=cluster.overlap,
        sent_bytes=2 if size == 2 else 0,
        scores="none" if not keeps else "dropped" if layout.attention_dropout else "softmax",
    )  # fmt: skip


def eager_attention(layout: StepLayout, device: Device) -> bool:
    """Whether attention runs in single operations, so that its scores are in memory."""
    return device.kernels != "fused" or (layout.attention_dropout and layout.position_mask)
