"""The table of trace formats: how a trace is recognised, read and written."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.step_study import recording
from bench.step_study.recording import Recording
from bench.traces import chakra, chakra_schema, chakra_writer, kineto
from bench.traces.foreign import ForeignCall, Written, as_recording, numbered
from bench.traces.progress import check_ends
from commengine import Communicator, Trace, UsageError
from commengine.files.reading import InputFileError
from commengine.rank_zero import on_every_rank


@dataclass(frozen=True)
class TraceFormat:
    """One format.

    title: for a person. files: those of a folder that are of the format, by their names and the first bytes of one, in
    the order of the ranks. read: the calls of each rank from the files; it counts those that a replay leaves out. None:
    our own format. file: the name of a rank's file, with {} for the rank; write: writes it; None where the format is
    read only. check: raises UsageError where the format cannot be written here.
    """

    name: str
    title: str
    files: Callable[[Sequence[Path]], list[Path]]
    read: Callable[..., list[list[ForeignCall]]] | None
    file: str = ""
    write: Callable[[Written], None] | None = None
    check: Callable[[], object] = lambda: None


FORMATS = {
    one.name: one
    for one in (
        TraceFormat(
            "commengine", "bench.step", lambda paths: [path for path in paths if path.match("rank-*.jsonl")], None,
            file="rank-{}.jsonl", write=lambda one: one.trace.save(one.path),
        ),
        TraceFormat(
            "chakra", "MLCommons Chakra", chakra.files, chakra.read, "step.{}.et", chakra_writer.write_rank,
            check=chakra_schema.message_types,
        ),
        TraceFormat("kineto", "PyTorch's profiler (Kineto)", kineto.files, kineto.read),
    )
}  # fmt: skip
#: the formats that are written, by name, and the patterns of their files
WRITTEN = {name: one.file.format("*") for name, one in FORMATS.items() if one.write is not None}
#: the format that is written where none is named
DEFAULT = next(iter(WRITTEN))


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
            if found:
                return _read(one, folder, found, groups) | {"format": one.name}
    except (InputFileError, OSError) as error:
        raise UsageError(str(error)) from error
    raise UsageError(
        f"{trace}: not a recording: there is no rank-0.jsonl (bench.step --save makes one), no PREFIX.0.et (Chakra) "
        "and no .json or .json.gz of PyTorch's profiler"
    )


def _read(one: TraceFormat, folder: Path, paths: Sequence[Path], groups: Path | None) -> dict[str, Any]:
    if groups is not None and one.name != "chakra":
        raise UsageError(f"--groups goes with a Chakra trace; a trace of {one.title} has its groups")
    if one.read is None:
        return recording.read(folder)
    left_out: Counter[str] = Counter()
    calls = one.read(paths, left_out, *([groups] if groups else []))
    return as_recording(folder, one.title, calls, left_out)


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
    one = FORMATS[name]
    groups = on_every_rank(world, trace.groups)
    numbers = numbered(itertools.chain.from_iterable(world.mpi.allgather(list(groups.items()))))
    path = folder / one.file.format(world.rank)
    assert one.write is not None
    on_every_rank(world, partial(one.write, Written(path, world.rank, world.size, trace, groups, numbers, span)))
