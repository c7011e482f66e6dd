"""Run pretrain_gpt, and kill it at a change that it makes to a file, from the moment when it makes its folder its own.

``KILL=CHANGE,SECONDS killed_history.py OPTIONS``: so many seconds after the moment before this change, numbered from 1.
A run without so many changes ends as usual. All writes to a file from the second one on count as one change.
"""

import os
import signal
import threading
from typing import Any

from commengine import launch
from tests.support.file_operations import FileOperations
from trainers import pretrain_gpt
from trainers.checkpoints import history

CHANGE, SECONDS = int(os.environ["KILL"].split(",")[0]), float(os.environ["KILL"].split(",")[1])
settle = history.settle
changes = writes = 0


def before(number: int, name: str) -> None:
    global changes, writes
    writes = writes + 1 if name == "pwrite" else 0
    changes += writes < 3
    if changes == CHANGE and writes < 3:
        if SECONDS:
            threading.Timer(SECONDS, os.kill, (os.getpid(), signal.SIGKILL)).start()
        else:
            os.kill(os.getpid(), signal.SIGKILL)


def watched(*words: Any) -> str | None:
    FileOperations(before).__enter__()
    return settle(*words)


history.settle = watched
launch.run(pretrain_gpt.main)
