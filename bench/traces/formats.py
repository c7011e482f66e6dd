"""The table of trace formats: how a trace is recognised, read and written."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.step_study import recording
from bench.step_study.recording import Recording
from bench.traces import chakra, chakra_schema, chakra_writer, kineto, param
from bench.traces.opening import beginning
from bench.traces.progress import check_ends
from commengine import Communicator, Trace, UsageError
from commengine.rank_zero import on_every_rank, on_rank_zero
from trainers.files.reading import InputFileError

#: writes this rank's trace into a folder, collectively: (world, folder, trace, when its step began and ended)
Writer = Callable[[Communicator, Path, Trace, tuple[float, float] | None], None]


@dataclass(frozen=True)
class TraceFormat:
    """One format.

    title: for a person. files: those of a folder that have the format's names, in order. is_one: whether a file that
    begins with these bytes can be one. read: (folder, files, file of groups or None) to the JSON types of a recording.
    written: a pattern of the files that ``write`` makes; write: None where the format is read only. check: raises
    UsageError where the format cannot be written here.
    """

    name: str
    title: str
    files: Callable[[Sequence[Path]], list[Path]]
    is_one: Callable[[bytes], bool]
    read: Callable[[Path, Sequence[Path], Path | None], dict[str, Any]]
    written: str = ""
    write: Writer | None = None
    check: Callable[[], object] = lambda: None


def _by_name(beginning: bytes) -> bool:
    """For formats whose names of files are no others': yes. `TraceFormat.read` says what is wrong with the content."""
    return True


def _ours(folder: Path, paths: Sequence[Path], groups: Path | None) -> dict[str, Any]:
    if groups is not None:
        raise UsageError("--groups goes with a Chakra trace; a recording of bench.step has its groups")
    return recording.read(folder)


def _write_ours(world: Communicator, folder: Path, trace: Trace, span: tuple[float, float] | None) -> None:
    on_every_rank(world, lambda: trace.save(folder / f"rank-{world.rank}.jsonl"))


def _groups(world: Communicator, trace: Trace) -> tuple[dict[str, list[int]], dict[tuple[str, tuple[int, ...]], int]]:
    """The ranks of this rank's groups, by name, and the numbers of all ranks' groups. Collective."""
    mine = on_every_rank(world, trace.groups)
    everyone = world.mpi.allgather(list(mine.items()))
    return mine, chakra_writer.numbered([group for of_rank in everyone for group in of_rank])


def _write_chakra(world: Communicator, folder: Path, trace: Trace, span: tuple[float, float] | None) -> None:
    groups, numbers = _groups(world, trace)
    path = folder / f"step.{world.rank}.et"
    on_every_rank(world, lambda: chakra_writer.write_rank(path, trace.events, groups, numbers, span))
    on_rank_zero(world, lambda: chakra_writer.write_groups(folder, numbers))


def _write_param(world: Communicator, folder: Path, trace: Trace, span: tuple[float, float] | None) -> None:
    groups, numbers = _groups(world, trace)
    path = folder / f"rank-{world.rank}.json"
    on_every_rank(world, lambda: param.write_rank(path, world.rank, trace.events, groups, numbers, world.size))


FORMATS = {
    one.name: one
    for one in (
        TraceFormat(
            "commengine", "bench.step's own recording", lambda paths: [p for p in paths if p.match("rank-*.jsonl")],
            _by_name, _ours, "rank-*.jsonl", _write_ours,
        ),
        TraceFormat(
            "chakra", chakra.TITLE, chakra.files, _by_name, chakra.read, "*.et", _write_chakra,
            chakra_schema.message_types,
        ),
        TraceFormat("kineto", kineto.TITLE, kineto.files, kineto.is_kineto, kineto.read),
        TraceFormat(
            "param", param.TITLE, param.files, param.is_param, param.read, "rank-*.json", _write_param,
        ),
    )
}  # fmt: skip
#: the formats that are written, by name, and the patterns of their files
WRITTEN = {one.name: one.written for one in FORMATS.values() if one.write is not None}
#: the format that is written where none is named
DEFAULT = next(iter(WRITTEN))


def add_save_format(parser: argparse.ArgumentParser, option: str) -> None:
    """Add ``--save-format``, which says in which format ``option`` writes."""
    parser.add_argument(
        "--save-format",
        choices=tuple(WRITTEN),
        help=f"with {option}: the format of the files; chakra is for ASTRA-sim, param for PARAM (default: {DEFAULT})",
    )


def chosen(name: str | None, option: str, *, given: bool) -> str:
    """The format that ``--save-format`` names, after a check that it can be written here. Rank 0 alone calls it.

    given: whether ``option`` was given. Raises UsageError.
    """
    if name is not None and not given:
        raise UsageError(f"--save-format goes with {option}")
    FORMATS[name or DEFAULT].check()
    return name or DEFAULT


def read(trace: Path, groups: Path | None = None) -> dict[str, Any]:
    """The trace in a folder, or of the files PREFIX.RANK.et, as JSON types for `parse`. Rank 0 alone calls it.

    groups: the file of a Chakra trace's groups. Raises UsageError that names the folder or the file.
    """
    if trace.is_file():
        raise UsageError(f"{trace}: is one file; give the folder {trace.parent} with the files of all ranks")
    try:
        if trace.is_dir():
            folder, paths = trace, sorted(path for path in trace.iterdir() if path.is_file())
        else:
            folder, paths = trace.parent, sorted(trace.parent.glob(f"{trace.name}.*.et"))
        for one in FORMATS.values():
            found = one.files(paths)
            if found and one.is_one(beginning(found[0])):
                return one.read(folder, found, groups) | {"format": one.name}
    except (InputFileError, OSError) as error:
        raise UsageError(str(error)) from error
    raise UsageError(
        f"{trace}: not a recording: there is no rank-0.jsonl (bench.step --save makes one), no PREFIX.0.et (Chakra) "
        "and no .json or .json.gz of PyTorch's profiler or its execution traces"
    )


def parse(data: dict[str, Any]) -> Recording:
    """The recording that `read` found. Raises UsageError if the ranks' traces do not fit, or a replay would not end."""
    found = recording.parse(data)
    if data["format"] != "commengine":
        try:
            check_ends(found)
        except UsageError as error:
            raise UsageError(f"{data['folder']}: {error}") from error
    return found


def save(world: Communicator, name: str, folder: Path, trace: Trace, span: tuple[float, float] | None = None) -> None:
    """Write this rank's trace into the recording's folder, in the format ``name``. Collective.

    An error on one rank is an error on every rank. span: when the step began and ended, on the clock of the trace; a
    Chakra trace then has its first and its last compute, too.
    """
    write = FORMATS[name].write
    assert write is not None
    write(world, folder, trace, span)
