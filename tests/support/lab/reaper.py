"""End the other processes in the network namespaces of some processes: ``python reaper.py PID...``.

It waits for the end of its standard input, which comes when the program that started it closes it, or is killed.
Daemons and the steps of batch systems leave their parents, so nobody else would end them.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

ATTEMPTS = 100  # a process may start another while it is being killed


def namespace(pid: int | str) -> int:
    """The network namespace of a process."""
    return Path(f"/proc/{pid}/ns/net").stat().st_ino


def inhabitants(namespaces: set[int]) -> list[int]:
    """The processes in these network namespaces."""
    found = []
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if path.name.isdigit() and namespace(path.name) in namespaces:
                found.append(int(path.name))
    return found


def main() -> None:
    """Find the namespaces, wait, and kill."""
    holders = {int(word) for word in sys.argv[1:]}  # they end with relay.py
    namespaces = {namespace(pid) for pid in holders} - {namespace("self")}
    print("ready", flush=True)
    sys.stdin.read()
    for _ in range(ATTEMPTS):
        running = set(inhabitants(namespaces)) - holders
        if not running:
            return
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


if __name__ == "__main__":
    main()
