"""The settings of a training run, under Megatron-LM's flag names, from flags and a YAML file."""

from __future__ import annotations

import math
import types
import typing
from argparse import BooleanOptionalAction
from collections.abc import Sequence
from dataclasses import Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from commengine import UsageError
from tplayers import GPTConfig, Recompute

from .options import Parser


def option(default: Any, text: str, *, choices: Sequence[str] | None = None) -> Any:
    """A field that is also a flag: its default, its help, and what it may be."""
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True)
class TrainConfig:
    """One training run. A field is the flag of the same name, with dashes."""

    # parallel layout
    tensor_model_parallel_size: int = option(1, "ranks that one model is split over; the rest is data-parallel")
    sequence_parallel: bool = option(False, "split norms, dropout and residuals over the tensor group by sequence")
    async_tensor_model_parallel_allreduce: bool | None = option(
        None, "reduce an input's gradient while the weight's is computed (default: on for devices, off on the host)"
    )
    device: str | None = option(None, "cpu, or cuda (default: cuda where there is one), one device a rank of a node")
    device_transport: str = option(
        "nccl", "how device tensors travel: NCCL, an MPI that takes their addresses, or through host memory",
        choices=("nccl", "mpi", "staged"),
    )  # fmt: skip
    distributed_timeout_minutes: float = option(
        10.0, "a collective that takes longer ends the job, with a report of who is missing; 0: no limit"
    )
    # model
    num_layers: int = option(12, "transformer layers")
    hidden_size: int = option(768, "width of the residual stream")
    num_attention_heads: int = option(12, "attention heads")
    ffn_hidden_size: int | None = option(None, "width of the feed-forward block (default 4 * hidden size)")
    seq_length: int = option(1024, "tokens a sample")
    max_position_embeddings: int | None = option(None, "positions the model knows (default seq-length)")
    hidden_dropout: float = option(0.1, "dropout on the embedding and after each branch")
    attention_dropout: float = option(0.1, "dropout on attention probabilities")
    init_method_std: float = option(0.02, "standard deviation of the initial weights")
    make_vocab_size_divisible_by: int = option(1024, "pad the vocabulary to a multiple of this, at every TP size")
    recompute_granularity: str | None = option(
        None,
        "compute again in the backward instead of keeping: each whole layer, or the inside of attention",
        choices=("full", "selective"),
    )
    compile: bool = option(False, "train with the model compiled by torch.compile; needs a C++ compiler")
    # batches and steps
    micro_batch_size: int = option(1, "samples a rank takes through the model at once")
    global_batch_size: int | None = option(None, "samples a step (default micro-batch-size * data-parallel size)")
    train_iters: int = option(1000, "steps of the run")
    exit_interval: int | None = option(None, "stop early after a step that this divides, having saved")
    seed: int = option(1234, "of initial weights, order of samples and dropout")
    # optimizer
    lr: float = option(1.5e-4, "highest learning rate")
    min_lr: float = option(1e-5, "learning rate at the end of the decay")
    lr_decay_style: str = option("cosine", "how lr decays to min-lr", choices=("constant", "linear", "cosine"))
    lr_decay_iters: int | None = option(None, "step at which min-lr is reached (default train-iters)")
    lr_warmup_iters: int = option(0, "steps over which lr rises from 0")
    weight_decay: float = option(0.01, "of AdamW; not on biases and norms")
    adam_beta1: float = option(0.9, "decay of the gradient's mean")
    adam_beta2: float = option(0.999, "decay of the gradient's square")
    adam_eps: float = option(1e-8, "added to the root of the gradient's square")
    clip_grad: float = option(1.0, "largest global gradient norm; 0 turns clipping off")
    # precision
    bf16: bool = option(False, "parameters and activations in bfloat16, with fp32 masters and gradient sums")
    fp16: bool = option(False, "the same in float16, with a scaled loss")
    loss_scale: float | None = option(None, "a constant scale of the fp16 loss (default: a dynamic one)")
    initial_loss_scale: float = option(2.0**16, "first scale of the fp16 loss")
    loss_scale_window: int = option(1000, "steps in a row without overflow after which the scale doubles")
    hysteresis: int = option(2, "overflows until the scale halves; before, they only skip their step")
    min_loss_scale: float = option(1.0, "smallest scale; an overflow there ends the run")
    # gradient reduction
    grad_reduce_in_fp32: bool = option(
        False, "reduce fp32 gradients of half parameters (default: in the parameters' dtype)"
    )
    use_distributed_optimizer: bool = option(
        False, "shard masters and AdamW's moments over the data-parallel ranks (ZeRO-1)"
    )
    overlap_grad_reduce: bool | None = option(
        None, "reduce a bucket while backward runs (default: on for devices, off on the host)"
    )
    ddp_bucket_size: int = option(4_000_000, "elements of a gradient bucket")
    # data
    data_path: str | None = option(None, "PREFIX of PREFIX.bin and PREFIX.idx, as preprocess_data writes them")
    split: str = option("969,30,1", "weights of the training, validation and test documents")
    mock_data: bool = option(False, "train on tokens drawn from a Zipf distribution, without files")
    vocab_size: int | None = option(None, "tokens of the vocabulary (default: the tokenizer's)")
    tokenizer_model: str | None = option(None, "a tokenizer.json (default PREFIX-tokenizer.json where it exists)")
    # evaluation, saving, logging
    eval_interval: int = option(1000, "steps between evaluations on the validation documents")
    eval_iters: int = option(100, "global batches an evaluation, at most the whole split; 0 turns evaluation off")
    save: str | None = option(None, "folder for checkpoints, metrics.jsonl and the report")
    load: str | None = option(
        None,
        "go on from the newest checkpoint of this folder, or from an iter_* folder; one without a checkpoint is an "
        "error, but for the folder of --save, where a new run starts",
    )
    overwrite: bool = option(
        False, "a new run first removes the checkpoints, metrics and report that an older one left in --save"
    )
    save_interval: int | None = option(None, "steps between checkpoints (default: at the end only)")
    log_interval: int = option(100, "steps between rows of metrics.jsonl")
    tensorboard_dir: str | None = option(None, "folder for TensorBoard (default SAVE/tensorboard where installed)")
    sample_tokens: int = option(64, "length of the text that the report's sample continues with")

    @property
    def positions(self) -> int:
        """How many positions the model knows."""
        return self.max_position_embeddings or self.seq_length

    def model(self) -> GPTConfig:
        """The model's shape. ``vocab_size`` must be known."""
        assert self.vocab_size is not None
        return GPTConfig(
            self.num_layers, self.hidden_size, self.num_attention_heads, self.vocab_size, self.positions,
            self.ffn_hidden_size, self.hidden_dropout, self.attention_dropout, self.init_method_std,
            make_vocab_size_divisible_by=self.make_vocab_size_divisible_by,
            sequence_parallel=self.sequence_parallel,
            recompute=typing.cast(Recompute, self.recompute_granularity),
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """All fields, as JSON types."""
        return asdict(self)


def parse(argv: Sequence[str] | None, prog: str) -> TrainConfig:
    """The settings that flags and ``--config FILE`` give; flags win. Raises OptionError, and SystemExit on --help."""
    parser = Parser(prog=prog)
    hints = typing.get_type_hints(TrainConfig)
    for item in fields(TrainConfig):
        _add(parser, item, hints[item.name])
    values = vars(parser.parse_args(argv))
    values.pop("config")
    return TrainConfig(**values)


def _add(parser: Parser, item: Field[Any], hint: Any) -> None:
    """One field as a flag."""
    flag = "--" + item.name.replace("_", "-")
    kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType] or [hint]
    text = item.metadata["help"] + ("" if item.default is None else f" (default {item.default})")
    if kinds == [bool]:
        parser.add_argument(flag, action=BooleanOptionalAction, default=item.default, help=text)
    else:
        choices = item.metadata["choices"]
        parser.add_argument(flag, type=kinds[0], default=item.default, choices=choices, help=text.replace("%", "%%"))


def validate(config: TrainConfig, world_size: int) -> None:
    """Raise UsageError, naming the option and what is valid, unless ``config`` can run on ``world_size`` ranks."""

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise UsageError(message)

    def flag(name: str) -> str:
        return f"--{name.replace('_', '-')} {getattr(config, name)}"

    for name in (
        "tensor_model_parallel_size", "num_layers", "hidden_size", "num_attention_heads", "seq_length",
        "make_vocab_size_divisible_by", "micro_batch_size", "train_iters", "log_interval", "eval_interval",
        "ddp_bucket_size", "ffn_hidden_size", "max_position_embeddings", "global_batch_size", "exit_interval",
        "lr_decay_iters", "save_interval", "vocab_size", "loss_scale_window", "hysteresis",
    ):  # fmt: skip
        value = getattr(config, name)
        require(value is None or value >= 1, f"{flag(name)}: must be at least 1")
    for name in ("lr_warmup_iters", "weight_decay", "clip_grad", "eval_iters", "min_lr", "lr", "seed", "sample_tokens",
                 "init_method_std", "adam_eps", "distributed_timeout_minutes"):  # fmt: skip
        require(0 <= getattr(config, name) < math.inf, f"{flag(name)}: must not be negative, and finite")
    require(config.adam_eps > 0, f"{flag('adam_eps')}: must be positive: rows of padding have no gradient at all")
    require(config.seed < 2**63, f"{flag('seed')}: must be below 2**63")
    for name in ("hidden_dropout", "attention_dropout", "adam_beta1", "adam_beta2"):
        require(0 <= getattr(config, name) < 1, f"{flag(name)}: must be at least 0 and below 1")
    require(not (config.bf16 and config.fp16), "--bf16 and --fp16: exclude each other; leave one of them out")
    for name in ("loss_scale", "initial_loss_scale", "min_loss_scale"):
        value = getattr(config, name)
        fits = value is None or 2.0**-126 <= value <= 2.0**127
        require(fits, f"{flag(name)}: must be positive, from 2**-126 to 2**127 (1.2e-38 to 1.7e38: fp32)")
    require(config.loss_scale is None or config.fp16, f"{flag('loss_scale')}: needs --fp16")
    fits, largest = config.min_loss_scale <= config.initial_loss_scale, config.initial_loss_scale
    require(fits, f"{flag('min_loss_scale')}: must not exceed --initial-loss-scale {largest}")
    require(config.min_lr <= config.lr, f"{flag('min_lr')}: must not exceed --lr {config.lr}")
    longest = flag("max_position_embeddings")
    require(config.seq_length <= config.positions, f"{flag('seq_length')}: must not exceed {longest}")

    tensor = config.tensor_model_parallel_size
    sizes = [n for n in range(1, world_size + 1) if world_size % n == 0]
    split = flag("tensor_model_parallel_size")
    require(world_size % tensor == 0, f"{split}: does not divide the {world_size} ranks; {sizes} do")
    require(
        not config.sequence_parallel or config.seq_length % tensor == 0,
        f"{flag('seq_length')}: with --sequence-parallel it must be a multiple of {split}",
    )
    step = config.micro_batch_size * (world_size // tensor)
    batch = config.global_batch_size or step
    require(
        batch % step == 0,
        f"{flag('global_batch_size')}: must be a multiple of --micro-batch-size {config.micro_batch_size} times the "
        f"data-parallel size {world_size // tensor}, such as {max(step, batch // step * step)}",
    )
    saved = config.save is not None
    require(config.exit_interval is None or saved, "--exit-interval: needs --save DIR, or the run is lost")
    require(config.save_interval is None or saved, "--save-interval: needs --save DIR")
    if config.mock_data:
        require(config.data_path is None, "--mock-data: cannot go with --data-path; leave one of them out")
        require(config.vocab_size is not None, "--mock-data: needs --vocab-size V")
    else:
        named = config.data_path is not None
        require(named, "--data-path: needed: PREFIX of a data set, or --mock-data --vocab-size V")
        for suffix in (".bin", ".idx"):
            path = Path(f"{config.data_path}{suffix}")
            given = Path(config.data_path or "")
            hint = f"; give the prefix alone: {given.with_suffix('')}" if given.suffix in (".bin", ".idx") else ""
            require(path.is_file(), f"--data-path {given}: {path} does not exist{hint}")
