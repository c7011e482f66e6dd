"""The table: each flag of Megatron-LM that a training command here does not have, by command, and its answer.

The flags are those of 22 versions from 2019 to 2026 (``core_v0.19.0`` and what followed it).
"""

from __future__ import annotations

from functools import cache

from .answers import Flag, Verdict
from .features import FEATURES
from .files import FILES
from .machine import MACHINE
from .model import MODEL
from .training import TRAINING

#: by what they are about
TABLE: dict[str, tuple[Verdict, ...]] = {
    "The model": MODEL, "Batches, optimizer, data, tokenizer": TRAINING, "Ranks, kernels, memory, precision": MACHINE,
    "Checkpoints, logs, watchers": FILES, "Features": FEATURES,
}  # fmt: skip


@cache
def answers(command: str) -> dict[str, tuple[Verdict, Flag]]:
    """The answer to each flag in ``command``, by the flag's name with its dashes."""
    return {
        flag.name: (answer, flag)
        for some in TABLE.values() for answer in some if command in answer.commands for flag in answer.flags
    }  # fmt: skip
