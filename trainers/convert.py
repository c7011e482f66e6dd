"""Models of other programs, both ways: ``mpiexec -n 4 python -m trainers.convert --from hf FOLDER --save RUN``.

``--from hf FOLDER --save RUN`` makes a run of a model of Hugging Face, ``--from megatron FOLDER --save RUN`` of
Megatron-LM's; ``--load RUN --to hf FOLDER`` writes a run's model for transformers. A rank reads and writes its own
slices alone, so that the ranks together need the memory of one copy of the model. Without mpiexec the command runs on
one rank. The files do not depend on the number of ranks.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the other imports, which take seconds
    from .settings.command import answer_help
    from .weights.settings import ConvertSettings

    answer_help(ConvertSettings, "convert")

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from commengine import Communicator, ProcessGrid, UsageError, launch
from commengine.options.declared import given, make_writable, require
from commengine.rank_zero import on_rank_zero
from trainers.run.startup import grid_of
from trainers.settings.command import Command
from trainers.settings.rules import Faults, Rule, first
from trainers.settings.saving import OTHER_PROGRAMS
from trainers.tasks.kinds import task_of

from .checkpoints import folder_lock, run_folder
from .checkpoints.checkpoint import CONVERTED_FROM, Progress
from .checkpoints.checkpoint_writer import CheckpointWriter
from .run.startup import job_settings, watched
from .trained import DTYPES, Trained, load_trained
from .weights.export import copy_small_files, export, require_replaceable
from .weights.settings import ConvertSettings
from .weights.tokenizer_files import tokenizer_file


def origin_of(config: ConvertSettings) -> tuple[str, str] | None:
    """The program and the path of ``--from``."""
    return _two("from", config.from_, OTHER_PROGRAMS)


def target_of(config: ConvertSettings) -> str | None:
    """The folder of ``--to``."""
    found = _two("to", config.to, ("hf",))
    return None if found is None else found[1]


def _faults(s: ConvertSettings, _: int) -> Faults:
    origin, target = origin_of(s), target_of(s)
    yield (
        (origin is None) == (target is None),
        "--from PROGRAM FOLDER --save RUN, or --load RUN --to hf FOLDER: needed: one of the two",
    )
    if origin is not None:
        yield s.save is None, "--save DIR: needed with --from: the folder of the new run"
        yield s.load is not None, f"{given(s, 'load')}: goes with --to; leave it out"
        yield s.ckpt_step is not None, f"{given(s, 'ckpt_step')}: goes with --load; leave it out"
        yield not Path(origin[1]).exists(), f"--from {' '.join(origin)}: there is no such folder"
    else:
        yield s.load is None, "--load DIR: needed with --to: the --save folder of a run"
        yield s.save is not None, f"{given(s, 'save')}: goes with --from; leave it out"
    program = None if origin is None else origin[0]
    yield s.rotary_interleaved and program != "hf", "--rotary-interleaved: goes with --from hf; leave it out"
    for name in ("vocab_size", "num_attention_heads"):
        yield getattr(s, name) is not None and program != "megatron", f"{given(s, name)}: goes with --from megatron"


COMMAND = Command("convert", ConvertSettings, rules=[Rule("from_ to", first(_faults))])


def _two(option: str, words: str | Sequence[str] | None, programs: Sequence[str]) -> tuple[str, str] | None:
    """The two words of an option. Raises UsageError for any other number, or another program."""
    if words is None:
        return None
    said = words if isinstance(words, str) else " ".join(words)
    want = f"want one of {', '.join(programs)}, and a folder, such as --{option} hf FOLDER"
    require(not isinstance(words, str) and len(words) == 2, f"--{option} {said}: {want}")
    require(words[0] in programs, f"--{option} {said}: {want}")
    return words[0], words[1]


def main(world: Communicator) -> None:
    """One rank of the command. Rank 0 reads the flags; an error on any rank is raised on every rank."""
    config = job_settings(world, COMMAND)
    with watched(config, world) as comm, grid_of(config, comm) as grid:
        if (origin := origin_of(config)) is not None:
            _import(config, origin, grid)
        else:
            _export(config, grid)


def _import(config: ConvertSettings, origin: Sequence[str], grid: ProcessGrid) -> None:
    """Write the checkpoint of a run without steps. Collective over the grid's world."""
    folder, world, load = Path(config.save or ""), grid.world, ":".join(origin)

    def free() -> None:
        run_folder.require_apart(folder, load)
        there = [path.name for path in run_folder.left(folder)]
        words = f"--save {folder}: holds a run already ({', '.join(there[:3])}); give another, or --overwrite"
        require(config.overwrite or not there, words)

    on_rank_zero(world, free)
    names = ("vocab_size", "num_attention_heads", "rotary_interleaved")
    asked = {name: getattr(config, name) for name in names}
    try:
        dtype = None if config.dtype is None else DTYPES[config.dtype]
        trained = load_trained(load, grid, dtype=dtype, asked=asked)
    except UsageError as error:  # on all ranks; it names the option of the other commands
        raise UsageError(str(error).replace(f"--load {load}", f"--from {' '.join(origin)}")) from error
    function = task_of(trained.settings).of_the_model()
    settings = {name: value for name, value in asdict(trained.settings).items() if name in function}
    on_rank_zero(world, lambda: make_writable("--save", folder))
    with folder_lock.hold(world, folder):

        def clear() -> dict[str, Any]:
            free()  # another job may have written a run meanwhile
            run_folder.remove(folder)
            if (origin := trained.settings.hf_files) is None:
                return {}
            small = folder / run_folder.OF_OTHERS
            copy_small_files(Path(origin), small)
            return {"hf_files": str(small), "tokenizer_model": tokenizer_file(small)}

        settings |= on_rank_zero(world, clear) | {CONVERTED_FROM: load}
        CheckpointWriter(folder, Progress(0, 0), trained.model, None, settings, grid, kind=trained.kind).finish()
    _say(world, f"written to {folder}: {_parameters(trained)} of {load}; start from it with --load {folder}")
    if not trained.has_tokenizer:
        _say(world, "it has no tokenizer: commands that read or write text need --tokenizer-model FILE")
        _say(world, trained.problem)


def _export(config: ConvertSettings, grid: ProcessGrid) -> None:
    """Write the model of ``--load`` into the folder of ``--to``. Collective over the grid's world."""
    folder, world = Path(target_of(config) or ""), grid.world

    def free() -> None:
        require_replaceable("--to hf", folder, overwrite=config.overwrite)

    def place() -> str:
        free()
        make_writable("--to hf", folder.parent)
        return str(folder.resolve())  # a link to a folder stays, and so does one whose last part is ".."

    place_of_export = Path(on_rank_zero(world, place))
    dtype = None if config.dtype is None else DTYPES[config.dtype]
    trained = load_trained(
        config.load or "", grid, iteration=config.ckpt_step, dtype=dtype, verify=config.verify_checkpoints
    )
    export(trained.model, grid, place_of_export, task_of(trained.settings).small_files(), may_replace=free)
    _say(world, f"written to {folder}: {_parameters(trained)} of {trained.checkpoint}")


def _parameters(trained: Trained) -> str:
    return f"the {trained.kind.upper()} of {trained.settings.num_layers} layers, {trained.settings.hidden_size} wide"


def _say(world: Communicator, line: str) -> None:
    if world.rank == 0:
        print(line, flush=True)


if __name__ == "__main__":
    launch.run(main, device="cpu")
