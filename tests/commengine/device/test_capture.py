"""The watcher's question to the device, beside a thread that captures a CUDA graph."""

import shutil
import subprocess
import sys

import pytest

from commengine.device.capture import is_over
from tests.support import mpirun

#: a driver that knows the mode of the thread, as the real one does: 0 global, 1 of the thread, 2 relaxed
DRIVER = """
static __thread int now;
int mode(void) { return now; }
int cuThreadExchangeStreamCaptureMode(int *mode) { int before = now; now = *mode; *mode = before; return 0; }
"""

PROGRAM = """
import ctypes, sys
from commengine.device.capture import is_over
driver = ctypes.CDLL(sys.argv[1])
class Event:
    def query(self):
        if driver.mode() == 0:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        return self.done
event = Event()
for event.done in (False, True):
    print(is_over(event), driver.mode())
"""


class Event:
    def __init__(self, answer):
        self.answer = answer

    def query(self):
        if isinstance(self.answer, str):
            raise RuntimeError(self.answer)
        return self.answer


@pytest.mark.parametrize(
    ("answer", "over"),
    [
        (True, True),
        (False, False),
        ("CUDA error: operation not permitted when stream is capturing", False),
        ("CUDA error: unspecified launch failure", True),
    ],
)
def test_only_a_failed_device_ends_what_is_not_done(answer, over):
    assert is_over(Event(answer)) is over


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
def test_the_question_is_asked_beside_the_rule_and_the_rule_is_kept(tmp_path):
    library = tmp_path / "libcuda.so.1"
    words = ["cc", "-shared", "-fPIC", "-x", "c", "-", f"-Wl,-soname,{library.name}", "-o", str(library)]
    subprocess.run(words, input=DRIVER, text=True, check=True)
    done = mpirun.command([sys.executable, "-c", PROGRAM, str(library)], timeout=60, fresh=False)
    assert done.stdout.splitlines() == ["False 0", "True 0"], done
