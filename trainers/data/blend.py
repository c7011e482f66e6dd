"""Which data sets a run reads, and in which proportion: the words of ``--data-path``."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from commengine import UsageError
from commengine.errors import usage_errors
from commengine.files import checksums
from trainers.settings.data import CorpusOptions

from .indexed import bin_path, checksums_path, idx_path
from .samples import weight_of

VALID = "valid: PREFIX, or WEIGHT PREFIX WEIGHT PREFIX ... such as 0.7 A 0.3 B"


class WeightedPrefix(NamedTuple):
    """A data set by its prefix, and its weight: of any scale, not negative."""

    weight: Fraction
    prefix: str


def read_blend(data_path: str | Sequence[str]) -> list[WeightedPrefix]:
    """The data sets that ``--data-path`` names.

    data_path: a prefix, or weights and prefixes in turn; either the words of a command line, or a string of them (as in
    a YAML file), in which quotes keep a prefix with spaces together. Weights are probabilities of any scale.

    Raises UsageError for weights that are negative, all 0, not finite or not numbers, and for a prefix that is missing
    or named twice. It does not read the data sets.
    """
    words = [data_path] if isinstance(data_path, str) else [str(word) for word in data_path]
    there = os.path.exists(idx_path(words[0]))  # noqa: PTH110  # False for a name that is longer than any, too
    if len(words) == 1 and not there:  # a prefix may have spaces
        with usage_errors(f"--data-path {words[0]} ({VALID}): "):
            words = shlex.split(words[0]) or words
    if len(words) == 1:
        return [WeightedPrefix(Fraction(1), words[0])]
    given = f"--data-path {shlex.join(words)}"
    if len(words) % 2:
        raise UsageError(f"{given}: a weight has no prefix, or a prefix no weight; {VALID}")
    with usage_errors(f"{given} ({VALID}): "):
        found = [WeightedPrefix(weight_of(word), prefix) for word, prefix in zip(words[::2], words[1::2], strict=True)]
    if all(weight == 0 for weight, _ in found):
        raise UsageError(f"{given}: all weights are 0; at least one must be positive")
    places: dict[Path, str] = {}
    for _, prefix in found:
        if (place := Path(prefix).resolve()) in places:
            raise UsageError(f"{given}: {prefix} is named twice; add up its weights")
        places[place] = prefix
    return found


def blend_of(config: CorpusOptions) -> list[WeightedPrefix]:
    """The data sets that ``--data-path`` names; none for mock data. Raises UsageError as `read_blend` does."""
    return [] if config.data_path is None else read_blend(config.data_path)


def require_files(blend: Sequence[WeightedPrefix]) -> None:
    """Raise UsageError that names the first file which does not exist."""
    for _, given in blend:
        prefix = Path(given)
        hint = f"; give the prefix alone: {prefix.with_suffix('')}" if prefix.suffix in (".bin", ".idx") else ""
        for path in (bin_path(given), idx_path(given)):
            if not path.is_file():
                raise UsageError(f"--data-path {given}: {path} does not exist{hint}")


def verify(blend: Sequence[WeightedPrefix], part: int, parts: int) -> int:
    """Compare this rank's share of all data sets with their checksums (`commengine.files.checksums`).

    part, parts: the rank and the number of ranks; together they read every byte once. Returns the bytes that this rank
    has read. Raises UsageError that names the first file that differs, or that has no checksums.
    """
    total = 0
    for number, (_, prefix) in enumerate(blend):
        path = checksums_path(prefix)
        with usage_errors("--verify-data: "):
            if not path.is_file():
                raise ValueError(f"{path} does not exist; preprocess_data --write-checksums {prefix} writes it")
            pieces = checksums.read(path)
            for file in (bin_path(prefix), idx_path(prefix)):
                if file.name not in {piece.name for piece in pieces}:
                    raise ValueError(
                        f"{path}: has no checksum of {file.name}; preprocess_data --write-checksums {prefix} writes one"
                    )
            total += sum(checksums.verify(path, pieces, (part + number) % parts, parts))
    return total
