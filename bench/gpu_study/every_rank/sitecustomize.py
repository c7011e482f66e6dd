"""Python imports this in every process of a stage of bench/gpu.sh, before anything else.

BENCH_GPU_LIMIT: the seconds of the stage; 8 seconds before its end each process writes the stacks of its threads, so
that a hang names its place. BENCH_GPU_OWN_HOSTS=1: each rank has an NCCL_HOSTID of its own, with which NCCL takes two
ranks on one GPU for ranks on two hosts.
"""

import faulthandler
import importlib
import os
import sys
from pathlib import Path

left = float(os.environ.get("BENCH_GPU_LIMIT", "0")) - 8
if left > 0:
    faulthandler.dump_traceback_later(left, exit=False)
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
