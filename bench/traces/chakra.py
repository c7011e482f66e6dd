"""Read a Chakra execution trace: what each rank communicates, with whom, and in which order.

Traces written here (`bench.traces.chakra_writer`) say of every call what a replay needs. In other traces the
dependencies give the order: a rank waits for a call before the first later call that depends on it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.step_study.recording import Group
from bench.traces import chakra_order, foreign
from bench.traces.chakra_rank import ChakraRank, ranks_of
from bench.traces.chakra_writer import GROUPS
from commengine import UsageError
from trainers.files.reading import read_json

TITLE = "MLCommons Chakra"
_FILE = re.compile(r"(.+)\.(\d+)\.et")


def files(paths: Sequence[Path]) -> list[Path]:
    """The files among ``paths`` that have the names of a Chakra trace, PREFIX.RANK.et, in the order of the ranks.

    Raises UsageError if they are of several traces, or if a rank's file is missing.
    """
    named = {path: match for path in paths if (match := _FILE.fullmatch(path.name))}
    prefixes = sorted({match[1] for match in named.values()})
    if len(prefixes) > 1:
        folder = next(iter(named)).parent
        raise UsageError(
            f"{folder}: holds the traces {', '.join(prefixes[:4])}; name one of them, such as {folder / prefixes[0]}"
        )
    found = {int(match[2]): path for path, match in named.items()}
    missing = sorted(set(range(len(found))) - set(found))
    if missing:
        gone = found[max(found)].with_name(f"{prefixes[0]}.{missing[0]}.et")
        raise UsageError(f"{gone}: there is no such file, though there are files of {len(found)} ranks")
    return [found[rank] for rank in range(len(found))]


def read(folder: Path, paths: Sequence[Path], groups: Path | None = None) -> dict[str, Any]:
    """The trace of these files, one for each rank, as the JSON types of a recording.

    groups: a file of the communicator groups by number, as ASTRA-sim takes it; by default comm_groups.json beside the
    trace, if it is there. Raises UsageError or InputFileError that names the file and the node.
    """
    given = _groups_of(groups or folder / GROUPS) if groups or (folder / GROUPS).is_file() else {}
    ranks = [ChakraRank.of(rank, path, given, len(paths)) for rank, path in enumerate(paths)]
    left_out: Counter[str] = Counter()
    exact = all(rank.exact for rank in ranks)
    calls = [rank.recorded() if exact else chakra_order.calls(rank, left_out) for rank in ranks]
    return foreign.as_recording(folder, TITLE, calls, left_out)


def _groups_of(path: Path) -> dict[str, Group]:
    found = read_json(path)
    try:
        return {name: Group(f"group {name}", ranks_of(ranks)) for name, ranks in found.items()}
    except (AttributeError, ValueError):
        raise UsageError(f'{path}: want the ranks of each group by its number, such as {{"1": [0, 1]}}') from None
