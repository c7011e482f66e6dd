"""Kill a rank before each change that a save makes to a file, then start the same command again."""

import os
from unittest.mock import patch

from tests.support import mpirun
from tests.support.faults import runs
from tests.support.faults.parts import Case

#: name -> (the save that is killed, how many changes rank 0 makes in it, options, flags)
MODES: dict[str, tuple[int, int, dict[str, int], list[str]]] = {
    "first": (1, 28, {}, []),
    "second": (2, 28, {}, []),
    "third, the one before the last removed": (3, 36, {"keep_last": 1}, []),
    "second, in the background": (2, 28, {}, ["--async-save"]),
}
#: changes of rank 1, which writes its share of two files
OTHERS = 8
KINDS = [
    (mode, rank, change + 1)
    for mode, (_, count, _, _) in MODES.items()
    for rank, changes in ((0, count), (1, OTHERS))
    for change in range(changes)
]

TITLE = "SIGKILL of a rank before each change that a save makes to a file: first save, later ones, in the background"
DEMAND = "the same command goes on from a whole checkpoint, or anew, and ends bit for bit as an undisturbed run"
CASES = len(KINDS)
SHORT = [KINDS.index(("first", 0, 18))]


def run(case: Case) -> str:
    mode, rank, change = KINDS[case.number]
    save, _, options, flags = MODES[mode]
    folder, log = case.folder / "run", case.folder / "killed.log"
    wanted = runs.undisturbed(case.shared, "TP 2", **options)
    words = [*runs.words("TP 2", folder, **options), *flags]
    program = str(mpirun.JOBS / "killed_save.py")
    with patch.dict(os.environ, {"KILL": f"{rank},{save},{change}"}):
        process = runs.start("TP 2", [program, *words[2:]], log)
    status = runs.finish(process, log)
    text = log.read_text(errors="replace")
    assert "Traceback" not in text, runs.tail(log)
    if status == 0:
        assert (folder / "report.json").exists()
        return "no such change"
    complete = sorted(path.parent.name for path in folder.glob("iter_*/state.json") if "." not in path.parent.name)
    log = case.folder / "again.log"
    status = runs.finish(runs.start("TP 2", words, log), log)
    assert status == 0, f"{complete} were complete; the same command ended with status {status}: {runs.tail(log)}"
    if complete:
        assert "starting from iteration " in log.read_text(), runs.tail(log)
    assert not (found := runs.differences(folder, wanted)), "; ".join(found)
    return mode
