"""Predict the time and memory of a GPT's or BERT's training step on a cluster, part by part.

The layer is Megatron-LM's. Its kernels are counted one by one: those of the eager code of 2019 (``unfused``:
mpu/transformer.py of NVIDIA/Megatron-LM at commit a0368dd), or those of today (``fused``: one kernel each for
attention, for bias + GELU, and for bias + dropout + residual). Collectives are rings, as NCCL runs long messages.
Nothing hides tensor-parallel collectives.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.clusters.cluster import Cluster
from bench.prediction import products
from bench.prediction.group_cost import (
    communication,
    data_communication,
    megatron_step,
    messages,
    stops_early,
    tied_embedding,
)
from bench.prediction.kernels import KernelTimes, gemm_seconds, memory_seconds
from bench.prediction.layer_kernels import CROSS_ENTROPY, OPTIMIZER, OPTIMIZER_WAITED, of_layer
from bench.prediction.layout import MODELS, stage_chunks
from bench.prediction.memory import eager_attention, kept_tensors
from bench.prediction.predicted_step import PredictedStep
from bench.prediction.schedule import schedule_seconds
from tplayers import formulas
from tplayers.formulas import StageShape, StepLayout, StepModel, TransformerShape

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


def predict(shape: TransformerShape, layout: StepLayout, cluster: Cluster, off: str = "") -> PredictedStep:
    """The step of ``shape`` on ``layout.ranks`` devices of the cluster, calibrated if the cluster has a calibration.

    off: one of `PARTS`, which the model then lacks. Raises ValueError if the shape cannot be split so.
    """
    return StepOnCluster(shape, layout, cluster, off).step(slowdown(cluster, off))


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
    layout = StepLayout(
        micro_batch=given.micro_batch, recompute=given.recompute, hidden_dropout=dropout, attention_dropout=dropout
    )
    low, high = (StepOnCluster(shape, layout, cluster, off).step(factor) for factor in (1.0, 2.0))
    measured = low.flops / given.flops
    factor = 1 + (measured - low.total) / (high.total - low.total) if high.total > low.total else 0.0
    if factor <= 0:
        raise ValueError(f"calibration: {given.flops / 1e12:g} TFLOP/s cannot be met, whatever the rate of memory")
    return factor


@dataclass(frozen=True)
class StepOnCluster:
    """A step on a cluster. off: the part of it that is left out, one of `PARTS`, or "" for none."""

    shape: TransformerShape
    layout: StepLayout
    cluster: Cluster
    off: str = ""

    @property
    def model(self) -> StepModel:
        """Its collectives and its memory."""
        return megatron_step(self.shape, self.layout, self.cluster.device)

    def step(self, slow: float) -> PredictedStep:
        """The step, if kernels move memory ``slow`` times more slowly than the cluster says."""
        shape, layout, cluster = self.shape, self.layout, self.cluster
        shape.require_tensor_parallel(layout.tensor)
        if shape.seq % layout.context:
            raise ValueError(f"context-parallel size {layout.context} does not divide seq={shape.seq}")
        if layout.method == "ulysses" and shape.heads // layout.tensor % layout.context:
            raise ValueError(
                f"context-parallel size {layout.context} does not divide the {shape.heads // layout.tensor} heads of a "
                "rank, as an all-to-all needs"
            )
        if layout.expert > 1 and not shape.experts:
            raise ValueError(f"expert-model-parallel size {layout.expert} needs a model with experts (num_experts)")
        if layout.sequence_parallel and shape.seq // layout.context % layout.tensor:
            raise ValueError(
                f"tensor-parallel size {layout.tensor} does not divide seq={shape.seq} for sequence parallelism"
            )
        chunks = stage_chunks(layout, shape.layers)
        stages = formulas.stages(shape, layout.pipeline, chunks, layout.recompute)
        works = self.layer()
        pieces = {piece: self._piece(piece, works, slow) for chunks in stages for piece in chunks}
        busiest = max(stages, key=lambda chunks: sum(sum(pieces[one][0].values()) for one in chunks))
        parts = pieces[busiest[0]][0]
        seconds = {part: layout.micro_batches * sum(pieces[one][0][part] for one in busiest) for part in parts}
        if layout.pipeline > 1:
            seconds |= self._pipeline(stages, pieces, sum(seconds.values()))

        whole = [StageShape(sum(one.layers for one in chunks), chunks[0].first, chunks[-1].last) for chunks in stages]
        counts = ((formulas.parameters(shape, layout.tensor, one, expert=layout.expert), one) for one in whole)
        owned, most = max(counts, key=lambda counted: (counted[0], counted[1].layers))
        apart, layers = formulas.expert_parameters(shape, layout.tensor, most, expert=layout.expert), most.layers
        under_backward = layers * sum(work.total(slow) for work in works[1:])  # of the last micro-batch
        exposed, hidden = data_communication(owned - apart, apart, layers, self.model, cluster, under_backward, slow)
        seconds["optimizer"] = self._optimizer(owned - apart, apart, slow)
        seconds["data_communication"] = exposed
        if self.off in seconds:
            seconds[self.off] = 0.0
        memory = self.model.memory(kept_tensors(layout, cluster), whole, chunks)
        fullest = max(range(len(memory)), key=lambda stage: sum(memory[stage].values()))
        # A part that is switched off takes no time, but its FLOPs still count.
        flops = formulas.model_flops(shape, layout.batch, layout.recompute)
        of_rank = sum(pieces[one][2] for chunks in stages for one in chunks)
        computed = layout.micro_batches * layout.tensor * layout.replicas * of_rank
        return PredictedStep(seconds, hidden, memory[fullest], flops, layout.ranks, fullest, computed)

    def _piece(
        self, stage: StageShape, works: tuple[KernelTimes, KernelTimes, KernelTimes], slow: float
    ) -> tuple[dict[str, float], float, float]:
        """A micro-batch of a chunk: the seconds by part, those of its forward, all parts together, and its FLOPs."""
        layout, device, (forward, backward, again) = self.layout, self.cluster.device, works
        ends = self._ends(stage)

        def idle(work: KernelTimes) -> float:  # between kernels, and waiting for a host that issues them too slowly
            return max(work.kernels * device.launch, work.kernels * device.dispatch - work.total(slow))

        seconds = dict.fromkeys(("gemm", "attention", "elementwise", "host", "recompute", "ends", "optimizer"), 0.0)
        for work, passes in ((forward, stage.layers), (backward, stage.layers), (again, stage.layers), (ends, 1)):
            for part, value in work.seconds(slow).items():
                seconds["ends" if work is ends else "recompute" if work is again else part] += passes * value
            seconds["host"] += passes * idle(work)
        pairs = 2 if layout.recompute == "none" else 6  # around dropout; a checkpoint, its replay and their dropout
        seconds["host"] += stage.layers * pairs * device.random_state
        attention = forward.seconds(slow)["attention"], backward.seconds(slow)["attention"]
        run = self.model.of_microbatch(stage)
        of_forwards = [(group, one) for group, one in run if one.phase == "forward"]
        for group, spent in communication(run, layout, self.cluster, attention).items():
            seconds[f"{group}_communication"] = spent
        sent = sum(communication(of_forwards, layout, self.cluster, attention).values())
        # of the ends, as of any product, a third is forward
        of_forward = stage.layers * (forward.total(slow) + idle(forward)) + ends.total(slow) / 3 + sent
        return seconds, of_forward, stage.layers * (forward.flops + backward.flops + again.flops) + ends.flops

    def _pipeline(
        self,
        stages: list[list[StageShape]],
        pieces: dict[StageShape, tuple[dict[str, float], float, float]],
        busy: float,
    ) -> dict[str, float]:
        """The seconds that a pipeline adds to the ``busy`` ones of its busiest stage."""
        chunks = {}
        for rank, own in enumerate(stages):
            for chunk, (parts, forward, _) in enumerate(pieces[one] for one in own):
                chunks[rank, False, chunk], chunks[rank, True, chunk] = forward, sum(parts.values()) - forward
        links = messages(self.shape, self.layout, self.cluster)
        free, taken = (
            schedule_seconds(chunks, self.layout.micro_batches, each) for each in ([0.0] * len(stages), links)
        )
        sent = taken - free + tied_embedding(self.shape, self.layout, self.cluster)
        return {"bubble": free - busy, "pipeline_communication": sent}

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
        t, s, b, c = layout.tensor, shape.seq, layout.micro_batch, layout.context
        tokens, head, batch = s * b // c, shape.head_size, max(1, b * shape.heads // t // c)
        forward, backward, attention = KernelTimes(), KernelTimes(), KernelTimes()

        for m, n, k, times in products.of_layer(shape, layout):
            last, flops = self._gemm(m, n, k), 2.0 * m * n * k
            forward.add("gemm", times, multiply=times * last, flops=times * flops)
            both = self._gemm(m, k, n) + self._gemm(k, n, m)
            backward.add("gemm", 2 * times, multiply=times * both, flops=2 * times * flops)

        if eager_attention(layout, device):
            by_keys, by_values = self._gemm(s, s, head, batch), self._gemm(s, head, s, batch)
            whole = 2.0 * batch * s * s * head
            attention.add("attention", 2, multiply=by_keys + by_values, flops=2 * whole)
            backward.add("attention", 4, multiply=by_keys + 3 * by_values, flops=4 * whole)
        else:
            whole = 2 * tokens * s * shape.queries / t  # both products, the half below the diagonal
            whole *= 2 if shape.model == "bert" else 1  # a BERT attends to all positions
            for work, count, reached in zip((attention, backward), (1, 2.5), device.attention_efficiency, strict=True):
                took = count * whole / (device.peak_flops * reached)
                work.add("attention", 1, multiply=took, flops=count * whole)

        eager, experts = eager_attention(layout, device), shape.experts > 0
        for kernel in of_layer(device.kernels, eager, shape.gated, shape.rotary, experts):
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
                if stops_early(layout, device) and not experts:  # the sum over a token's experts needs all results
                    again.add("gemm", -1, multiply=-last, flops=-flops)
        forward.join(attention)
        return forward, backward, again

    def _width(self, over: str) -> float:
        """The elements of a token on one device. over: of a `layer_kernels.Kernel`."""
        shape, t = self.shape, self.layout.tensor
        keys = shape.keys * shape.sharing(t)
        return {
            "hidden": shape.hidden / (t if self.layout.sequence_parallel else 1),
            "scores": shape.heads * shape.seq / t, "qkv": (shape.queries + 2 * keys) / t,
            "mlp": shape.active_width / t, "queries": shape.queries / t, "rotated": (shape.queries + keys) / t,
            "rows": shape.of_token * shape.hidden,
        }[over]  # fmt: skip

    def _ends(self, stage: StageShape) -> KernelTimes:
        """Of a micro-batch, both ways: the embedding (first stage), the final LayerNorm, logits and loss (last)."""
        work, shape, layout, device = KernelTimes(), self.shape, self.layout, self.cluster.device
        tokens = shape.seq * layout.micro_batch // layout.context
        h, vocab = shape.hidden, shape.vocab // layout.tensor
        products = [(tokens, vocab, h), (tokens, h, vocab), (vocab, h, tokens)] if stage.last else []
        if shape.model == "bert" and stage.last:  # the dense layer of masked tokens; what the pooler computes is b rows
            products += [(tokens, h, h), (tokens, h, h), (h, h, tokens)]
        for m, n, k in products:
            work.add("logits", 1, multiply=self._gemm(m, n, k), flops=2.0 * m * n * k)
        if self._on("elementwise"):
            size = device.element_bytes / 2
            for way, each in enumerate((4, 6) if stage.last else ()):
                took = memory_seconds(device, size * each * tokens * h, device.layernorm_efficiency[way])
                work.add("layernorm", 1, move=took)
            # Looked up, positions added, dropout; backward its gradient scattered into a dense one, which joins the
            # logits'.
            if stage.first:
                work.add("embedding", 8, move=memory_seconds(device, size * (25 * tokens * h + 8 * vocab * h)))
            moved = sum(CROSS_ENTROPY[device.kernels]) * tokens * vocab
            if stage.last:
                work.add("loss", 4 if device.kernels == "fused" else 12, move=memory_seconds(device, moved))
        return work

    def _optimizer(self, owned: float, apart: float, slow: float) -> float:
        """The seconds of the update. owned, apart: as in `data_communication`.

        The unfused one loops over tensors, which the host may issue more slowly than they run.
        """
        layout, device = self.layout, self.cluster.device
        updated = owned / (layout.replicas if layout.zero1 else 1)
        updated += apart / (layout.replicas // layout.expert if layout.zero1 else 1)
        moved = updated * OPTIMIZER[device.kernels]
        moved += (owned + apart) * 3 * device.element_bytes * (layout.micro_batches - 1)  # gradients accumulated
        runs = slow * memory_seconds(device, moved)
        if device.kernels != "unfused" or not self._on("host"):
            return runs
        tensors = 12 * self.shape.layers // layout.pipeline + 4
        # The overflow check and the norm bring a number to the host for each tensor: their run and issue times add up.
        waited = OPTIMIZER_WAITED / OPTIMIZER["unfused"] * runs + tensors * 3 * device.dispatch
        return waited + max(runs * (1 - OPTIMIZER_WAITED / OPTIMIZER["unfused"]), tensors * 7 * device.dispatch)
