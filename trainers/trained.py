"""The model, the settings and the tokenizer of a run, from its checkpoint, at any tensor-parallel size.

::

    def main(world: Communicator) -> None:
        with ProcessGrid(world, tensor=2) as grid:
            trained = load_trained("runs/main", grid)
            ids = torch.tensor([trained.tokenizer.encode("Hello")])
            logits = trained.model(ids)  # this rank's columns
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from commengine import Communicator, ProcessGrid, UsageError
from commengine.errors import usage_errors
from commengine.options.declared import require, require_ranges
from commengine.rank_zero import on_every_rank, on_rank_zero
from tplayers import Transformer
from tplayers.placement import unfilled_parameters
from trainers.settings import derived, loading
from trainers.settings.commands import TransformerSettings
from trainers.settings.job import JobOptions
from trainers.settings.saving import of_other_program

from .checkpoints import checkpoint, pointer
from .data.corpus import require_vocabulary
from .data.stream import SourceRecord
from .data.tokenizer import Tokenizer
from .run.startup import grid_of, watched
from .tasks.fitting import require_split
from .tasks.kinds import TASKS, task_of
from .tasks.other_models import Kinds, kinds_of, require_kind, settings_of_other
from .tokenizing import probe
from .tokenizing.ends import end_tokens
from .training.precision import parameter_dtype
from .weights.opening import fill_model, open_other
from .weights.tokenizer_files import without_tokenizer

if TYPE_CHECKING:
    from .checkpoints.state_file import SavedState

Settings = TypeVar("Settings", bound=JobOptions)

#: the first parts of the names of the parameters of the heads that `trainers.finetune` puts on a BERT
_OF_TASKS = {"classifier", "span_head"}

#: the dtypes in which a trained model can compute, by their names
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in loading.DTYPES}


@dataclass(frozen=True)
class Trained:
    """A model that a run has trained.

    model: in eval mode, on the grid's device, with this rank's shards of it.
    settings: those of the run, but the grid's tensor-parallel size, no sequence parallelism, no recomputation, and
    ``pad_attention_heads``, so that the grid need not divide the heads. kind: "gpt", "bert" or "t5". checkpoint: the
    folder that was read. iteration: the steps after which it was saved. sources: the checkpoint's record of each data
    set that the run has read. end_tokens: those at which a text of the model ends.
    problem: why there is no tokenizer, the same on all ranks; "" if there is one.
    """

    model: Transformer
    settings: TransformerSettings
    kind: str
    checkpoint: Path
    iteration: int
    sources: Sequence[SourceRecord]
    end_tokens: Sequence[int]
    _tokenizer: Tokenizer | None = field(repr=False)
    problem: str = field(repr=False)

    @property
    def has_tokenizer(self) -> bool:
        """Whether `tokenizer` raises no error; the same on all ranks."""
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer. Raises UsageError, on every rank that asks, if there is none or it cannot be read."""
        if self._tokenizer is None:
            raise UsageError(self.problem)
        return self._tokenizer


def load_trained(
    folder: str | os.PathLike[str], grid: ProcessGrid, *, kind: Kinds = None, iteration: int | None = None,
    dtype: torch.dtype | None = None, tokenizer: str | os.PathLike[str] | None = None, verify: bool = True,
    asked: Mapping[str, Any] | None = None,
) -> Trained:  # fmt: skip
    """The model of the run in ``folder``, whatever layout of ranks, precision or optimizer the run had.

    It reads the weights and the settings of a checkpoint, each rank its own shards, and no optimizer state. It takes no
    lock and writes no file, so it may read the folder of a run that is going on.

    folder: the ``--save`` folder of a training command, or one of the ``iter_*`` folders in it; or ``hf:FOLDER`` or
    ``megatron:FOLDER``, a model that another program saved (`trainers.weights`). grid: its tensor groups share the
    model, which is on its device; with a pipeline each of them has a stage. kind: "gpt", "bert" or "t5", or several of
    them, if no other model will do. iteration: of the checkpoint; None for the newest. dtype: of the parameters; None
    for the run's. tokenizer: a tokenizer.json or BERT's vocab.txt in place of the run's; if its vocabulary is another
    one, rank 0 says so on its standard error. verify: first compare the files that are read with their checksums.
    asked: arguments of `open_other`, for files that do not say everything.

    Collective over ``grid.world``, with the same arguments on every rank. Raises UsageError, on all ranks, if there is
    no such checkpoint, if it is damaged or holds another kind of model, or if the model does not split over the grid.
    """
    grid.require_axes("load_trained", "tensor", "data", "pipeline")
    if of_other_program(load := os.fspath(folder)):
        return _load_other(load, grid, kind=kind, iteration=iteration, dtype=dtype, tokenizer=tokenizer, asked=asked)

    def described() -> list[Any]:
        found, kind_found, state = saved_model(Path(folder), kind, iteration, verify=verify)
        settings = read_settings(found, TASKS[kind_found].settings, state.settings, lambda made: task_of(made).model())
        settings = replace(
            settings, tensor_model_parallel_size=grid.tensor.size, pipeline_model_parallel_size=grid.pipeline.size,
            num_layers_per_virtual_pipeline_stage=None, context_parallel_size=1, cp_comm_type=None,
            sequence_parallel=False, recompute_granularity=None, pad_attention_heads=True,
        )  # fmt: skip
        _require_split(settings, grid)
        read = None if state.data is None else state.data.model_dump()
        own = parameter_dtype(bf16=settings.bf16, fp16=settings.fp16)
        if checkpoint.CONVERTED_FROM in state.settings:  # may be float64, in which nothing trains
            own = checkpoint.parameters_dtype(found)
        return [str(found), kind_found, state.iteration, asdict(settings), read, str(own).removeprefix("torch.")]

    name, kind_found, steps, values, read, own = on_rank_zero(grid.world, described)
    found = Path(name)
    settings = TASKS[kind_found].settings(**values)

    def fill(model: Transformer) -> None:
        checkpoint.load_model(found, model, grid.world, verify=verify)

    own_or_asked = DTYPES[own] if dtype is None else dtype
    return _trained(fill, settings, grid, own_or_asked, found, steps, tokenizer, read)


def _load_other(
    load: str, grid: ProcessGrid, *, kind: Kinds, iteration: int | None, dtype: torch.dtype | None,
    tokenizer: str | os.PathLike[str] | None, asked: Mapping[str, Any] | None,
) -> Trained:  # fmt: skip
    """`load_trained` of a model that another program saved. Collective."""
    other = on_every_rank(grid.world, lambda: open_other(load, **(asked or {})))
    with contextlib.closing(other):
        asked_or_found = other.dtype if dtype is None else dtype

        def described() -> Any:
            if iteration is not None:
                raise UsageError(f"--ckpt-step {iteration}: --load {load} is no run; leave it out")
            require_kind(load, other.kind, kind)
            settings: TransformerSettings = settings_of_other(TASKS[other.kind].settings, other, load)
            multiple = math.lcm(settings.make_vocab_size_divisible_by, grid.tensor.size)
            settings = replace(
                settings, tensor_model_parallel_size=grid.tensor.size, make_vocab_size_divisible_by=multiple,
                bf16=asked_or_found == torch.bfloat16, fp16=asked_or_found == torch.float16, pad_attention_heads=True,
                pipeline_model_parallel_size=grid.pipeline.size,
            )  # fmt: skip
            _require_split(settings, grid)
            return asdict(settings)

        settings = TASKS[other.kind].settings(**on_rank_zero(grid.world, described))

        def fill(model: Transformer) -> None:
            fill_model(load, other, model, model.config, grid.world)

        place = Path(load.partition(":")[2])
        return _trained(fill, settings, grid, asked_or_found, place, 0, tokenizer)


def _require_split(settings: TransformerSettings, grid: ProcessGrid) -> None:
    """Raise UsageError unless the model splits over the grid. Not collective."""
    require_split(task_of(settings).model(), settings, grid.world.size)
    stages, layers = grid.pipeline.size, derived.layers(settings)
    named = f"--pipeline-model-parallel-size {stages}"
    require(stages <= layers, f"{named}: must be at most {layers}, the layers of the model")


def _trained(
    fill: Callable[[Transformer], None], settings: TransformerSettings, grid: ProcessGrid, dtype: torch.dtype,
    found: Path, steps: int, tokenizer: str | os.PathLike[str] | None,
    read: Mapping[str, Any] | None = None,
) -> Trained:  # fmt: skip
    """The result of `load_trained`. read: the checkpoint's record of the data (`SampleStream.record`). Collective."""
    with unfilled_parameters():
        model = task_of(settings).stage(grid, dtype)
    fill(model)
    model.requires_grad_(False).to(grid.world.device).eval()
    vocabulary = None if read is None else read["vocabulary"]
    probe.share(grid.world, tokenizer if tokenizer is not None else settings.tokenizer_model)
    try:
        text, problem = on_every_rank(grid.world, lambda: _tokenizer_of(settings, tokenizer, vocabulary)), ""
    except UsageError as error:  # on all ranks; a model is worth something without it
        text, problem = None, str(error)
    if grid.world.rank == 0 and text is not None and vocabulary not in (None, text.identity()):
        said = (
            f"--tokenizer-model {tokenizer}: has another vocabulary than the tokenizer with which the run was trained"
        )
        print(said, file=sys.stderr, flush=True)
    sources = [] if read is None else [SourceRecord(**one) for one in read["sources"] if one["identity"]]
    ends = on_every_rank(grid.world, lambda: _end_tokens(settings, text))
    return Trained(model, settings, settings.kind, found, steps, sources, ends, text, problem)


def _end_tokens(settings: TransformerSettings, text: Tokenizer | None) -> list[int]:
    """Those at which transformers ends a text of the model that the run came from, or the tokenizer's end of a text."""
    with usage_errors("--load: "):
        found = None if settings.hf_files is None else end_tokens(Path(settings.hf_files))
    if found is not None:
        return found
    return [] if text is None or text.end_token is None else [text.eod]


def _tokenizer_of(
    settings: TransformerSettings, asked: str | os.PathLike[str] | None, vocabulary: str | None = None
) -> Tokenizer:
    """The tokenizer ``asked`` for, or the run's. Raises UsageError if there is none, or none for this vocabulary.

    vocabulary: the `Tokenizer.identity` of the run's, which must still be that of its file; None if it is not known.
    """
    path = settings.tokenizer_model if asked is None else os.fspath(asked)
    other = "name one with --tokenizer-model FILE"
    if path is None:
        why = "the run has no tokenizer, because it was trained on token ids alone"
        if settings.hf_files is not None:
            why = without_tokenizer(Path(settings.hf_files))
        raise UsageError(f"--load: {why}; {other}")
    try:
        found = task_of(settings).with_own_tokens(Tokenizer.from_file(path))
    except (OSError, ValueError) as error:
        hint = f"; if the run's tokenizer has moved, {other}" if asked is None else ""
        raise UsageError(f"--tokenizer-model: {error}{hint}") from error
    require_vocabulary(found, path, settings.vocab_size)
    if asked is None and vocabulary not in (None, found.identity()):
        raise UsageError(
            f"--tokenizer-model: {path}: has another vocabulary than the tokenizer of that name with which the run was "
            "trained: was it replaced since? Name the run's own with --tokenizer-model FILE"
        )
    return found


@contextlib.contextmanager
def loaded(
    config: loading.LoadOptions, world: Communicator, *, kind: Kinds = None
) -> Iterator[tuple[Trained, ProcessGrid]]:
    """The trained model that the settings name, and the grid of ranks that they ask for, for a ``with`` block.

    config: valid for ``world``. kind: as for `load_trained`, which raises the errors. Collective over ``world``, as is
    the end of the block.
    """
    with watched(config, world) as comm, grid_of(config, comm) as grid:
        assert config.load is not None
        dtype = None if config.dtype is None else DTYPES[config.dtype]
        trained = load_trained(
            config.load, grid, kind=kind, iteration=config.ckpt_step, dtype=dtype, tokenizer=config.tokenizer_model,
            verify=config.verify_checkpoints,
        )  # fmt: skip
        yield trained, grid


def saved_model(
    folder: Path, wanted: Kinds = None, iteration: int | None = None, *, verify: bool
) -> tuple[Path, str, SavedState]:
    """(The checkpoint that is asked for, the kind of its model, what its ``state.json`` says); not collective.

    The arguments are those of `load_trained`. Raises UsageError that names the checkpoints that are there, or the kind
    of model that was found.
    """
    from .checkpoints import state_file  # pydantic takes as long to import as a small checkpoint to load

    found = checkpoint.find(folder) if iteration is None else folder / pointer.name_of(iteration)
    if found is None:
        raise checkpoint.missing(folder)
    if not (found / pointer.STATE).is_file():
        there = pointer.names(folder) or "none"
        raise UsageError(f"--load {folder}: holds no checkpoint of iteration {iteration}; checkpoints there: {there}")
    state = checkpoint.saved_state(found, verify=verify)
    kind = state_file.kind_of(state)
    if kind not in TASKS:
        tops = {name.partition(".")[0] for name in state.parameters}
        more, less = sorted(tops - state_file.OF_GPT - state_file.OF_SOME_GPTS), sorted(state_file.OF_GPT - tops)
        others = ", ".join(more[:3]) or f"without {', '.join(less)}"
        tuned = kind == "finetune" or tops & _OF_TASKS
        what = "a model of trainers.finetune" if tuned else "no GPT, BERT or T5"
        raise UsageError(
            f"--load {found}: holds {what} (its parameters: {others}); give the --save folder of "
            f"{_commands(kinds_of(wanted) or tuple(TASKS))}"
        )
    require_kind(str(found), kind, wanted, f"; give the --save folder of {_commands(kinds_of(wanted))}")
    return found, kind, state


def _commands(kinds: Sequence[str]) -> str:
    return " or ".join(f"trainers.pretrain_{kind}" for kind in kinds)


def read_settings(
    found: Path, kind: type[Settings], saved: Mapping[str, Any], check: Callable[[Any], object] = lambda _: None
) -> Settings:
    """The settings of type ``kind`` that a checkpoint's ``state.json`` holds; not collective.

    saved: as it stands there. A setting that its version did not have has its default. check: called with the settings;
    may raise ValueError. Raises UsageError, naming the file and the setting, for a value that no option takes.
    """
    from pydantic import TypeAdapter, ValidationError  # it takes as long to import as a small checkpoint to load

    from commengine.files.schema import told

    known = {item.name for item in fields(kind)}
    try:
        settings: Settings = TypeAdapter(kind).validate_python(
            {name: value for name, value in saved.items() if name in known}
        )
        require_ranges(settings)
        check(settings)
    except ValueError as error:
        wrong = f".{told(error)}" if isinstance(error, ValidationError) else f": {error}"
        raise checkpoint.cannot_load(found, ValueError(f"{found / pointer.STATE}: settings{wrong}")) from error
    return settings
