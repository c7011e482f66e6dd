"""Predict the time and memory of a GPT's or BERT's training step on a cluster, part by part.

The layer is Megatron-LM's. Its kernels are counted one by one: those of the eager code of 2019 (``unfused``:
mpu/transformer.py of NVIDIA/Megatron-LM at commit a0368dd), or those of today (``fused``: one kernel each for
attention, for bias + GELU, and for bias + dropout + residual). Collectives are rings, as NCCL runs long messages.
Nothing hides tensor-parallel collectives.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.clusters.cluster import Cluster, Device
from bench.prediction.group_cost import data_communication, stops_early, tensor_communication
from bench.prediction.kernels import KernelTimes, gemm_seconds, memory_seconds
from bench.prediction.layout import MODELS, Layout
from commengine import cost
from commengine.cost import TransformerShape


@dataclass(frozen=True)
class PredictedStep:
    """A predicted step.

    seconds: seconds per part, without hidden communication. hidden: seconds of the gradients' reduction that run beside
    the backward. memory: bytes of a device per part. flops: FLOPs of all devices, including recomputation.
    """

    seconds: dict[str, float]
    hidden: float
    memory: dict[str, float]
    flops: float
    ranks: int

    @property
    def total(self) -> float:
        """The seconds of the step."""
        return sum(self.seconds.values())

    @property
    def flops_per_device(self) -> float:
        """FLOP/s of a device."""
        return self.flops / self.total / self.ranks

    @property
    def communication(self) -> float:
        """The share of the step during which a device waits for a collective."""
        return (self.seconds["tensor_communication"] + self.seconds["data_communication"]) / self.total

    @property
    def memory_total(self) -> float:
        """The bytes of a device."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class _Kernel:
    """A kernel that only moves memory: bytes per element with 2-byte elements and 1-byte masks, forward and backward.

    over: "hidden", whole on each tensor rank (a sequence shard with sequence parallelism); "qkv", "queries", "rotated"
    (queries and keys) and "mlp", which a rank has 1 / t of; or "scores", over a s / t for each token. backward: 0 if
    there is none. bias: there is no such kernel without biases.
    """

    over: str
    forward: float
    backward: float
    count: int = 1
    layernorm: bool = False
    bias: bool = False


# Each line: the bytes that the operations of the comment read and write, in order.
_UNFUSED = (
    _Kernel("hidden", 4, 6, count=2, layernorm=True),
    _Kernel("hidden", 5, 5, count=2),  # dropout
    _Kernel("hidden", 6, 6, count=2),  # residual; backward, the two gradients that meet
    _Kernel("hidden", 4, 2, count=2),  # bias after the row-parallel product; backward, its sum
    _Kernel("qkv", 4, 2, bias=True),  # bias of QKV
    _Kernel("mlp", 4, 2, bias=True),  # bias of h -> 4h
    _Kernel("qkv", 4, 8),  # heads made contiguous for the batched product; backward, and joined again
    _Kernel("queries", 4, 4),  # context made contiguous
    _Kernel("mlp", 4, 6),  # GELU, one kernel by torch.jit
    _Kernel("scores", 4, 4),  # divided by sqrt(d)
    _Kernel("scores", 4, 4),  # times the mask
    _Kernel("scores", 4, 0),  # minus 10000 (1 - mask)
    _Kernel("scores", 4, 6),  # softmax
    _Kernel("scores", 5, 5),  # dropout
)
_FUSED = (
    _Kernel("hidden", 4, 6, count=2, layernorm=True),
    _Kernel("hidden", 7, 11, count=2),  # bias + dropout + residual; backward, dropout and the two gradients that meet
    _Kernel("qkv", 4, 2, bias=True),  # bias of QKV
    _Kernel("mlp", 4, 6),  # bias + GELU
    _Kernel("qkv", 0, 4),  # gradients of q, k, v joined
)
# Attention in single operations beside fused kernels: 2019's, and the mask's hash in int32 (tplayers/rng.py).
_POSITION_MASK = (
    *(kernel for kernel in _UNFUSED if kernel.over == "scores"),
    _Kernel("scores", 97, 0),
    _Kernel("qkv", 4, 4),  # heads made contiguous
    _Kernel("queries", 4, 4),  # context made contiguous
)
# Of the Llama family: queries and keys rotated; SwiGLU, which reads its gate, too.
_ROTATION = _Kernel("rotated", 4, 4)
_SWIGLU = _Kernel("mlp", 6, 10)
# Bytes a parameter. Unfused (fp16/fp16.py and loss_scaler.py of 2019): zeroed gradient 2, overflow check through fp32
# 10, fp32 copy 6, unscaling 8, norm 4, clipping 8, FusedAdam 28, fp16 copy 6. Fused: gradient read for the norm and
# for Adam 4, master weight and moments read and written 24, weight 2.
_OPTIMIZER = {"unfused": 72.0, "fused": 30.0}
_OPTIMIZER_WAITED = 10.0 + 4.0
# Bytes a logit, forward and backward. Unfused: fp32 copy 6, maximum 4, subtraction 8, exp 8, sum 4, division 8;
# backward times the gradient 8, fp16 copy 6. Fused: maximum, then sum and gradient in place.
_CROSS_ENTROPY = {"unfused": (38.0, 14.0), "fused": (6.0, 4.0)}


#: the parts of the model that can be left out, and what is left then
PARTS = {
    "gemm_shape": "every GEMM at the rate of the largest",
    "attention_traffic": "attention's scores cost no memory traffic",
    "elementwise": "no other memory-bound kernels",
    "host": "no launches, no waiting for the host",
    "recompute": "no recomputation (FLOP/s still count it)",
    "optimizer": "no optimizer",
    "tensor_communication": "tensor-parallel collectives are free",
    "data_communication": "the gradients' reduction is free",
}


def predict(shape: TransformerShape, layout: Layout, cluster: Cluster, off: str = "") -> PredictedStep:
    """The step of ``shape`` on ``layout.ranks`` devices of the cluster, calibrated if the cluster has a calibration.

    off: one of `PARTS`, which the model then lacks. Raises ValueError if the shape cannot be split so.
    """
    return StepModel(shape, layout, cluster, off).step(slowdown(cluster, off))


def slowdown(cluster: Cluster, off: str = "") -> float:
    """The factor by which kernels must move memory more slowly than the cluster says for the calibrating step to fit.

    It is 1 without a calibration. The rate of GEMMs is measured and published, and so is that of a plain copy. The
    share of it that eager kernels reach is not published, so one measured step decides it. off: as in `predict`. Raises
    ValueError if no rate can explain the step.
    """
    if not cluster.calibration:
        return 1.0
    given = cluster.calibration
    shape = MODELS.get(given.model) if isinstance(given.model, str) else given.model
    if shape is None:
        raise ValueError(f"calibration.model={given.model!r}: one of {', '.join(MODELS)}, or sizes")
    dropout = isinstance(given.model, str)  # steps of the literature have dropout, a user's own has none
    layout = Layout(
        micro_batch=given.micro_batch, recompute=given.recompute, hidden_dropout=dropout, attention_dropout=dropout
    )
    low, high = (StepModel(shape, layout, cluster, off).step(factor) for factor in (1.0, 2.0))
    measured = low.flops / given.flops
    factor = 1 + (measured - low.total) / (high.total - low.total) if high.total > low.total else 0.0
    if factor <= 0:
        raise ValueError(f"calibration: {given.flops / 1e12:g} TFLOP/s cannot be met, whatever the rate of memory")
    return factor


@dataclass(frozen=True)
class StepModel:
    """The model of a step. off: the part of it that is left out, one of `PARTS`, or "" for none."""

    shape: TransformerShape
    layout: Layout
    cluster: Cluster
    off: str = ""

    def step(self, slow: float) -> PredictedStep:
        """The step, if kernels move memory ``slow`` times more slowly than the cluster says."""
        shape, layout, cluster, device = self.shape, self.layout, self.cluster, self.cluster.device
        shape.require_tensor_parallel(layout.tensor)
        if layout.sequence_parallel and shape.seq % layout.tensor:
            raise ValueError(
                f"tensor-parallel size {layout.tensor} does not divide seq={shape.seq} for sequence parallelism"
            )
        forward, backward, again = self.layer()
        ends = self._ends()
        owned = cost.parameters(shape, layout.tensor)

        seconds = dict.fromkeys(("gemm", "attention", "elementwise", "host", "recompute", "ends", "optimizer"), 0.0)
        for work, passes in ((forward, shape.layers), (backward, shape.layers), (again, shape.layers), (ends, 1)):
            for part, value in work.seconds(slow).items():
                seconds["ends" if work is ends else "recompute" if work is again else part] += passes * value
            # between kernels, and waiting for the host if it issues kernels more slowly than they run
            idle = max(work.kernels * device.launch, work.kernels * device.dispatch - work.total(slow))
            seconds["host"] += passes * idle
        pairs = 2 if layout.recompute == "none" else 6  # around dropout; a checkpoint, its replay and their dropout
        seconds["host"] += shape.layers * pairs * device.random_state
        seconds = {part: layout.micro_batches * value for part, value in seconds.items()}
        under_backward = shape.layers * (backward.total(slow) + again.total(slow))  # of the last micro-batch

        exposed, hidden = data_communication(owned, shape.layers, layout, cluster, under_backward, slow)
        seconds["optimizer"] = self._optimizer(owned, slow)
        seconds["tensor_communication"] = tensor_communication(shape, layout, cluster)
        seconds["data_communication"] = exposed
        if self.off in seconds:
            seconds[self.off] = 0.0
        memory = cost.training_bytes(
            shape, layout.micro_batch, layout.tensor, layout.data, kept_tensors(layout, cluster)
        )
        # A part that is switched off takes no time, but its FLOPs still count.
        flops = cost.model_flops(shape, layout.batch, layout.recompute)
        return PredictedStep(seconds, hidden, memory, flops, layout.ranks)

    def _on(self, part: str) -> bool:
        return part != self.off

    def _gemm(self, m: int, n: int, k: int, batch: int = 1) -> float:
        device = self.cluster.device
        if not self._on("gemm_shape"):  # at the rate of the largest GEMMs
            return 2 * batch * m * n * k / (device.peak_flops * device.gemm_efficiency)
        return gemm_seconds(device, m, n, k, batch)

    def layer(self) -> tuple[KernelTimes, KernelTimes, KernelTimes]:
        """One layer's micro-batch: forward, backward, and what is computed again before backward."""
        shape, layout, device = self.shape, self.layout, self.cluster.device
        h, t, s, b = shape.hidden, layout.tensor, shape.seq, layout.micro_batch
        tokens, head, batch = s * b, shape.head_size, b * shape.heads // t
        forward, backward, attention = KernelTimes(), KernelTimes(), KernelTimes()

        inner = (2 if shape.gated else 1) * shape.mlp // t
        for n, k in ((int(self._width("qkv")), h), (h, shape.queries // t), (inner, h), (h, shape.mlp // t)):
            last = self._gemm(tokens, n, k)
            forward.add("gemm", 1, multiply=last)
            backward.add("gemm", 2, multiply=self._gemm(tokens, k, n) + self._gemm(k, n, tokens))

        if _eager_attention(layout, device):
            attention.add("attention", 2, multiply=self._gemm(s, s, head, batch) + self._gemm(s, head, s, batch))
            backward.add("attention", 4, multiply=self._gemm(s, s, head, batch) + 3 * self._gemm(s, head, s, batch))
        else:
            flops = 2 * tokens * s * shape.queries / t  # both products, the half below the diagonal
            flops *= 2 if shape.model == "bert" else 1  # a BERT attends to all positions
            attention.add("attention", 1, multiply=flops / (device.peak_flops * device.attention_efficiency[0]))
            backward.add("attention", 1, multiply=2.5 * flops / (device.peak_flops * device.attention_efficiency[1]))

        kernels: tuple[_Kernel, ...] = _UNFUSED
        if device.kernels == "fused":
            kernels = (*_FUSED, *_POSITION_MASK) if _eager_attention(layout, device) else _FUSED
        if shape.gated:
            kernels = tuple(_SWIGLU if kernel.over == "mlp" and not kernel.bias else kernel for kernel in kernels)
        if shape.rotary:
            kernels += (_ROTATION,)
        for kernel in kernels:
            if kernel.bias and not (shape.biases or (kernel.over == "qkv" and shape.qkv_biases)):
                continue
            scores = kernel.over == "scores"
            if not self._on("attention_traffic" if scores else "elementwise"):
                continue
            elements = kernel.count * tokens * self._width(kernel.over) * device.element_bytes / 2
            works = ((attention if scores else forward, kernel.forward), (backward, kernel.backward))
            for (work, each), reached in zip(works, device.layernorm_efficiency, strict=True):
                if each:
                    took = memory_seconds(device, elements * each, reached if kernel.layernorm else None)
                    work.add("attention" if scores else "elementwise", kernel.count, move=took)

        again = KernelTimes()
        if self._on("recompute") and layout.recompute != "none":
            again.join(attention)
            if layout.recompute == "full":
                again.join(forward)
                if stops_early(layout, device):
                    again.add("gemm", -1, multiply=-last)
        forward.join(attention)
        return forward, backward, again

    def _width(self, over: str) -> float:
        """The elements of a token on one device. over: of a `_Kernel`."""
        shape, t = self.shape, self.layout.tensor
        keys = shape.keys * shape.sharing(t)
        return {
            "hidden": shape.hidden / (t if self.layout.sequence_parallel else 1),
            "scores": shape.heads * shape.seq / t, "qkv": (shape.queries + 2 * keys) / t, "mlp": shape.mlp / t,
            "queries": shape.queries / t, "rotated": (shape.queries + keys) / t,
        }[over]  # fmt: skip

    def _ends(self) -> KernelTimes:
        """The embedding, final LayerNorm, logits and loss of a micro-batch, forward and backward."""
        work, shape, layout, device = KernelTimes(), self.shape, self.layout, self.cluster.device
        tokens, h, vocab = shape.seq * layout.micro_batch, shape.hidden, shape.vocab // layout.tensor
        products = [(tokens, vocab, h), (tokens, h, vocab), (vocab, h, tokens)]
        if shape.model == "bert":  # the dense layer of masked tokens; what the pooler computes is b rows
            products += [(tokens, h, h), (tokens, h, h), (h, h, tokens)]
        for m, n, k in products:
            work.add("logits", 1, multiply=self._gemm(m, n, k))
        if self._on("elementwise"):
            size = device.element_bytes / 2
            for way, each in enumerate((4, 6)):
                took = memory_seconds(device, size * each * tokens * h, device.layernorm_efficiency[way])
                work.add("layernorm", 1, move=took)
            # Looked up, positions added, dropout; backward its gradient scattered into a dense one, which joins the
            # logits'.
            work.add("embedding", 8, move=memory_seconds(device, size * (25 * tokens * h + 8 * vocab * h)))
            moved = sum(_CROSS_ENTROPY[device.kernels]) * tokens * vocab
            work.add("loss", 12 if device.kernels == "unfused" else 4, move=memory_seconds(device, moved))
        return work

    def _optimizer(self, owned: float, slow: float) -> float:
        """The seconds of the update.

        The unfused one loops over tensors, which the host may issue more slowly than they run.
        """
        layout, device = self.layout, self.cluster.device
        moved = owned * _OPTIMIZER[device.kernels] / (layout.data if layout.zero1 else 1)
        moved += owned * 3 * device.element_bytes * (layout.micro_batches - 1)  # gradients accumulated
        runs = slow * memory_seconds(device, moved)
        if device.kernels == "fused" or not self._on("host"):
            return runs
        tensors = 12 * self.shape.layers + 4
        # The overflow check and the norm bring a number to the host for each tensor: their run and issue times add up.
        waited = _OPTIMIZER_WAITED / _OPTIMIZER["unfused"] * runs + tensors * 3 * device.dispatch
        return waited + max(runs * (1 - _OPTIMIZER_WAITED / _OPTIMIZER["unfused"]), tensors * 7 * device.dispatch)


def kept_tensors(layout: Layout, cluster: Cluster) -> cost.KeptTensors:
    """The settings that decide which tensors a device keeps in such a step."""
    size = cluster.device.element_bytes
    return cost.KeptTensors(
        element_bytes=size, recompute=layout.recompute, sequence_parallel=layout.sequence_parallel,
        hidden_dropout=layout.hidden_dropout, zero1=layout.zero1, sends_together=cluster.overlap,
        sent_bytes=2 if size == 2 else 0, scores="none" if not _eager_attention(layout, cluster.device)
        else "dropped" if layout.attention_dropout else "softmax",
    )  # fmt: skip


def _eager_attention(layout: Layout, device: Device) -> bool:
    """Whether attention runs in single operations, so that its scores are in memory."""
    return device.kernels == "unfused" or (layout.attention_dropout and layout.position_mask)
