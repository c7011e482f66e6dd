"""The tensors of a rank's training step, counted, against the formulas that bench.predict --plan uses."""

import contextlib
from dataclasses import dataclass

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from tests.support.training.states import local_state
from tplayers import SelfAttention, TransformerBlock, formulas
from trainers.tasks.kinds import task_of

pytestmark = pytest.mark.mpi

SHAPE = {"num_layers": 3, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 256}
SIZES = {
    **SHAPE, "vocab_size": 2000, "make_vocab_size_divisible_by": 128, "mock_data": True, "micro_batch_size": 3,
    "global_batch_size": None, "eval_iters": 0, "sample_tokens": 0, "ddp_bucket_size": 500_000,
}  # fmt: skip
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
ON_BRANCHES = {"hidden_dropout": 0.1, "attention_dropout": 0.0}
TENSOR = {"tensor_model_parallel_size": 2}
ZERO1 = {"use_distributed_optimizer": True}
# With a small vocabulary the recomputation of a layer needs more than the loss.
FULL, SELECTIVE = {"recompute_granularity": "full", "vocab_size": 500}, {"recompute_granularity": "selective"}
BF16, FP16 = {"bf16": True}, {"fp16": True, "initial_loss_scale": 256.0}
LLAMA = {
    "normalization": "RMSNorm", "swiglu": True, "position_embedding_type": "rope", "group_query_attention": True,
    "disable_bias_linear": True, "untie_embeddings_and_output_weights": True,
}  # fmt: skip
#: precision, ZeRO-1, recomputation, dropout; on two ranks of a data group, or of a tensor group with TENSOR
CASES = {
    "bf16": BF16 | DROPOUT,
    "bf16, ZeRO-1, overlap": BF16 | ZERO1 | DROPOUT | {"overlap_grad_reduce": True},
    "bf16, full": BF16 | FULL | DROPOUT,
    "bf16, ZeRO-1, full, no dropout, overlap": BF16 | ZERO1 | FULL | NO_DROPOUT | {"overlap_grad_reduce": True},
    "bf16, ZeRO-1, selective": BF16 | ZERO1 | SELECTIVE | DROPOUT,
    "bf16, no dropout in attention": BF16 | ON_BRANCHES,
    "bf16, tensor, sequence, full": BF16 | TENSOR | {"sequence_parallel": True} | FULL | DROPOUT,
    "fp16, tensor, no dropout": FP16 | TENSOR | NO_DROPOUT,
    "bf16, tensor, Llama": BF16 | TENSOR | LLAMA | NO_DROPOUT,
    "bf16, ZeRO-1, full, Llama": BF16 | ZERO1 | FULL | LLAMA | NO_DROPOUT,
    "fp32": DROPOUT,
    "fp32, ZeRO-1, no dropout": ZERO1 | NO_DROPOUT,
    "fp32, ZeRO-1, full": ZERO1 | FULL | DROPOUT,
    "fp32, tensor, sequence, selective": TENSOR | {"sequence_parallel": True} | SELECTIVE | DROPOUT,
}


@dataclass(frozen=True)
class Moment:
    """Something that the profiler saw: a mark, or ``change`` bytes that the allocator took or gave back."""

    name: str
    start: int
    end: int
    change: int


def counted_state(trainer):
    """The bytes of the distinct memory of the parameters, `GradientBuckets` and `Optimizer`."""
    tensors = [*trainer.model.parameters(), *(tensor for _, tensor in local_state(trainer.optimizer))]
    tensors += [segment.gradient for segment in trainer.gradients.segments]
    tensors += [bucket.gradients for bucket in trainer.gradients.buckets if bucket.gradients is not None]
    tensors += [owner.parameters for owner in trainer.optimizer._owners if owner.layout.flat]
    spans = sorted({(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors})
    found = end = 0
    for low, high in spans:  # many are views of a bucket's buffer
        found += max(0, high - max(low, end))
        end = max(end, high)
    return found


@contextlib.contextmanager
def marked(owner, method, name):
    """A block in which each call of ``owner.method`` leaves a mark for the profiler when it ends."""
    original = getattr(owner, method)

    def called(*args, **kwargs):
        try:
            return original(*args, **kwargs)
        finally:
            with record_function(name):
                pass

    setattr(owner, method, called)
    yield
    setattr(owner, method, original)


def counted_activations(trainer):
    """(Bytes at the larger of the two moments of `formulas.activation_bytes`, bytes when the backward ends)."""
    objective, finish = trainer.objective, trainer.gradients.finish

    class Objective:
        names, unit = objective.names, objective.unit

        def __call__(self, *args):
            with record_function("FORWARD"):
                pass
            terms = objective(*args)
            with record_function("BACKWARD"):
                pass
            return terms

    def finished():
        with record_function("FINISH"):
            pass
        finish()

    trainer.objective, trainer.gradients.finish = Objective(), finished
    for group in (trainer.grid.tensor, trainer.grid.data):  # a group's first large collective maps its slots
        group.all_reduce(torch.zeros(1 << 18))
    inside = SelfAttention, "_core"
    if trainer.config.recompute_granularity == "full":
        inside = TransformerBlock, "_layer"
    with marked(*inside, "LAYER"), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        trainer.step()

    def change(event):
        return event.nbytes() if event.name() == "[memory]" else 0

    moments = sorted(
        (
            Moment(e.name(), e.start_ns(), e.start_ns() + e.duration_ns(), change(e))
            for e in seen.profiler.kineto_results.events()
        ),
        key=lambda moment: moment.start,
    )

    def start(name, after=0):
        return next(one.start for one in moments if one.name == name and one.start >= after)

    def live(at):
        return sum(one.change for one in moments if start("FORWARD") <= one.start <= at)

    backward = start("BACKWARD")
    loss = next(one for one in moments if one.name == "_CrossEntropyBackward" and one.start >= backward)
    at_loss = max(live(one.start) for one in moments if one.change and backward <= one.start <= loss.end)
    at_layer = 0
    if trainer.config.recompute_granularity is not None:  # when the tensors that only the functions held are free
        recomputed = start("LAYER", after=backward)
        at_layer = live(next(one.start for one in moments if one.change > 0 and one.start > recomputed) - 1)
    found = torch.tensor([max(at_loss, at_layer, live(backward)), live(start("FINISH"))])
    trainer.grid.world.all_reduce(found, "max")  # the rank that needs most: padding of the vocabulary is on one
    return found.tolist()


def kept(config):
    """The formulas' settings for a run on the host, without overlap unless it is asked for."""
    half = config.bf16 or config.fp16
    return formulas.KeptTensors(
        element_bytes=2 if half else 4, recompute=config.recompute_granularity or "none",
        sequence_parallel=config.sequence_parallel, hidden_dropout=config.hidden_dropout > 0,
        scores="dropped" if config.attention_dropout > 0 else "none", zero1=config.use_distributed_optimizer,
        sends_together=bool(config.overlap_grad_reduce), sent_bytes=2 if half else 0,
    )  # fmt: skip


@pytest.mark.some(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [case if number % 4 == 1 else pytest.param(case, marks=pytest.mark.long) for number, case in enumerate(CASES)],
)
def test_bytes_of_a_step_are_the_plans(trainer, world, case):
    if "tensor" in case and world.size < 2:
        pytest.skip("needs a tensor group of two ranks")
    made = trainer(world, **(SIZES | CASES[case]))
    activations, sent = counted_activations(made)
    state, grid, config = counted_state(made), made.grid, made.config
    shape = task_of(config).model().cost_shape(config.seq_length)
    planned = formulas.training_bytes(shape, config.micro_batch_size, grid.tensor.size, grid.data.size, kept(config))
    assert planned["parameters and optimizer"] == pytest.approx(state, rel=0.01)  # buckets are padded a little
    above = 0.05 if config.recompute_granularity == "selective" else 0.02  # the layer's MLP has gone by then
    assert 0.98 * activations <= planned["activations"] <= (1 + above) * activations
    assert sum(planned.values()) == pytest.approx(state + max(activations, sent), rel=above)
