"""A tokenizer.json of others is tried in a process of its own before this process reads it.

Some files make the library ``tokenizers`` panic, abort or never end, and the process with it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

#: seconds of a core, and bytes besides 64 times those of the file, in which a file is read and a short text encoded
SECONDS, BYTES = 30, 4 << 30

# An ordinary error is told by the process that reads the file afterwards; a panic of the library is no Exception.
_PROGRAM = """
import os, resource, sys
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
    try:
        tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False)
    except Exception:
        pass
"""


def require_usable(path: Path) -> None:
    """Raise ValueError that names the file, unless the library can read it and encode a text, or says why it cannot.

    It takes 0.1 s for an ordinary file. Not collective.
    """
    limits = [str(SECONDS), str(BYTES + 64 * path.stat().st_size)]
    argv = [sys.executable, "-I", "-c", _PROGRAM, str(path), *limits]
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            errors="replace", timeout=10 * SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        status, said = -signal.SIGXCPU, ""
    else:
        status, said = done.returncode, done.stderr.strip()
    if status == 0:
        return
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        how = f"needs more than {SECONDS} s to read it and encode a few words"
    else:
        how = f"fails in a way that ends the process: {said.splitlines()[-1][:160] if said else f'status {status}'}"
    raise ValueError(f"{path}: not a tokenizer.json that can be used: the library tokenizers {how}")
