"""Flip one bit of a checkpoint's files, and load it."""

import shutil

from commengine import UsageError
from tests.support.faults import runs
from tests.support.faults.parts import Case
from trainers.checkpoints import checkpoint, pointer
from trainers.settings.commands import TrainSettings

FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "checksums", "../latest")
#: of so many flips, one is tried with the whole command under mpiexec; the others in this process
WHOLE = 20

TITLE = "one bit of a checkpoint is flipped: in its tensors, their headers, its state, its checksums, or the pointer"
DEMAND = "the checkpoint is refused by one error that names the file"
CASES = 200
SHORT = [*range(1, 6), WHOLE]


def run(case: Case) -> str:
    draw = case.random
    original = runs.undisturbed(case.shared, "TP 2")
    folder = shutil.copytree(original, case.folder / "run")
    found = pointer.latest(folder)
    assert found is not None
    path = (found / FILES[case.number % len(FILES)]).resolve()
    data = bytearray(path.read_bytes())
    place = draw.randrange(len(data) if draw.random() < 0.5 else min(len(data), 4096))  # headers are short
    data[place] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
    if case.number % WHOLE:
        said = load(folder)
    else:
        log = case.folder / "log"
        status = runs.finish(runs.start("TP 2", runs.words("TP 2", folder), log), log)
        text = log.read_text()
        said = next((line for line in text.splitlines() if line.startswith("error: ")), f"status {status}")
        assert status == 2 and "Traceback" not in text, runs.tail(log)
    assert "--load" in said and str(path) in said, f"byte {place} of {path.name}: {said}"
    return path.name


def load(folder):
    """What a run says that loads the newest checkpoint of ``folder``; it compares all bytes before it reads tensors."""
    try:
        found = checkpoint.find(folder)
        assert found is not None
        checkpoint.read_state(found, TrainSettings(global_batch_size=8))
        checkpoint.compare(found)
    except UsageError as error:
        return str(error)
    return "no error"
