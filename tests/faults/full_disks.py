"""Fill the disk of a run's folder at any point of its saves, then start the same command with more room."""

import random

from tests.support import small_disk
from tests.support.faults import runs
from tests.support.faults.parts import Case
from trainers.checkpoints import pointer

ROOM = 64_000
#: kilobytes at which saves through MPI-IO hung for ever, and 24 others; a checkpoint of this run has about 1600
SIZES = (8, 120, 236, 240, 690, 1500, *(random.Random(12).sample(range(12, 7000), 24)))

TITLE = "a disk of 8 kB to 7 MB fills up while a run writes its checkpoints (1.6 MB each), metrics and report"
DEMAND = (
    "one error on all ranks that names the file, within the timeout; the checkpoints before are whole; with more room "
    "the same command ends bit for bit as an undisturbed run"
)
CASES = len(SIZES)
SHORT = [SIZES.index(240)]


def why_not() -> str | None:
    """Whether this user may mount a disk."""
    return small_disk.why_not() or None


def run(case: Case) -> str:
    wanted = runs.undisturbed(case.shared, "TP 2")
    disk, log = case.folder / "disk", case.folder / "full.log"
    with small_disk.small_disk(disk, SIZES[case.number]):
        folder = disk / "run"
        words = runs.words("TP 2", folder)
        status = runs.finish(runs.start("TP 2", words, log), log, 75)  # the run's timeout is 30 s
        text = log.read_text(errors="replace")
        outcome = "nothing was too large"
        if status != 0:
            outcome = "an error"
            assert "Traceback" not in text and "missing: rank" not in text, runs.tail(log)
            errors = [line for line in text.splitlines() if line.startswith("error: ")]
            assert len(errors) == 1 and str(folder) in errors[0] and "No space left on device" in errors[0], errors
        newest = pointer.latest(folder)
        assert not list(folder.glob("iter_*.tmp")), "a checkpoint that was not finished fills the disk"
        small_disk.resize(disk, ROOM)
        log = case.folder / "again.log"
        status = runs.finish(runs.start("TP 2", words, log), log)
        assert status == 0, f"with room the same command ended with status {status}: {runs.tail(log)}"
        if newest is not None and outcome == "an error":
            assert f"starting from iteration {int(newest.name[5:])} " in log.read_text(), runs.tail(log)
        assert not (found := runs.differences(folder, wanted)), "; ".join(found)
    return outcome
