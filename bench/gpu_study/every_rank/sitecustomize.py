"""Python imports this in every process of a stage of bench/gpu.sh, before anything else.

BENCH_GPU_LIMIT: the seconds of the stage; 8 seconds before its end each process writes the stacks of its threads, so
that a hang names its place. BENCH_GPU_OWN_HOSTS=1: each rank has an NCCL_HOSTID of its own, with which NCCL takes two
ranks on one GPU for ranks on two hosts.
"""

import faulthandler
import importlib
import os
import sys
import time
from pathlib import Path

limit = float(os.environ.get("BENCH_GPU_LIMIT", "0"))
until = time.monotonic() + limit - 8


def watch() -> None:
    """Write the stacks 8 seconds before the end of the stage, if that is still to come."""
    if (left := until - time.monotonic()) > 0:
        faulthandler.dump_traceback_later(left, exit=False)


if limit:
    # A fork has not the thread that waits, and its interpreter would wait for that thread at its end.
    os.register_at_fork(before=faulthandler.cancel_dump_traceback_later, after_in_parent=watch, after_in_child=watch)
    watch()
ranks = [os.environ[name] for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID") if name in os.environ]
if os.environ.get("BENCH_GPU_OWN_HOSTS") == "1" and ranks:
    os.environ["NCCL_HOSTID"] = f"commengine-rank-{ranks[0]}"

# The sitecustomize that this one hides, if there is one.
here = Path(__file__).resolve().parent
path, sys.path = sys.path, [folder for folder in sys.path if Path(folder).resolve() != here]
this = sys.modules.pop("sitecustomize", sys)
try:
    importlib.import_module("sitecustomize")
except ImportError:
    pass
finally:
    sys.path = path
    sys.modules.setdefault("sitecustomize", this)
