"""Tells the steps of the model in words."""

from __future__ import annotations

#: the cell of a fence that stands between stores
FENCE = 255

#: what a rank asks for, by its code in protocol.pml
CALLS = {
    1: "all_reduce in a window", 2: "reduce_scatter in a window", 3: "all_gather from a window",
    4: "all_gather into a window", 5: "broadcast from rank 0 in a window", 6: "broadcast from rank 1 in a window",
    **{7 + more: f"all_gather through slots, chunks: {more + 1}" for more in range(3)},
    **{10 + more: f"broadcast from rank {more // 3} through slots, chunks: {more % 3 + 1}" for more in range(6)},
    **{16 + more: f"all_reduce through slots, chunks: {more + 1}" for more in range(3)},
    19: "all_to_all_v", 20: "all_gather_v", 21: "a call by MPI that is compared",
}  # fmt: skip

_CELLS = (
    "round", "words of a call (set 0)", "words of a call (set 1)", "numbers of rows (set 0)", "numbers of rows (set 1)",
    "chunks filled", "chunks reduced", "unfit", "slot 0", "slot 1", "result in slot 0", "result in slot 1",
    "private input",
)  # fmt: skip

_WRONG = {
    "mismatch==unfit": "not all ranks report numbers of rows that do not fit, or they do though all fit",
    "mismatch==differ": "a rank does not find that the calls differ, or finds it though they are equal",
    "named": "the file has lost its name before all ranks have opened it",
    "/4": "a rank has read numbers of rows of another call",
    "value==": "the rank has read data of another call",
    "invalid end state": "nobody can go on: a rank waits for what nobody will write",
}


def _cell(owner: int, number: int) -> str:
    name = _CELLS[number] if number < len(_CELLS) else f"window, row {number - len(_CELLS)}"
    return f"{name} of rank {owner}"


def told(rank: int, what: int, owner: int, number: int, value: int) -> str:
    """Return an event of the model in words: the arguments are those of SAY in memory.pml."""
    cell = _cell(owner, number)
    did = {
        1: f"writes {cell} = {value}",
        2: f"reads {cell} = {value}",
        3: "fence",
        4: f"fills {cell}",
        5: f"takes what is in {cell} on the others",
        6: f"the others can see {cell} = {value}",
        7: f"calls {CALLS.get(value, value)}",
        8: f"gives up the wait for {cell}",
    }
    return f"rank {rank} · {did[3 if number == FENCE else what]}"


def wrong(error: str) -> str:
    """Return what the assertion that failed says."""
    return next((said for part, said in _WRONG.items() if part in error.replace(" ", "") or part in error), error)
