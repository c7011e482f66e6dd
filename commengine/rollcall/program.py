"""The program of one rank, with a watcher beside it. Run as a file: it imports the standard library alone."""

from __future__ import annotations

import atexit
import faulthandler
import itertools
import json
import linecache
import mmap
import os
import runpy
import signal
import struct
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

#: a dump of the stack, from C, wherever the program is; and a handler that Python runs when it is between two steps
SAMPLE, MOVED = signal.SIGRTMIN + 9, signal.SIGRTMIN + 10
#: asks for a report
REPORT = signal.SIGUSR2
#: shared with the watcher: whether the program is over, and how often Python ran the handler
SEEN = struct.Struct("=BI")
#: as many letters of a value as a report shows
LETTERS = 40
#: the innermost frames of a deep recursion, as many as faulthandler dumps
DEPTH = 100


def main() -> None:
    """Start the watcher, and run the program as Python would."""
    settings, *words = json.loads(sys.argv[1]), *sys.argv[2:]
    watched(settings)
    sys.argv = words
    fresh = types.ModuleType("__main__")
    sys.modules["__main__"] = fresh
    if settings["module"]:
        sys.path[0] = str(Path.cwd())
        runpy._run_module_as_main(words[0])  # type: ignore[attr-defined]
        return
    sys.path[0] = str(Path(words[0]).resolve().parent)
    fresh.__dict__.update(__file__=words[0], __builtins__=__builtins__)
    exec(compile(Path(words[0]).read_bytes(), words[0], "exec", dont_inherit=True), fresh.__dict__)


def watched(settings: dict[str, Any]) -> None:
    """Let a watcher ask this process where it is: by signals, and, when Python runs, by a thread."""
    stacks, asked, moves = (os.memfd_create(name) for name in ("stacks", "asked", "moves"))
    os.ftruncate(moves, SEEN.size)
    seen, number, process = mmap.mmap(moves, SEEN.size), itertools.count(1), os.getpid()

    def moved(*_: object) -> None:
        if os.getpid() == process:
            SEEN.pack_into(seen, 0, 0, next(number) % 2**32)

    def ends() -> None:  # Python takes its handlers away, and a signal must not end the process then
        if os.getpid() != process:  # a forked child, which shares the memory
            return
        SEEN.pack_into(seen, 0, 1, 0)
        for number in (SAMPLE, MOVED):
            signal.signal(number, signal.SIG_IGN)

    atexit.register(ends)
    signal.signal(SAMPLE, signal.SIG_IGN)  # faulthandler leaves it so
    faulthandler.register(SAMPLE, file=stacks, all_threads=True)
    signal.signal(MOVED, moved)
    signal.siginterrupt(MOVED, False)
    if signal.getsignal(REPORT) is signal.SIG_DFL:
        faulthandler.register(REPORT, file=asked, all_threads=False)
    questions, ask = os.pipe()
    answer, answers = os.pipe()
    threading.Thread(target=_answer, args=(questions, answers, threading.main_thread().ident), daemon=True).start()
    files = {"stacks": stacks, "asked": asked, "moves": moves, "ask": ask, "answer": answer}
    words = json.dumps({**settings, **files, "process": process})
    watcher = str(Path(__file__).with_name("watcher.py"))
    output = None if settings["rank"] == 0 else subprocess.DEVNULL
    subprocess.Popen(
        [sys.executable, "-I", watcher, words],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=output, pass_fds=tuple(files.values()),
    )  # fmt: skip
    for file in (ask, answer):
        os.close(file)


def _answer(questions: int, answers: int, main: int) -> None:
    """For each letter that comes, say where the main thread is, with the values in its innermost call."""
    while os.read(questions, 1):
        frame = sys._current_frames().get(main)
        found = described(frame) if frame else []
        del frame
        try:
            os.write(answers, json.dumps(found).encode() + b"\n")
        except OSError:
            return


def described(frame: types.FrameType | None) -> list[list[Any]]:
    """The stack from ``frame`` outwards: file, line, function, and what is called there with which values."""
    found: list[list[Any]] = []
    while frame is not None and frame.f_code.co_filename != __file__ and len(found) < DEPTH:
        called = _called(frame) if len(found) < 4 else ""
        found.append([frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, called])
        frame = frame.f_back
    return found


def _called(frame: types.FrameType) -> str:
    """The expression that ``frame`` computes, with the values of its arguments where they are simple names."""
    import ast

    try:
        line, end, first, last = list(frame.f_code.co_positions())[frame.f_lasti // 2]
        lines = [linecache.getline(frame.f_code.co_filename, n) for n in range(line or 0, (end or 0) + 1)]
        lines[-1] = lines[-1].encode()[:last].decode()
        lines[0] = lines[0].encode()[first:].decode()
        call = ast.parse("".join(lines).strip(), mode="eval").body
        if not isinstance(call, ast.Call):
            return ""
        given = [("", one) for one in call.args] + [
            (f"{one.arg}=" if one.arg else "**", one.value) for one in call.keywords
        ]
        return f"{ast.unparse(call.func)}({', '.join(name + _shown(one, frame) for name, one in given)})"
    except Exception:  # a report lacks the values then
        return ""


def _shown(argument: Any, frame: types.FrameType) -> str:
    """An argument, with its value if it is a name or an attribute of one: nothing of the program's is called."""
    import ast

    text = ast.unparse(argument)
    if not isinstance(argument, ast.Name):
        return text[:LETTERS]
    scope = frame.f_locals if argument.id in frame.f_locals else frame.f_globals
    value: Any = scope.get(argument.id)
    if isinstance(value, (int, float, str)):
        return repr(value)[:LETTERS]
    if type(value).__module__.partition(".")[0] in ("numpy", "torch", "cupy") and hasattr(value, "shape"):
        return f"{text}: {value.dtype} {list(value.shape)}"
    return text[:LETTERS]


if __name__ == "__main__":
    main()
