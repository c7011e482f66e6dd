"""The settings that all commands on ranks share, and those that all training runs share.

The names of the flags are Megatron-LM's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar, Self

import torch

from commengine import Communicator, ProcessGrid
from commengine.grid import divisors
from commengine.host.wire import Order
from commengine.options.declared import flag_of, given, option, require, require_ranges
from commengine.options.ranges import (
    NOT_NEGATIVE,
    AtLeastOne,
    Batch,
    Natural,
    NotNegative,
    Positive,
    Seed,
    Share,
    Text,
    ValidRange,
)

#: the signals that ``--exit-signal`` may name
SIGNALS = ("USR1", "USR2", "HUP", "QUIT", "ALRM", "XCPU", "TERM", "INT")

SIGNAL = ValidRange(
    lambda name: name.upper().removeprefix("SIG") in SIGNALS, f"must be one of {', '.join(SIGNALS)}, also as SIGUSR1"
)
POSITIVE = ValidRange(lambda value: value > 0, "must be positive: rows of padding have no gradient at all")
#: learning rates and weight decays: far above all that trains
Rate = Annotated[float, NOT_NEGATIVE, ValidRange(lambda rate: rate <= 1000, "must be at most 1000")]
Minutes = Annotated[float, NOT_NEGATIVE, ValidRange(lambda minutes: minutes <= 10**6, "must be at most 1000000")]
DEVICE = ValidRange(
    lambda device: re.fullmatch(r"cpu|cuda(:\d{1,4})?", device) is not None, "must be cpu, cuda, or cuda:N"
)
#: the words before a colon with which ``--load`` names a model of another program: ``hf:FOLDER``
OTHER_PROGRAMS = ("hf", "megatron")
_FP32 = ValidRange(
    lambda scale: 2.0**-126 <= scale <= 2.0**127, "must be positive, from 2**-126 to 2**127 (1.2e-38 to 1.7e38: fp32)"
)
LossScale = Annotated[float, _FP32]

#: what ``--load`` does in every training command, unless the command says something else
LOAD = (
    "continue from the newest checkpoint of this folder, or from this iter_* folder; it is an error if there is no "
    "checkpoint, unless this is also the folder of --save: then a new run starts"
)
#: the options that need --save, and why
NEEDS_SAVE = dict.fromkeys(("exit_interval", "exit_signal", "exit_duration_in_mins"), ", or the run is lost") | {
    "save_interval": "", "save_hf": "", "async_save": "", "check_for_spiky_loss": ", for the batches",
}  # fmt: skip


@dataclass(frozen=True)
class JobConfig:
    """The settings of every command whose ranks share a model. A field is the flag of the same name, with dashes.

    megatron: the command of which Megatron-LM's other flags are taken, too; None: none.
    """

    megatron: ClassVar[str | None] = None

    tensor_model_parallel_size: AtLeastOne = option(
        1, "ranks that one model is split over; the other factor of the ranks is data-parallel"
    )
    device: Annotated[str, DEVICE] | None = option(
        None, "cpu or cuda; each rank of a node gets a device of its own (default: cuda if every rank can have one)"
    )
    device_transport: str = option(
        "nccl", "how device tensors travel: by NCCL, by an MPI that takes device addresses, or through host memory",
        choices=("nccl", "staged"),
    )  # fmt: skip
    distributed_timeout_minutes: Minutes = option(
        10.0, "a collective that takes longer ends the job, with a report of the ranks that are missing; 0: no limit"
    )
    verify_checkpoints: bool = option(
        True, "compare a checkpoint with its checksums before loading it; a damaged file is then an error"
    )

    @property
    def stages(self) -> int:
        """The stages of the pipeline: more than one only in a command that has the option."""
        return 1

    @property
    def context_ranks(self) -> int:
        """The ranks that share a sequence: more than one only in a command that has the option."""
        return 1

    @property
    def expert_ranks(self) -> int:
        """The ranks that share experts: more than one only in a command that has the option."""
        return 1

    @property
    def replica_size(self) -> int:
        """The ranks that share a model and its samples. The ranks are this number times the data-parallel size."""
        return self.tensor_model_parallel_size * self.context_ranks * self.stages

    def grid(self, world: Communicator) -> ProcessGrid:
        """The groups of the job. Collective over ``world``."""
        return ProcessGrid(
            world, tensor=self.tensor_model_parallel_size, context=self.context_ranks, pipeline=self.stages,
            expert=self.expert_ranks,
        )  # fmt: skip

    @property
    def order(self) -> Order | None:
        """The order of the job's reductions (`commengine.Communicator`); None: as is fastest."""
        return None

    def validate(self, ranks: int) -> None:
        """Raise UsageError, naming the option and what is valid, unless this is possible on ``ranks`` ranks."""
        require_ranges(self)
        axes = {
            given(self, "tensor_model_parallel_size"): self.tensor_model_parallel_size,
            f"--context-parallel-size {self.context_ranks}": self.context_ranks,
            f"--pipeline-model-parallel-size {self.stages}": self.stages,
        }
        left, before = ranks, list[str]()
        for named, size in axes.items():
            said = f", with {' and '.join(before)}" if before else ""
            require(left % size == 0, f"{named}: does not divide the {ranks} ranks{said}; {divisors(left)} do")
            left //= size
            before += [named] if size > 1 else []

    def completed(self, ranks: int) -> Self:
        """These settings, valid for ``ranks`` ranks, with the values that only files tell; a task may read files here.

        Raises UsageError or ValueError, naming the option.
        """
        del ranks
        return self

    def to_json(self) -> dict[str, Any]:
        """All fields, as JSON types."""
        return asdict(self)


@dataclass(frozen=True)
class TrainConfig(JobConfig):
    """One training run, whatever it trains. A field is the flag of the same name, with dashes.

    A task extends this class with the settings of its model and its data (`trainers.tasks.gpt.GPTTrainConfig`), and
    extends `validate` and `completed` with them.
    """

    # parallel layout
    sequence_parallel: bool = option(False, "split norms, dropout and residuals over the tensor group by sequence")
    async_tensor_model_parallel_allreduce: bool | None = option(
        None, "reduce an input's gradient while the weight's is computed (default: on for devices, off on the host)"
    )
    compile: bool = option(False, "train with the model compiled by torch.compile; needs a C++ compiler")
    # batches and steps
    micro_batch_size: Batch = option(1, "samples that a rank takes through the model at once")
    global_batch_size: Batch | None = option(
        None, "samples of a step (default micro-batch-size * data-parallel size)", fixed=True
    )
    train_iters: AtLeastOne = option(1000, "steps of the run")
    exit_interval: AtLeastOne | None = option(
        None, "save and stop early after a step whose number is a multiple of this"
    )
    exit_signal: Annotated[str, SIGNAL] | None = option(
        None, "save and stop after the step in which this signal comes, such as USR1; SIGTERM and SIGINT always do so"
    )
    exit_duration_in_mins: Positive | None = option(
        None, "save and stop after the step in which the run has lasted this long, start included"
    )
    exit_before_limit: NotNegative = option(
        120.0, "with --save in a Slurm job: save and stop this many seconds before the job's time limit; 0: do not"
    )
    seed: Seed = option(1234, "seed of the initial weights, the order of samples and dropout", fixed=True)
    # optimizer
    lr: Rate = option(1.5e-4, "highest learning rate")
    min_lr: Rate | None = option(None, "learning rate at the end of the decay (default 1e-5, or lr if that is less)")
    lr_decay_style: str = option("cosine", "how lr decays to min-lr", choices=("constant", "linear", "cosine"))
    lr_decay_iters: AtLeastOne | None = option(None, "step at which min-lr is reached (default train-iters)")
    lr_warmup_iters: Natural | None = option(None, "steps over which lr rises from 0 (default 0)")
    weight_decay: Rate = option(0.01, "AdamW's weight decay; biases and norms do not decay")
    adam_beta1: Share = option(0.9, "decay of AdamW's mean of gradients")
    adam_beta2: Share = option(0.999, "decay of AdamW's mean of squared gradients")
    adam_eps: Annotated[float, NOT_NEGATIVE, POSITIVE] = option(
        1e-8, "added to the root of AdamW's mean of squared gradients"
    )
    clip_grad: NotNegative = option(
        1.0, "clip the gradient to this norm, taken over the whole model; 0 turns clipping off"
    )
    # precision
    bf16: bool = option(False, "parameters and activations in bfloat16, with fp32 masters and gradient sums")
    fp16: bool = option(
        False, "the same in float16, with a scaled loss; a step whose gradient overflows is skipped, and neither the "
        "learning rate nor AdamW counts it"
    )  # fmt: skip
    loss_scale: LossScale | None = option(None, "a constant scale of the fp16 loss (default: a dynamic scale)")
    initial_loss_scale: LossScale = option(2.0**16, "first dynamic scale of the fp16 loss")
    loss_scale_window: AtLeastOne = option(1000, "steps in a row without overflow after which the scale doubles")
    hysteresis: AtLeastOne = option(
        2, "number of overflows at which the scale halves; the overflows before only skip their step"
    )
    min_loss_scale: LossScale | None = option(
        None, "smallest dynamic scale; an overflow there ends the run (default 1, or initial-loss-scale if less)"
    )
    # gradient reduction
    grad_reduce_in_fp32: bool = option(
        False, "reduce the gradients of half-precision parameters in fp32 (default: in the parameters' dtype)"
    )
    use_distributed_optimizer: bool = option(
        False, "shard masters and AdamW's moments over the data x context ranks (ZeRO-1)"
    )
    overlap_grad_reduce: bool | None = option(
        None, "reduce a bucket while backward runs (default: on for devices, off on the host)"
    )
    ddp_bucket_size: AtLeastOne | None = option(
        None,
        "elements of a gradient bucket (default: 4 million on the host; on devices 40 million, or 1 million for each "
        "data-parallel rank if that is more)",
    )  # fmt: skip
    # evaluation, saving, logging
    eval_interval: AtLeastOne = option(1000, "steps between evaluations on the validation documents")
    eval_iters: Natural = option(
        100, "global batches of an evaluation, at most the whole split; 0 turns evaluation off"
    )
    save: Text | None = option(None, "folder for checkpoints, metrics.jsonl and the report")
    load: Text | None = option(None, LOAD)
    overwrite: bool = option(
        False,
        "a new run first removes the checkpoints, metrics and report that an older run left in --save; with --load "
        "SAVE/iter_N a run goes back to step N and removes what is newer",
    )
    save_interval: AtLeastOne | None = option(None, "steps between checkpoints (default: at the end only)")
    async_save: bool = option(
        False, "write checkpoints in the background: ranks copy their share in memory, and training goes on meanwhile"
    )
    save_hf: bool | None = option(
        None, "write each checkpoint for transformers, too, into its folder hf; --no-save-hf: none (default: the last "
        "one of a run)"
    )  # fmt: skip
    keep_last: AtLeastOne | None = option(
        None, "after saving, remove all but this number of the newest checkpoints (default: keep all)"
    )
    keep_every: AtLeastOne | None = option(
        None, "with --keep-last, also keep the checkpoints whose iteration is a multiple of this"
    )
    log_interval: AtLeastOne = option(100, "steps between rows of metrics.jsonl")
    log_communication_interval: Natural | None = option(
        None, "trace the collectives of the steps whose number is a multiple of this, for the report; 0: of none "
        "(default: 1 on the CPU; 100 on a GPU, or the last step of a shorter run)",
    )  # fmt: skip
    # checks while it trains
    check_replicas: AtLeastOne | None = option(
        None, "after each step whose number is a multiple of this, compare checksums of all that several ranks hold"
    )
    check_for_spiky_loss: Positive | None = option(
        None, "save the batch of a step whose loss is this many standard deviations above the last ones, such as 10"
    )
    log_straggler: bool = option(
        False, "log each rank's own time, and name a rank that keeps the others waiting; traces every step"
    )
    step_file: str | None = option(
        None, "file for the number of the step under way, which trainers.supervise asks for and removes"
    )
    log_digests: bool = option(
        False,
        "write a row of metrics.jsonl after every step, with digests of the loss, of the gradient's norm and of "
        "the weights, which trainers.compare compares with those of another run",
    )
    tensorboard_dir: Text | None = option(
        None, "folder for TensorBoard (default SAVE/tensorboard if TensorBoard is installed)"
    )

    def validate(self, ranks: int) -> None:
        """Raise UsageError, naming the option and what is valid, unless this run is possible on ``ranks`` ranks."""
        super().validate(ranks)
        require(not (self.bf16 and self.fp16), "--bf16 and --fp16: exclude each other; leave one of them out")
        require(self.loss_scale is None or self.fp16, f"{given(self, 'loss_scale')}: needs --fp16")
        fits = self.least_loss_scale <= self.initial_loss_scale
        limit = given(self, "initial_loss_scale")
        require(fits, f"{given(self, 'min_loss_scale')}: must not exceed {limit}")
        falls = self.lr_decay_style == "constant" or self.last_lr <= self.lr
        require(falls, f"{given(self, 'min_lr')}: must not exceed {given(self, 'lr')}")
        self.require_warmup(self.warmup_steps, given(self, "lr_warmup_iters"))
        replicas = ranks // self.replica_size
        step = self.micro_batch_size * replicas
        batch = self.global_batch_size or step
        require(
            batch % step == 0,
            f"{given(self, 'global_batch_size')}: must be a multiple of {given(self, 'micro_batch_size')} times the "
            f"data-parallel size {replicas}, such as {max(step, batch // step * step)}",
        )
        require(self.keep_last is None or self.save is not None, f"{given(self, 'keep_last')}: needs --save DIR")
        for name, why in NEEDS_SAVE.items():
            require(self.save is not None or not getattr(self, name), f"{flag_of(name)}: needs --save DIR{why}")
        require(
            self.keep_every is None or self.newest_kept is not None,
            f"{given(self, 'keep_every')}: needs --keep-last N, because without it every checkpoint is kept",
        )

    def require_warmup(self, steps: int, words: str) -> None:
        """Raise UsageError, which begins with ``words``, unless a warm-up of ``steps`` ends before the decay does."""
        decay = self.lr_decay_iters  # without it, a trial of a few steps may end within the warm-up
        require(decay is None or steps < decay, f"{words}: must be below {given(self, 'lr_decay_iters')}")

    @property
    def newest_kept(self) -> int | None:
        """How many of the newest checkpoints stay; None: all."""
        return self.keep_last

    @property
    def warmup_steps(self) -> int:
        """The steps over which the learning rate rises."""
        return self.lr_warmup_iters or 0

    @property
    def last_lr(self) -> float:
        """The learning rate at the end of the decay."""
        return min(1e-5, self.lr) if self.min_lr is None else self.min_lr

    @property
    def least_loss_scale(self) -> float:
        """The smallest dynamic scale of the fp16 loss."""
        return min(1.0, self.initial_loss_scale) if self.min_loss_scale is None else self.min_loss_scale

    @property
    def canonical_shards(self) -> int | None:
        """The shards in which the model computes the same bits at every layout; None: it does not."""
        return None

    @property
    def samples_at_once(self) -> int:
        """The samples of a micro-batch that goes through the model."""
        return self.micro_batch_size

    @property
    def overlap_p2p_communication(self) -> bool | None:
        """Whether a pipeline's messages have threads of their own; None: only where they cost nothing."""
        return None

    @property
    def digests(self) -> bool:
        """Whether metrics.jsonl gets the digests of every step."""
        return self.log_digests or self.canonical_shards is not None

    def require_resumable(self, saved: Mapping[str, Any]) -> None:
        """Raise UsageError unless these settings can go on with a run that has saved its settings as ``saved``.

        Settings that are marked as fixed have been compared before.
        """

    def remarks(self) -> list[str]:
        """Lines for the user about the files that the run is to read; a task may have some. Rank 0 alone calls it."""
        return []

    def verify_files(self, part: int, parts: int) -> int:
        """Read this rank's share of the files that a run is asked to verify, on every rank; a task may have such files.

        part, parts: the rank and the number of ranks. Returns the bytes that were read. Raises UsageError, naming the
        file that is damaged.
        """
        del part, parts
        return 0


def of_other_program(load: str | None) -> bool:
    """Whether ``--load`` names a model that another program saved, such as ``hf:FOLDER``, and no run."""
    return load is not None and load.partition(":")[0] in OTHER_PROGRAMS and ":" in load


def overlapped(asked: bool | None, device: torch.device) -> bool:
    """Whether to communicate while computing: ``asked``, or if that is None, on devices only.

    On the host the ranks already use all cores, so overlap would take time from the computation.
    """
    return device.type != "cpu" if asked is None else asked


def traced_interval(asked: int | None, device: torch.device, steps: int) -> int:
    """Each how many steps one is traced, 0 for none: ``asked``, or if that is None, one for the device.

    steps: of the run. The end of a trace waits for a device. So the device idles after each traced step, and nothing
    that the step has begun can overlap the next one.
    """
    if asked is not None:
        return asked
    return 1 if device.type == "cpu" else min(100, steps)


def bucket_size(asked: int | None, device: torch.device, ranks: int) -> int:
    """The largest number of elements of a gradient bucket: ``asked``, or if that is None, one for the device.

    ranks: of the data group. A ring cuts a bucket into a piece for each of them, and a link is used well by large
    pieces only. The sizes on devices are those of Megatron-LM (its `DistributedDataParallel`).
    """
    if asked is not None:
        return asked
    return 4_000_000 if device.type == "cpu" else max(40_000_000, 1_000_000 * ranks)
