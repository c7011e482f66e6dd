"""A tokenizer.json of others is tried in a process of its own before this process reads it.

Some files make the library ``tokenizers`` panic, abort or never end, and the process with it. A file is tried once: a
process remembers the contents that it has tried, and `share` tells all ranks those of rank 0.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import xxhash

from commengine import Communicator
from commengine.rank_zero import broadcast_json

#: seconds of a core, and bytes besides 64 times those of the file, in which a file is read and a short text encoded
SECONDS, BYTES = 30, 4 << 30
#: the most bytes of such a file
MOST = 1 << 30

# An ordinary error is told by the process that reads the file afterwards; a panic of the library is no Exception.
_PROGRAM = """
import ctypes, os, resource, sys
if sys.platform.startswith("linux"):
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: it ends with the thread that waits for it
seconds, size = map(int, sys.argv[2:])
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
resource.setrlimit(resource.RLIMIT_AS, (size, size))
os.environ["TOKENIZERS_PARALLELISM"] = "false"
try:
    import tokenizers
    tokenizer = tokenizers.Tokenizer.from_file(sys.argv[1])
except Exception:
    sys.exit()
for text in ("Two words, 2 \\n", "\\u00e9\\u6f22\\U0001f642 x"):
    for special in (False, True):
        try:
            tokenizer.decode(tokenizer.encode(text, add_special_tokens=special).ids, skip_special_tokens=False)
        except Exception:
            pass
"""

#: the signals by which a fault of a program ends it, or a limit that it runs into; any other comes from somebody else
_FAULTS = {
    signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGXCPU,
    signal.SIGKILL, signal.SIGSYS, signal.SIGXFSZ, signal.SIGPIPE,
}  # fmt: skip
#: how often the process is started again after such a signal
_TRIES = 5
#: the digests of files that were tried and can be used
_usable: set[str] = set()


def share(world: Communicator, path: str | os.PathLike[str] | None = None) -> None:
    """Let the files that rank 0 has tried count on all ranks, which then start no process. Collective over ``world``.

    path: a file that rank 0 tries first; who reads it raises the errors.
    """
    if world.rank == 0 and path is not None:
        with contextlib.suppress(OSError, ValueError):
            require_usable(Path(path))
    _usable.update(broadcast_json(world, sorted(_usable)))


def require_usable(path: Path) -> None:
    """Raise ValueError that names the file, unless the library can read it and encode a text, or says why it cannot.

    It takes 0.1 s for an ordinary file, and nothing for one that was tried. Not collective.

    The process has a group of its own: a signal to the group of this one, as a batch system and Ctrl-C send it, says
    nothing about the file. One that reaches the process all the same most often ends this one, too; if not, the file is
    tried again.
    """
    size = path.stat().st_size
    if size > MOST:
        raise ValueError(f"{path}: has {size:,} bytes, and a tokenizer.json has at most {MOST:,}")
    digest = xxhash.xxh3_128_hexdigest(path.read_bytes())
    if digest in _usable:
        return
    limits = [str(SECONDS), str(BYTES + 64 * size)]
    argv = [sys.executable, "-I", "-c", _PROGRAM, str(path), *limits]
    for _ in range(_TRIES):
        try:
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                errors="replace", timeout=10 * SECONDS, check=False, process_group=0,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            status, said = -signal.SIGXCPU, ""
        else:
            status, said = done.returncode, done.stderr.strip()
        if status == 0:
            _usable.add(digest)
            return
        if status > 0 or -status in _FAULTS:
            break
    else:
        raise ValueError(f"{path}: the process that tries it was ended by signal {-status} {_TRIES} times")
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        how = f"needs more than {SECONDS} s to read it and encode a few words"
    else:
        how = f"fails in a way that ends the process: {said.splitlines()[-1][:160] if said else f'status {status}'}"
    raise ValueError(f"{path}: not a tokenizer.json that can be used: the library tokenizers {how}")
